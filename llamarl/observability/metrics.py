"""What one optimizer step and one evaluation measured. One flat JSON object each, ready for any sink.

In JSON a key that is missing was not measured; `null` was measured and is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

Row = dict[str, float | int | str | None]
"""A flat JSON object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateMetrics:
    """What the trainer says of one update of the weights."""

    loss: float = 0.0
    """Loss, as the optimizer saw it."""
    grad_norm: float = 0.0
    """Global gradient norm before clipping."""
    learning_rate: float = 0.0
    """Step size of this step."""
    num_loss_tokens: int = 0
    """Trainable tokens."""
    importance_ratio_mean: float = 1.0
    """Mean pi/mu over trainable tokens, before the cap."""
    importance_ratio_max: float = 1.0
    """Largest pi/mu over trainable tokens, before the cap."""
    capped_share: float = 0.0
    """Share of trainable tokens whose ratio met the cap, 0 to 1."""
    kl_to_behavior: float = 0.0
    """Estimate of KL(mu || pi) per token, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step."""

    step: int
    """Optimizer steps completed, this one included."""
    policy_version: int
    """Policy version that this step produced."""
    wall_s: float
    """Seconds from the start of the loop to the end of this step."""
    step_s: float
    """Seconds from the end of the previous step to the end of this one."""
    samples_per_s: float
    """Rollouts that this step consumed, per second of `step_s`."""
    generated_tokens_per_s: float
    """Tokens that all generators sampled during this step, per second of `step_s`."""
    reward_mean: float
    """Mean reward of the step's rollouts, invalid ones left out."""
    solve_rate: float
    """Share of judged rollouts whose outcome is SCORE with a positive value, 0 to 1."""
    invalid_share: float
    """Share of rollouts that the reward could not judge, 0 to 1."""
    response_tokens_mean: float
    """Mean response length, in tokens."""
    response_tokens_max: int
    """Longest response, in tokens."""
    truncated_share: float
    """Share of rollouts that ended by length, 0 to 1."""
    staleness_mean: float
    """Mean staleness of the rollouts, in optimizer steps."""
    staleness_max: int
    """Largest staleness, in optimizer steps."""
    staleness_limit: int
    """Largest staleness that admission allows, in optimizer steps."""
    update: UpdateMetrics
    """In JSON its fields stand beside the others."""
    waiting_rollouts: int
    """Rollouts queued at the generators at the end of the step."""
    running_rollouts: int
    """Rollouts being decoded at the end of the step."""
    ready_groups: int
    """Scored groups that wait for the trainer at the end of the step."""
    busy_share: Mapping[str, float]
    """Share of the last ten steps, up to a second ago, that each executor worked, 0 to 1, by executor name."""
    sync_s: float
    """Seconds from the start of `publish` until this version was released to the generators."""
    verdict: str | None = None
    """Who waits for whom, over the window of `busy_share`, which it names; None where that is under a second."""
    fingerprint: str | None = None
    """Of the weights of this version as the generators serve them, in hexadecimal digits."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """What executors, a loss or an advantage report beyond these."""

    def to_json(self) -> Row:
        """Flat JSON; mappings become `busy_share.NAME` and `extra.NAME`."""
        return flat("step", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """One evaluation on held-out prompts."""

    step: int
    """Optimizer steps completed when it began; 0 is before training."""
    policy_version_min: int
    """Oldest policy version that answered."""
    policy_version_max: int
    """Newest policy version that answered."""
    accuracy: float
    """pass@1: mean share of right responses, 0 to 1."""
    pass_at_k: float
    """Chance that at least one of `k` responses is right, 0 to 1; equals `accuracy` for k = 1."""
    k: int
    """Responses per prompt."""
    mean_response_tokens: float
    """Mean response length, in tokens."""
    num_prompts: int
    """Prompts answered."""
    wall_s: float
    """Seconds that the evaluation took."""

    def to_json(self) -> Row:
        """Flat JSON."""
        return flat("eval", self)


def flat(kind: str, record: Any) -> Row:
    """The fields of a dataclass, and of an update in it, as one flat JSON object that begins with its kind."""
    row: Row = {"kind": kind}
    for entry in fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, UpdateMetrics):
            row |= flat(kind, value)
        elif isinstance(value, Mapping):
            row.update({f"{entry.name}.{name}": finite(item) for name, item in value.items()})
        elif value is not None:
            row[entry.name] = finite(value)
    return row


def finite(value: Any) -> Any:
    """`value`, or None where JSON has no word for it (NaN and infinities)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
