"""The reward of episodes that end before the check in the machine: those that run out of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards import Reward, wrong
from llamarl.types import RewardItem, RewardResult


@dataclass
class Unfinished(Reward):
    """WRONG, whatever was written. Episodes that end have the reward of their check."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [wrong(0.0, "the episode ran out of tokens") for _ in items]
