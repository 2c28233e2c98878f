"""Metrics of one optimizer step and of one evaluation. One flat JSON object each, ready for any sink.

In JSON a key that is missing was not measured; `null` was measured and is not finite, or is of no token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from llamarl.observability.formats import plain
from llamarl.observability.intervals import share_error, wilson

SOURCES = "source_"
"""Begins the names of what is measured of each source of a mixture: `source_reward.LABEL`."""
Row = dict[str, float | int | str | None]
"""A flat JSON object."""
_PASS_AT = "pass_at."
FORMER_NAMES = {
    "extra.mismatch_kl": "extra.probe_kl",
    "extra.kl_mismatch": "extra.kl_same_version",
    "extra.importance_ratio_mismatch": "extra.importance_ratio_same_version",
}
"""Names in older runs -> names of today."""


def of_sources(extra: Mapping[str, float], name: str) -> dict[str, float]:
    """A metric by the label of its source; empty: the run has no mixture."""
    prefix = f"{SOURCES}{name}."
    return {key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateMetrics:
    """Metrics of one update of the weights, as the trainer tells them."""

    loss: float = 0.0
    """Loss, as the optimizer saw it."""
    grad_norm: float = 0.0
    """Global gradient norm before clipping."""
    learning_rate: float = 0.0
    """Step size of this step."""
    num_loss_tokens: int = 0
    """Trainable tokens."""
    importance_ratio_mean: float | None = None
    """Mean pi/mu over trainable tokens, before the cap; None, as those below: of no token, as all groups are flat."""
    importance_ratio_max: float | None = None
    """Largest pi/mu over trainable tokens, before the cap."""
    capped_share: float | None = None
    """Share of trainable tokens whose ratio met the cap, 0 to 1; None also of a loss without one."""
    kl_to_behavior: float | None = None
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
    """Mean response length, in tokens that the policy sampled."""
    response_tokens_max: int
    """Longest response, in tokens that the policy sampled."""
    truncated_share: float
    """Share of rollouts that ended by length, 0 to 1."""
    staleness_mean: float
    """Mean staleness of the rollouts, in optimizer steps."""
    staleness_max: int
    """Largest staleness, in optimizer steps."""
    staleness_limit: int
    """Largest staleness that admission allows, in optimizer steps."""
    update: UpdateMetrics
    """Metrics of the update; in JSON its fields stand beside the others."""
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
    """Fingerprint of the weights of this version as the generators serve them, in hexadecimal digits."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Numbers that executors, a loss or an advantage report beyond these."""

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
    """pass@1: mean share of right responses among those that the reward could judge, 0 to 1; NaN: none."""
    pass_at_k: float
    """Chance that at least one of `k` responses is right, 0 to 1, of prompts with one that was judged; equals
    `accuracy` for k = 1."""
    k: int
    """Responses per prompt."""
    mean_response_tokens: float
    """Mean response length, in tokens that the policy sampled."""
    num_prompts: int
    """Prompts answered."""
    wall_s: float
    """Seconds that the evaluation took."""
    num_invalid: int = 0
    """Responses that the reward could not judge."""
    invalid_reason: str | None = None
    """Reason of the first response that the reward could not judge."""

    name: str | None = None
    """Name of the set; None: the run has one, without a name."""
    accuracy_low: float | None = None
    """Lower end of the interval of 95 % of `accuracy`; NaN where nothing was judged, None in older runs."""
    accuracy_high: float | None = None
    """Upper end of it."""
    num_effective: float | None = None
    """Independent answers that those which were judged are worth, for that interval: problems, where each has one."""
    pass_at: Mapping[str, float] = field(default_factory=dict)
    """Chance that at least one of so many responses is right, by their number: powers of two below `k`, and `k`. Empty
    for k = 1."""
    truncated_share: float | None = None
    """Share of responses that ended by length, 0 to 1; None in older runs."""

    def to_json(self) -> Row:
        """Flat JSON; `pass_at` becomes `pass_at.K`."""
        return flat("eval", self)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> EvalMetrics:
        """Metrics of a row that `to_json` gave, in this version or an older one. Raises TypeError: it is none."""
        known: dict[str, Any] = {name: math.nan if value is None else value for name, value in row.items()}
        known.pop("kind", None)
        pass_at = {name.removeprefix(_PASS_AT): known.pop(name) for name in row if name.startswith(_PASS_AT)}
        return cls(**known, pass_at=pass_at)

    @property
    def chances(self) -> dict[int, float]:
        """pass@k by k, of those above 1; older runs have that of all samples alone."""
        found = {int(k): share for k, share in self.pass_at.items() if k != "1"}
        return found or ({self.k: self.pass_at_k} if self.k > 1 else {})

    @property
    def accuracy_error(self) -> float:
        """Standard error of `accuracy`: half of its interval at one error."""
        return accuracy_error(asdict(self))


def accuracy_error(row: Mapping[str, Any]) -> float:
    """Standard error of the accuracy in the row of an evaluation."""
    return share_error(float(row["accuracy"]), _num_effective(row))


def accuracy_interval(row: Mapping[str, Any]) -> tuple[float, float]:
    """Interval of 95 % of the accuracy in the row of an evaluation."""
    return wilson(float(row["accuracy"]), _num_effective(row))


def _num_effective(row: Mapping[str, Any]) -> float:
    """Independent answers that an accuracy is of; in older runs, as if the samples of a problem were one."""
    num_alike = row["num_prompts"] - float(row.get("num_invalid") or 0) / max(float(row.get("k") or 1), 1.0)
    return float(row.get("num_effective") or num_alike)


def held_out(name: str | None) -> str:
    """Text for a set of held-out problems; None: the only one."""
    return f"held-out {plain(name)}" if name else "held-out"


def unjudged(num_invalid: float, num_responses: float, reason: object) -> str:
    """Text: how many responses of an evaluation have no verdict, and why the first has none."""
    return f"{num_invalid:,.0f} of {num_responses:,.0f} invalid: {plain(str(reason or 'no reason was given'))}"


def flat(kind: str, record: Any) -> Row:
    """The fields of a dataclass, and of an update in it, as one flat JSON object that begins with its kind."""
    row: Row = {"kind": kind}
    for entry in fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, UpdateMetrics):
            row |= {one.name: finite(getattr(value, one.name)) for one in fields(value)}
        elif isinstance(value, Mapping):
            row.update({f"{entry.name}.{name}": finite(item) for name, item in value.items()})
        elif value is not None:
            row[entry.name] = finite(value)
    return row


def finite(value: Any) -> Any:
    """`value`, or None where JSON has no word for it (NaN and infinities)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
