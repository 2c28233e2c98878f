"""Errors that several packages use: a user's mistake, and the loss of other ranks. Also hints for misspelled names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from llamarl.config.elsewhere import ELSEWHERE, PARTS


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence with the option, its value and the fix."""


_OPTION = re.compile(r"(?<![\w/.-])--(?:(resume|overwrite|merge|trust)|(name|output|steps?))\b")
"""Command options that Python functions take as keywords: flags, and options with a value."""


_GIVEN = re.compile(r"(?:[^\s:]*/)?\.given/[0-9a-f]{32}\.jsonl:(\d+)")
"""Line of a file that holds rows from Python."""
P = ParamSpec("P")
R = TypeVar("R")


def told_in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that users call from Python. Its ConfigError names arguments as Python does, `resume=True`
    for `--resume`, and rows by their number. ConfigError and KeyboardInterrupt end with one sentence and without the
    frames below the call, because they report what the user gave or did. An exception of a user's own code stays as
    the cause."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            text = _OPTION.sub(lambda found: f"{found[1]}=True" if found[1] else f"`{found[2]}`", str(error))
            error.args = (_GIVEN.sub(lambda found: f"row {int(found[1]) - 1}", text),)
            raise error.with_traceback(None) from error.__cause__
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(*(error.args or ("interrupted",))) from None

    return called


MOST_NAMES = 5
"""Most names in one hint."""


class RanksLost(RuntimeError):
    """Ranks of this executor died, failed or did not answer. The message says which rank waited for what. Another rank
    is the root cause, never the rank that raises this error."""


def known_hint(name: str, known: Mapping[str, Sequence[str]]) -> str:
    """Returns a hint about an unknown setting or option: known settings with the same last part, or the setting that
    has this name in another framework. Empty if there is neither.

    Args:
        name: dotted or not. Only its last part is compared.
        known: full names, such as `trainer.learning_rate`, by their last part.
    """
    last = _last(name)
    if last in known:
        return one_of(known[last][:MOST_NAMES])
    meant = ELSEWHERE.get(last, ())
    if isinstance(meant, str):
        return meant if "learning_rate" in known else ""  # only for commands that take settings of a run
    return one_of(found) if (found := [one for dotted in meant for one in _named(dotted, known)]) else ""


def near_hint(name: str, known: Mapping[str, Sequence[str]]) -> str:
    """Returns a hint about an unknown setting or option: known names whose last part is spelled like that of `name`.
    Empty if there are none."""
    last = _last(name)
    near = get_close_matches(last, known, n=1, cutoff=min(0.75 + 0.2 / max(len(last), 1), 1.0))
    return one_of(known[near[0]][:MOST_NAMES]) if near else ""


def _last(name: str) -> str:
    return name.rpartition(".")[2].replace("-", "_")


def _named(dotted: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the full names of a setting among the `known` names, which may be options: `--steps`."""
    return [one for one in known.get(_last(dotted), ()) if one.lstrip("-") == dotted]


def one_of(names: Iterable[str]) -> str:
    """Returns text such as "did you mean `--a.b` or `--c.b`?"."""
    return f"did you mean {' or '.join(f'`{name}`' for name in names)}?"


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Returns the end of a message about an unknown name: the nearest known name, or else `otherwise`, or all names."""
    names, meant = list(known), ELSEWHERE.get(name, PARTS.get(name, ""))
    if isinstance(meant, str) and " " in meant:
        return f"{meant}; known: {', '.join(names)}"
    others = {_last(one) for one in meant} if isinstance(meant, tuple) else {meant}
    cutoff = min(0.6 + 0.5 / max(len(name), 1), 1.0)  # in short names, half of the letters match by chance
    near = [one for one in names if one in others or (len(name) > 2 and one.startswith(name))]
    near = near or get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean `{near[0]}`?" if near else otherwise or f"known: {', '.join(names)}"
