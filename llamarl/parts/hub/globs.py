"""`Glob`: a path pattern, matched in time proportional to pattern length times path length.

`*` and `?` stay inside a folder, `**` does not; `[0-9]` and `{train,test}` mean what they do in a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from llamarl.config.errors import ConfigError

MAX_CHARS = 1024
"""Maximum characters of a pattern."""
MAX_ALTERNATIVES = 256
"""Maximum number of alternatives that the braces of a pattern expand to."""
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", re.DOTALL)
_SPECIAL = re.compile(r"[*?\[]")


class Glob:
    """A pattern."""

    def __init__(self, pattern: str) -> None:
        """Raises ConfigError if the pattern is too long or has too many alternatives."""
        if len(pattern) > MAX_CHARS:
            raise ConfigError(f"data_files: a pattern has {len(pattern):,} characters, and at most {MAX_CHARS} may be")
        one = list(islice(_expanded(pattern.removeprefix("./")), MAX_ALTERNATIVES + 1))
        if len(one) > MAX_ALTERNATIVES:
            raise ConfigError(f"data_files: {pattern!r:.80} stands for more than {MAX_ALTERNATIVES} patterns")
        self._all = [_Plain(text) for text in dict.fromkeys(one)]

    def fullmatch(self, path: str) -> bool:
        """Returns whether the pattern matches the whole path."""
        return any(one.matches(path) for one in self._all)

    def filtered(self, paths: Iterable[str]) -> Iterator[str]:
        """Yields the paths that match."""
        return filter(self.fullmatch, paths)


def _expanded(pattern: str) -> Iterator[str]:
    """Yields the alternatives of a pattern with braces. An unpaired brace stands for itself."""
    start = pattern.find("{")
    while start >= 0:
        depth, commas = 0, [start]
        for at in range(start, len(pattern)):
            depth += (pattern[at] == "{") - (pattern[at] == "}")
            if pattern[at] == "," and depth == 1:
                commas.append(at)
            if not depth:
                for left, right in zip(commas, [*commas[1:], at], strict=True):
                    yield from _expanded(pattern[:start] + pattern[left + 1 : right] + pattern[at + 1 :])
                return
        start = pattern.find("{", start + 1)
    yield pattern


class _Plain:
    """A pattern without braces. The positions that a prefix of the path can reach are bits of one number, and each
    character advances all of them at once."""

    def __init__(self, pattern: str) -> None:
        special = _SPECIAL.search(pattern)
        self._prefix = pattern[: special.start()] if special else pattern
        self._is_literal = special is None
        self._tokens = list[str]()
        self._folders = 0
        """Positions of `**/`, whose `**` and `/` are both optional."""
        for token in _TOKEN.findall(pattern[len(self._prefix) :]):
            self._folders |= (token == "**/") << len(self._tokens)
            self._tokens += ("**", "/") if token == "**/" else (token,)
        self._everywhere = sum(1 << place for place, token in enumerate(self._tokens) if token == "**")
        self._inside = sum(1 << place for place, token in enumerate(self._tokens) if token == "*")
        self._steps = dict[str, int]()
        """Positions that each letter advances, by letter."""

    def matches(self, path: str) -> bool:
        """Returns whether the pattern matches the whole path."""
        if self._is_literal or not path.startswith(self._prefix):
            return path == self._prefix
        places = self._entered(1)
        for letter in path[len(self._prefix) :]:
            stays = places & (self._everywhere | (self._inside if letter != "/" else 0))
            if letter not in self._steps:
                self._steps[letter] = self._steps_of(letter)
            places = stays | self._entered((places & self._steps[letter]) << 1 | stays << 1)
            if not places:
                return False
        return bool(places >> len(self._tokens) & 1)

    def _entered(self, places: int) -> int:
        """Adds the positions after tokens that can match nothing."""
        may_be_nothing = self._everywhere | self._inside
        while (more := places | (places & may_be_nothing) << 1 | (places & self._folders) << 2) != places:
            places = more
        return places

    def _steps_of(self, letter: str) -> int:
        found = 0
        for place, token in enumerate(self._tokens):
            if token in ("*", "**"):
                continue  # they stay
            fits = _in_class(token, letter) if len(token) > 2 else token == letter
            found |= (letter != "/" if token == "?" else fits) << place
        return found


def _in_class(token: str, letter: str) -> bool:
    """Returns whether `[0-9]` or `[!0-9]` contains a letter."""
    inside, is_in, at = token[1:-1], False, 0
    if negated := inside[0] in "!^" and len(inside) > 1:
        at = 1
    while at < len(inside):
        if at + 2 < len(inside) and inside[at + 1] == "-":
            is_in |= inside[at] <= letter <= inside[at + 2]
            at += 3
        else:
            is_in |= inside[at] == letter
            at += 1
    return is_in != negated
