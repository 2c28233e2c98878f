"""What executors answer. No torch: the controller reads it."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.types import RewardResult, Rollout


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One response, judged."""

    response: str
    """Decoded text without special tokens."""
    result: RewardResult
