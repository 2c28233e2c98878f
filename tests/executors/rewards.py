"""Rewards of tests, named by `package.module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward
from llamarl.types import Outcome, RewardItem, RewardResult

NO_RESULTS = {
    "NaN": [RewardResult(outcome=Outcome.SCORE, value=float("nan"))] * 2,
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
