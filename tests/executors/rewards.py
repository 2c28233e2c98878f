"""Rewards of tests, named by `package.module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward
from llamarl.types import Outcome, RewardItem, RewardResult

NO_RESULTS = {
    "NaN": [RewardResult(outcome=Outcome.SCORE, value=float("nan"))] * 2,
    "too large to be summed": [RewardResult(outcome=Outcome.SCORE, value=-1e308)] * 2,
    "a number that no float holds": [RewardResult(outcome=Outcome.SCORE, value=10**400)] * 2,
    "text": ["good", "bad"],
    "too few": [RewardResult(outcome=Outcome.SCORE, value=1.0)],
}
"""What a reward of a user's own may answer to two responses."""


@dataclass
class Careless(Reward):
    """Answers with what is no result."""

    how: str

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return NO_RESULTS[self.how]  # type: ignore[return-value]


@dataclass
class EvenLength(Reward):
    """Knows responses by the number of their characters alone."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(outcome=Outcome.SCORE, value=float(len(item.response) % 2 == 0)) for item in items]


@dataclass
class Thirds(Reward):
    """Right, wrong, or beyond judgement, by the rest of a response's length divided by three."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        broken = RewardResult(outcome=Outcome.INVALID, value=0.0, reason="three divides its length")
        rests = [len(item.response) % 3 for item in items]
        return [RewardResult(outcome=Outcome.SCORE, value=float(rest == 1)) if rest else broken for rest in rests]
