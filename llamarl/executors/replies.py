"""What executors answer. No torch: the controller reads it."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.types import RewardResult, Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingWork:
    """What a generator has done since its start: with enough of these one knows what a step and a token cost."""

    engine_steps: int = 0
    """Forwards."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    wall_s: float = 0.0
    """Seconds in these forwards."""
    cpu_s: float = 0.0
    """Processor seconds of the generator's thread in them: on shared cores, what they would take alone."""

    def __add__(self, other: DecodingWork) -> DecodingWork:
        return DecodingWork(
            engine_steps=self.engine_steps + other.engine_steps,
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            wall_s=self.wall_s + other.wall_s,
            cpu_s=self.cpu_s + other.cpu_s,
        )


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
    work: DecodingWork = DecodingWork()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One response, judged."""

    response: str
    """Decoded text without special tokens."""
    result: RewardResult
