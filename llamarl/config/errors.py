"""The one exception for a user's mistake."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """A setting that cannot work: the message names the option, its value and the fix, in one sentence."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a message about an unknown name: the nearest known one, or else all of them (or `otherwise`)."""
    names = list(known)
    near = get_close_matches(name, names, n=1)
    return f"did you mean `{near[0]}`?" if near else otherwise or f"known: {', '.join(names)}"
