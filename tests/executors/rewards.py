"""Rewards of tests, named by `package.module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward
from llamarl.types import Outcome, RewardItem, RewardResult


@dataclass
class EvenLength(Reward):
    """Knows responses by the number of their characters alone."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(outcome=Outcome.SCORE, value=float(len(item.response) % 2 == 0)) for item in items]
