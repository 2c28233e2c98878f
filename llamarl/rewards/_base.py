"""`Reward`: base class of every reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any

from llamarl.types import Outcome, RewardItem, RewardResult

MAX_REWARD = 1e30
"""Beyond it, either way, sums and squares of rewards are no numbers any more."""


class Reward(ABC):
    """Scores responses. Members are dataclasses whose fields are their options."""

    @property
    def asks_others(self) -> bool:
        """Whether scoring asks somebody else, who may take money for it."""
        return False

    @abstractmethod
    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result per item, in order. A bad response is WRONG or INVALID; it never raises."""

    def written(self, answer: str) -> str | None:
        """A response that gives the data's answer in the form that this reward reads; None: it has no such form."""
        return None

    # Most rewards hold nothing, so the empty body is their implementation.
    def close(self) -> None:  # noqa: B027
        """Ends worker processes. May be called twice; no scoring afterwards."""


def written(reward: object, answer: str) -> str | None:
    """`Reward.written` of whatever has a `score`, as a user's own reward may have no more."""
    write = getattr(reward, "written", None)
    return write(answer) if callable(write) else None


def right(value: float) -> RewardResult:
    """The response is right."""
    return RewardResult(outcome=Outcome.SCORE, value=value)


def wrong(value: float, reason: str) -> RewardResult:
    """The response is wrong."""
    return RewardResult(outcome=Outcome.WRONG, value=value, reason=reason)


def invalid(reason: str) -> RewardResult:
    """The response could not be judged."""
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=reason)


def absent(reason: str) -> RewardResult:
    """The reward has no opinion about the row."""
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=reason, is_absent=True)


def sound(result: Any) -> RewardResult:
    """A result that a user's code gave; one that is none, or whose value nobody can reckon with, judges nothing, and
    None is an absent result."""
    if result is None:
        return absent("the reward gave None: no opinion about this row")
    is_result = isinstance(result, RewardResult) and isinstance(result.outcome, Outcome) and type(result.reason) is str
    value: Any = result.value if is_result else result
    if is_result and isinstance(value, Real) and abs(value) <= MAX_REWARD:  # type: ignore[operator]  # NaN is not
        return result
    said = _shown(value)
    return invalid(f"the reward gave {said}, which is not a result with a finite value of at most {MAX_REWARD:g}")


def _shown(value: Any) -> str:
    """The beginning of a value's text, or its type, whatever a user's code has made it."""
    if isinstance(value, str | bytes | None | bool | float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value[:100] if isinstance(value, str | bytes) else value)
    return f"a {type(value).__name__}"
