"""`Reward`: base class of every reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llamarl.types import Outcome, RewardItem, RewardResult


class Reward(ABC):
    """Scores responses. Members are dataclasses whose fields are their options."""

    @abstractmethod
    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result per item, in order. A bad response is WRONG or INVALID; it never raises."""

    # Most rewards hold nothing, so the empty body is their implementation.
    def close(self) -> None:  # noqa: B027
        """Ends worker processes. May be called twice; no scoring afterwards."""


def right(value: float) -> RewardResult:
    """The response is right."""
    return RewardResult(outcome=Outcome.SCORE, value=value)


def wrong(value: float, reason: str) -> RewardResult:
    """The response is wrong."""
    return RewardResult(outcome=Outcome.WRONG, value=value, reason=reason)


def invalid(reason: str) -> RewardResult:
    """The response could not be judged."""
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=reason)
