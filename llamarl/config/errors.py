"""Errors that several packages use: a user's mistake, and the loss of other ranks. Also hints for misspelled names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence with the option, its value and the fix."""


_OPTION = re.compile(r"(?<![\w/.-])--(?:(resume|overwrite|merge|trust)|(name|output|steps?))\b")
"""Command options that Python functions take as keywords: flags, and options with a value."""


@contextmanager
def told_in_python() -> Iterator[None]:
    """Rewrites options in the message of a ConfigError as Python arguments: `--resume` becomes `resume=True`."""
    try:
        yield
    except ConfigError as error:
        error.args = (_OPTION.sub(lambda found: f"{found[1]}=True" if found[1] else f"`{found[2]}`", str(error)),)
        raise


MOST_NAMES = 5
"""Most names in one hint."""


class RanksLost(RuntimeError):
    """Ranks of this executor died, failed or did not answer. The message says which rank waited for what. Another rank
    is the root cause, never the rank that raises this error."""


_LONG = {"lr": "learning_rate", "wd": "weight_decay"}
"""Full names of settings, by common abbreviation."""
_NOT_HERE = {"dpo": "llamarl has no DPO, which learns from pairs of answers without sampling any"}
"""Explanations for names whose nearest known name would mislead."""


def near_names(name: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns full names of settings or options, such as `trainer.learning_rate`, whose last part is `name`. Returns
    the nearest match if no last part equals `name`. `known` maps last parts to full names."""
    name = name.rpartition(".")[2].replace("-", "_")
    last = name if name in known else _LONG.get(name, "")
    if last not in known:
        near = get_close_matches(name, known, n=1, cutoff=min(0.75 + 0.2 / max(len(name), 1), 1.0))
        last = near[0] if near else ""
    return list(known.get(last, ()))[:MOST_NAMES]


def one_of(names: Iterable[str]) -> str:
    """Returns text such as "did you mean `--a.b` or `--c.b`?"."""
    return f"did you mean {' or '.join(f'`{name}`' for name in names)}?"


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Returns the end of a message about an unknown name: the nearest known name, or else `otherwise`, or all names."""
    names = list(known)
    if name in _NOT_HERE:
        return f"{_NOT_HERE[name]}; known: {', '.join(names)}"
    cutoff = min(0.6 + 0.5 / max(len(name), 1), 1.0)  # in short names, half of the letters match by chance
    near = [one for one in names if one == _LONG.get(name) or (len(name) > 2 and one.startswith(name))]
    near = near or get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean `{near[0]}`?" if near else otherwise or f"known: {', '.join(names)}"
