"""Results that the trainer, and the critic, report. No torch: the controller reads them.

Shape suffixes: G rollouts of a group, N tokens of a few sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llamarl.observability.metrics import UpdateMetrics


class NonFiniteStep(RuntimeError):
    """Loss or gradient is not finite; the weights are unchanged, or as an earlier pass of the step left them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingEffect:
    """Effect of router replay on some sequences."""

    agreement: float
    """Share of pairs of sampled token and layer for which the trainer's router chooses the experts on record where the
    token is predicted, 0 to 1."""
    live_kl: float
    """Estimate of KL(behavior || policy) per sampled token, in nats, with the trainer's own choice."""
    replayed_kl: float
    """The same with the experts on record, as training computes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseScores:
    """The trainer's answer to a `CauseProbe`, by the weights with which its step begins."""

    logprobs_4_N: np.ndarray
    """Log-probabilities at the temperature of sampling, float32: computed as steps do; by the same weights in float32
    arithmetic; the same by weights rounded to bfloat16, where the generator gets those; as steps do among candidates
    alone."""
    unserved: float
    """Mean absolute difference, in nats, between the float32 master weights and the bfloat16 weights that are trained
    and served; 0 where training rounds nothing."""
    routing: RoutingEffect | None
    """None: no experts were recorded."""
    seconds: float
    """Seconds that it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one optimizer step, of the trainer or the critic."""

    policy_version: int
    """Completed optimizer steps, this one included."""
    skipped: bool
    """Loss or gradient was not finite and `trainer.on_nonfinite` is `skip`: that pass, of `trainer.passes`, changed no
    weights and was the last."""
    cause: str = ""
    """Cause of a skipped step: which rollouts, and what of them is not finite."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to be logged, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStepResult(StepResult):
    """Result of one optimizer step of the trainer."""

    update: UpdateMetrics
    advantages: dict[int, np.ndarray]
    """Advantages by group id, float64 [G], the mean over a rollout's tokens; 0 for rollouts that were masked out."""
    logprobs: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """Log-probabilities of tokens under the weights that the step began with, by group id and index, float32 [T].
    Rollouts that were not computed, as they teach nothing, are missing, and tokens that are no targets NaN."""
    token_advantages: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """Advantages of tokens by group id and index, float32 [T], of rollouts whose tokens differ in it."""

    causes: CauseScores | None = None
    """None: no sequence of the step is to tell causes."""

    @property
    def columns(self) -> dict[str, dict[int, dict[int, np.ndarray]]]:
        """Numbers per token to be recorded, by name, group id and index."""
        return {"trainer_logprobs": self.logprobs, "advantages": self.token_advantages}
