"""Compares the response with the answer, word for word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward, right, wrong
from llamarl.types import RewardItem, RewardResult


@dataclass
class Exact(Reward):
    """Right if response and answer are the same text, except for white space around them."""

    correct: float = 1.0
    """Reward of a right answer."""
    wrong: float = 0.0
    """Reward of any other response."""
    ignore_case: bool = False
    """Whether to compare without regard to case."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [
            right(self.correct)
            if self._tidy(item.response) == self._tidy(item.answer)
            else wrong(self.wrong, "not the answer, word for word")
            for item in items
        ]

    def written(self, answer: str) -> str:
        return answer

    def _tidy(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()
