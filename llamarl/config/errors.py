"""Exceptions that several rooms know: a user's mistake, and the loss of other ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches


class ConfigError(ValueError):
    """A setting that cannot work: the message names the option, its value and the fix, in one sentence."""


_OPTION = re.compile(r"(?<![\w/.-])--(?:(resume|overwrite|merge|trust)|(name|output|steps?))\b")
"""Options that functions of Python have as keywords: flags, and those with a value."""


@contextmanager
def told_in_python() -> Iterator[None]:
    """Names what a ConfigError calls by the option of a command, `--resume`, as Python does: `resume=True`."""
    try:
        yield
    except ConfigError as error:
        error.args = (_OPTION.sub(lambda found: f"{found[1]}=True" if found[1] else f"`{found[2]}`", str(error)),)
        raise


MOST_NAMES = 5
"""Most names that a hint offers."""


class RanksLost(RuntimeError):
    """Ranks of this executor died, failed or stayed silent; the message says who waited for what. It is never the first
    cause: who raises it is well."""


_LONG = {"lr": "learning_rate", "wd": "weight_decay"}
"""Full names of settings, by what people write for short."""
_NOT_HERE = {"dpo": "there is no DPO here, which learns from pairs of answers without sampling any"}
"""Names of other things than the nearest known one."""


def near_names(name: str, known: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns full names of settings or options, such as `trainer.learning_rate`, whose last part is `name`, or else
    nearly that. `known` has full names by their last part."""
    name = name.rpartition(".")[2].replace("-", "_")
    last = name if name in known else _LONG.get(name, "")
    if last not in known:
        near = get_close_matches(name, known, n=1, cutoff=min(0.75 + 0.2 / max(len(name), 1), 1.0))
        last = near[0] if near else ""
    return list(known.get(last, ()))[:MOST_NAMES]


def one_of(names: Iterable[str]) -> str:
    """Text such as "did you mean `--a.b` or `--c.b`?"."""
    return f"did you mean {' or '.join(f'`{name}`' for name in names)}?"


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a message about an unknown name: the nearest known one, or else all of them (or `otherwise`)."""
    names = list(known)
    if name in _NOT_HERE:
        return f"{_NOT_HERE[name]}; known: {', '.join(names)}"
    cutoff = min(0.6 + 0.5 / max(len(name), 1), 1.0)  # of short names, half of the letters are equal by chance
    near = [one for one in names if one == _LONG.get(name) or (len(name) > 2 and one.startswith(name))]
    near = near or get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean `{near[0]}`?" if near else otherwise or f"known: {', '.join(names)}"
