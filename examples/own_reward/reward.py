"""Example of a reward: shorter responses earn more.

llamarl train examples/own_reward/run.toml
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards import Reward, right, wrong
from llamarl.types import RewardItem, RewardResult


@dataclass
class Brevity(Reward):
    """Falls from 1 for an empty response to 0 at `limit` characters."""

    limit: int = 200
    """Length in characters at which the reward is 0."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        shares = [1 - len(item.response) / self.limit for item in items]
        return [right(share) if share > 0 else wrong(0.0, f"over {self.limit} characters") for share in shares]
