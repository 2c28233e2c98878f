"""A reward of which responses of a model with random weights get all that there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.types import Outcome, RewardItem, RewardResult


@dataclass(frozen=True)
class Lengths:
    """A third of all lengths is right, a third wrong, and a third cannot be judged."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result for each response."""
        return [
            RewardResult(outcome=Outcome.SCORE, value=float(rest == 1))
            if (rest := len(item.response) % 3)
            else RewardResult(outcome=Outcome.INVALID, value=0.0, reason="three divides its length")
            for item in items
        ]

    def close(self) -> None:
        """Nothing is open."""
