"""What executors answer. No torch: the controller reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llamarl.types import RewardResult, Rollout


class DecodingWork(NamedTuple):
    """What a generator has done since its start, as sums over its forwards: a line through (rows, seconds) is in them.

    Seconds are processor time on a CPU, where others may use the core too, and wall time on other devices.
    """

    decode_steps: float = 0
    """Forwards without prefill."""
    decode_rows: float = 0
    """Sum of the rollouts in them."""
    decode_rows_squared: float = 0
    """Sum of the squares of the same."""
    decode_s: float = 0.0
    """Seconds of these forwards."""
    decode_rows_s: float = 0.0
    """Sum of rollouts times seconds."""
    prefill_steps: float = 0
    """Forwards with prefill."""
    prefill_rows: float = 0
    """Sum of the rollouts that decoded in them."""
    prefill_tokens: float = 0
    """Prompt tokens computed in them."""
    prefill_s: float = 0.0
    """Seconds of these forwards."""
    background_s: float = 0.0
    """Processor seconds of the process outside its executor's thread: messages."""

    def forward(self, rows: int, prefill_tokens: int, seconds: float) -> DecodingWork:
        """One forward more."""
        if prefill_tokens:
            return self.plus(DecodingWork(0, 0, 0, 0.0, 0.0, 1, rows, prefill_tokens, seconds))
        return self.plus(DecodingWork(1, rows, rows * rows, seconds, rows * seconds))

    def plus(self, other: DecodingWork) -> DecodingWork:
        """Both together."""
        return DecodingWork(*(a + b for a, b in zip(self, other, strict=True)))

    def since(self, start: DecodingWork) -> dict[str, float]:
        """What came after `start`, by name."""
        return {name: float(a - b) for name, a, b in zip(self._fields, self, start, strict=True)}


NO_WORK = DecodingWork()


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Finished rollouts of a generator, and where it stands."""

    rollouts: list[Rollout]
    num_running: int
    """Rollouts being decoded."""
    num_waiting: int
    """Rollouts queued or parked."""
    generated_tokens: int
    """Tokens sampled since the start."""
    work: DecodingWork = NO_WORK


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One response, judged."""

    response: str
    """Decoded text without special tokens."""
    result: RewardResult
