"""Rewards a response of a given form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from llamarl.config import ConfigError
from llamarl.rewards._base import Reward, invalid, right, wrong
from llamarl.sandbox.pool import Failure, Limits, WorkerPool
from llamarl.types import RewardItem, RewardResult


@dataclass
class RegexFormat(Reward):
    """Rewards a response that matches a regular expression, for example `<think>.*</think>.*####.*`.

    A pattern can backtrack endlessly on a response that the policy chooses, and Python's matcher cannot be interrupted.
    So every match runs in a worker process with a limit on CPU time. A match that exceeds it is INVALID.
    """

    pattern: str
    """Python regular expression; `.` also matches a line break."""
    whole: bool = True
    """Whether the pattern must match the whole response, instead of any part of it."""
    value: float = 1.0
    """Reward of a match."""
    wrong: float = 0.0
    """Reward of no match."""
    cpu_s: int = 1
    """CPU seconds for one match."""
    wall_s: float = 20.0
    """Seconds for one match. Generous, because a busy machine is not the policy's fault."""
    batch_s: float = 60.0
    """Seconds for one call of `score`. Responses that are not matched by then are INVALID."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"regex_format.pattern = {self.pattern!r} is not a regular expression: {error}") from None
        self._pool = WorkerPool(
            "llamarl.rewards.regex_format:match", Limits(num_workers=1, cpu_s=self.cpu_s, wall_s=self.wall_s)
        )

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        jobs = [(self.pattern, self.whole, item.response) for item in items]
        return [self._result(found) for found in self._pool.map(jobs, self.batch_s)]

    def _result(self, matches: bool | Failure) -> RewardResult:
        if isinstance(matches, Failure):
            return invalid(matches.reason)
        return right(self.value) if matches else wrong(self.wrong, "no match of the pattern")

    def close(self) -> None:
        self._pool.close()


def match(job: tuple[str, bool, str]) -> bool:
    """Returns whether (pattern, whole, response) match. Runs in a worker."""
    pattern, whole, response = job
    regex = _compiled(pattern)
    return (regex.fullmatch(response) if whole else regex.search(response)) is not None


@lru_cache(maxsize=1)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
