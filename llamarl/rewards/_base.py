"""`Reward`: base class of every reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import Any

from llamarl.types import Outcome, RewardItem, RewardResult

MAX_REWARD = 1e30
"""Largest absolute value of a reward. Sums and squares of larger ones are not finite."""


class Reward(ABC):
    """Scores responses. Members are dataclasses whose fields are their options."""

    @property
    def asks_others(self) -> bool:
        """True if scoring calls another service, which may charge for it."""
        return False

    @abstractmethod
    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Returns one result per item, in order. A bad response is WRONG or INVALID and does not raise."""

    def written(self, answer: str) -> str | None:
        """Returns a response with the data's answer in the form that this reward reads. None means that there is no
        such form."""
        return None

    # Most rewards have nothing to close.
    def close(self) -> None:  # noqa: B027
        """Ends worker processes. May be called twice. The reward cannot score afterwards."""


def written(reward: object, answer: str) -> str | None:
    """Returns `Reward.written` of a reward, or None if a user's own reward has no such method."""
    write = getattr(reward, "written", None)
    return write(answer) if callable(write) else None


def right(value: float) -> RewardResult:
    """Returns the result of a right response."""
    return RewardResult(outcome=Outcome.SCORE, value=value)


def wrong(value: float, reason: str) -> RewardResult:
    """Returns the result of a wrong response."""
    return RewardResult(outcome=Outcome.WRONG, value=value, reason=reason)


def invalid(reason: str) -> RewardResult:
    """Returns the result of a response that could not be judged."""
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=reason)


def absent(reason: str) -> RewardResult:
    """Returns the result of a reward without an opinion about the row."""
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=reason, is_absent=True)


def sound(result: Any) -> RewardResult:
    """Checks a result of a user's code. A result of another type or with a non-finite value becomes INVALID, and None
    becomes absent."""
    if result is None:
        return absent("the reward gave None: no opinion about this row")
    is_result = isinstance(result, RewardResult) and isinstance(result.outcome, Outcome) and type(result.reason) is str
    value: Any = result.value if is_result else result
    if is_result and isinstance(value, Real) and abs(value) <= MAX_REWARD:  # type: ignore[operator]  # NaN is not
        return result
    said = _shown(value)
    return invalid(f"the reward gave {said}, which is not a result with a finite value of at most {MAX_REWARD:g}")


def _shown(value: Any) -> str:
    """Returns the beginning of a value's text, or its type. Works for any value of a user's code."""
    if isinstance(value, str | bytes | None | bool | float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value[:100] if isinstance(value, str | bytes) else value)
    return f"a {type(value).__name__}"
