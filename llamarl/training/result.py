"""Results that the trainer and the critic report. No torch: the controller reads them.

Shape suffixes: G rollouts of a group, N tokens of a few sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from llamarl.observability.metrics import UpdateMetrics


class NonFiniteStep(RuntimeError):
    """Loss or gradient is not finite. The weights are unchanged, or as an earlier pass of the step left them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingEffect:
    """Effect of router replay on some sequences."""

    agreement: float
    """Share of pairs of sampled token and layer, 0 to 1, for which the trainer's router chooses the recorded experts at
    the position that predicts the token."""
    live_kl: float
    """Estimate of KL(behavior || policy) per sampled token, in nats, with the experts that the trainer's router
    chooses."""
    replayed_kl: float
    """The same with the recorded experts, as training computes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseScores:
    """The trainer's answer to a `CauseProbe`, by the weights with which its step begins."""

    logprobs_4_N: np.ndarray
    """Log-probabilities at the sampling temperature, float32, in four ways: computed as steps do; by the same weights
    in float32 arithmetic; by weights rounded to bfloat16 in float32 arithmetic, if the generator serves those; as steps
    do, among candidates only."""
    recurrent_N: np.ndarray | None
    """The third of these with delta nets in the recurrent form. None means that the model has no delta nets."""
    unserved: float
    """Mean absolute difference, in nats, between the float32 master weights and the bfloat16 weights that are trained
    and served. 0 if training rounds nothing."""
    routing: RoutingEffect | None
    """None means that no experts were recorded."""
    seconds: float
    """Seconds that the answer took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one optimizer step, of the trainer or the critic."""

    policy_version: int
    """Completed optimizer steps, including this one."""
    skipped: bool
    """True if loss or gradient was not finite and `trainer.on_nonfinite` is `skip`. That pass, of `trainer.passes`,
    changed no weights and was the last."""
    cause: str = ""
    """Cause of a skipped step: which numbers of which rollouts are not finite."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to log, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyStepResult(StepResult):
    """Result of one optimizer step of the trainer."""

    update: UpdateMetrics
    advantages: dict[int, np.ndarray]
    """Advantages by group id, float64 [G], the mean over a rollout's tokens; 0 for masked rollouts."""
    logprobs: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """Log-probabilities of tokens under the weights that the step began with, by group id and index, float32 [T].

    Rollouts without any advantage are not computed and are missing. Tokens that are not targets have NaN.
    """
    token_advantages: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """Advantages of tokens by group id and index, float32 [T], of rollouts whose tokens differ in them."""

    causes: CauseScores | None = None
    """None means that no sequence of the step is probed for causes."""

    @property
    def columns(self) -> dict[str, dict[int, dict[int, np.ndarray]]]:
        """Numbers per token to record, by name, group id and index."""
        return {"trainer_logprobs": self.logprobs, "advantages": self.token_advantages}
