"""Metrics of an optimizer step and of an evaluation, their confidence intervals, and how numbers read as text.

A record of metrics becomes one flat JSON object, ready for any sink.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import comb
from typing import Any

ABSENT = "–"
_USER_BEGINS = re.compile(
    r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|<start_of_turn>)\s*user\b\s*(?:<[|｜][^<>|｜\s]{1,40}[|｜]>)?\s*"
    r"|<[|｜][Uu]ser[|｜]>\s*|\[INST\]\s*"
)
"""Start of a user's message in the chat templates of common models: ChatML, Llama 3, Gemma, GLM, DeepSeek, Mistral."""
_MESSAGE_ENDS = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<end_of_turn>|</s>|\[/INST\]")
"""End of a message in these templates."""


def megabytes(num_bytes: float) -> str:
    """Returns text such as `269 MB` and `2.4 MB`."""
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2g} MB"


def duration(seconds: float | None) -> str:
    """Returns `43ms`, `8.2s`, `1m 42s`, `2h 05m` or `3d 04h`, and a dash for an unknown duration."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 59.5:
        return _short_duration(max(seconds, 0.0))
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def _short_duration(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"


def remaining_s(steps_left: float, step_s: float) -> float | None:
    """Returns the seconds until the last step ends. None means that the first step has not ended."""
    return max(steps_left, 0.0) * step_s if math.isfinite(step_s) else None


def percent(share: float | None, digits: int = 0) -> str:
    """Returns text such as `58%`. `nan` stays visible."""
    if share is None:
        return ABSENT
    return f"{share:.{digits}%}" if math.isfinite(share) else str(share)


def last_question(prompt: str) -> str:
    """Returns the user's last message in a prompt that a chat template has written. Returns other prompts unchanged."""
    begins = [found.end() for found in _USER_BEGINS.finditer(prompt)]
    text = _MESSAGE_ENDS.split(prompt[begins[-1] :], maxsplit=1)[0].strip() if begins else ""
    return text or prompt


def counted(many: int, noun: str) -> str:
    """Returns `1 step`, `2,000 steps`."""
    return f"{many:,} {noun}{'s' * (many != 1)}"


def number(value: float | None, digits: int = 3) -> str:
    """Returns a number with `digits` significant digits, without an exponent in the usual range. `nan` stays
    visible."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.{digits - 1}e}"
    first_digit = math.floor(math.log10(size)) if size else digits - 1
    return f"{value:,.{max(digits - 1 - first_digit, 0)}f}"


def plain(text: str) -> str:
    """Returns one printable line: text of a model can neither move the cursor nor break the layout."""
    text = text.strip().replace("\r\n", "\n").replace("\n", " ↵ ").replace("\t", " ")
    return "".join("·" if unicodedata.category(letter)[0] == "C" else letter for letter in text)


ERRORS_95 = 1.959963984540054
"""Standard errors that cover 95 % of a normal distribution."""
_ALIKE = 2
"""Pseudo-problems, each with equal samples, that are added to an estimate of the spread between problems."""


def wilson(share: float, num: float, errors: float = ERRORS_95) -> tuple[float, float]:
    """Returns Wilson's score interval of `errors` standard errors for `num` independent answers. NaN if num is 0.

    Unlike share ± error, the interval lies within 0 and 1, and has a width if all answers are wrong or all are right.
    """
    if not num > 0 or math.isnan(share):
        return math.nan, math.nan
    center = (share + errors**2 / (2 * num)) / (1 + errors**2 / num)
    half = _half(share, num, errors)
    return center - half if share > 0 else 0.0, center + half if share < 1 else 1.0


def share_error(share: float, num: float) -> float:
    """Returns half of Wilson's score interval at one standard error. NaN if num is 0."""
    return _half(share, num, 1.0) if num > 0 else math.nan


def _half(share: float, num: float, errors: float) -> float:
    spread = max(share * (1 - share), 0.0) / num + errors**2 / (4 * num**2)
    return errors * math.sqrt(spread) / (1 + errors**2 / num)


def effective_num(right: Sequence[int], judged: Sequence[int]) -> float:
    """Returns the number of independent answers that are worth as much as several samples per problem.

    Samples of one problem are similar, so 16 samples of each of 30 problems are worth less than 480 problems. The
    result is p (1 - p) divided by the variance of p = sum(right) / sum(judged), a ratio of sums over problems. It lies
    between the number of problems (all samples of a problem equal; exact for one sample each) and the number of
    samples. A few problems say little about their spread, so two with equal samples are added. docs/evaluation.md has
    the coverage.

    Args:
        right: right answers of each problem.
        judged: answers of each problem with a verdict, at least one.
    """
    num_answers = sum(judged)
    if not num_answers:
        return 0.0
    share = sum(right) / num_answers
    num_alike = num_answers**2 / sum(num**2 for num in judged)
    residuals = sum((one - share * num) ** 2 for one, num in zip(right, judged, strict=True))
    num_problems, spread = len(judged), share * (1 - share)
    if not residuals or num_problems < 2:
        apart = num_alike if not spread or num_problems < 2 else float(num_answers)
    else:
        apart = spread * num_answers**2 * (num_problems - 1) / (num_problems * residuals)
    apart, weight = min(max(apart, num_alike), num_answers), _ALIKE / (num_problems + _ALIKE)
    return apart / (1 + weight * (apart / num_alike - 1))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Returns the chance that at least one of k samples, drawn from `num_samples` without replacement, is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def chances(samples: int) -> list[int]:
    """Returns the values of k for which pass@k is reported: powers of two below `samples`, and `samples`."""
    return [1 << power for power in range(samples.bit_length()) if 1 << power < samples] + [samples]


SOURCES = "source_"
"""Prefix of metrics by source of a mixture: `source_reward.LABEL`."""
Row = dict[str, float | int | str | None]
"""A flat JSON object."""
_PASS_AT = "pass_at."
FORMER_NAMES = {
    "extra.mismatch_kl": "extra.probe_kl",
    "extra.kl_mismatch": "extra.kl_same_version",
    "extra.importance_ratio_mismatch": "extra.importance_ratio_same_version",
}
"""Metric names in runs of earlier versions, and their names today."""


def of_sources(extra: Mapping[str, float], name: str) -> dict[str, float]:
    """Returns a metric by the label of its source. Empty means that the run has no mixture."""
    prefix = f"{SOURCES}{name}."
    return {key.removeprefix(prefix): value for key, value in extra.items() if key.startswith(prefix)}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateMetrics:
    """Metrics of one update of the weights, as the trainer reports them."""

    loss: float = 0.0
    """Loss of the optimizer."""
    grad_norm: float = 0.0
    """Global gradient norm before clipping."""
    learning_rate: float = 0.0
    """Learning rate of this step."""
    num_loss_tokens: int = 0
    """Trainable tokens."""
    importance_ratio_mean: float | None = None
    """Mean pi/mu over trainable tokens, before the cap. None, as below, if all groups are flat and no token trains."""
    importance_ratio_max: float | None = None
    """Largest pi/mu over trainable tokens, before the cap."""
    capped_share: float | None = None
    """Share of trainable tokens whose ratio reached the cap, 0 to 1. None also for a loss without a cap."""
    kl_to_behavior: float | None = None
    """Estimate of KL(mu || pi) per token, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step."""

    step: int
    """Completed optimizer steps, including this one."""
    policy_version: int
    """Policy version that this step produced."""
    wall_s: float
    """Seconds from the start of the loop to the end of this step."""
    step_s: float
    """Seconds from the end of the previous step to the end of this one."""
    samples_per_s: float
    """Rollouts that this step trained on, per second of `step_s`."""
    generated_tokens_per_s: float
    """Tokens that all generators sampled during this step, per second of `step_s`."""
    reward_mean: float
    """Mean reward of the step's rollouts, without invalid ones."""
    solve_rate: float
    """Share of scored rollouts whose outcome is SCORE with a positive value, 0 to 1."""
    invalid_share: float
    """Share of rollouts that the reward could not score, 0 to 1."""
    response_tokens_mean: float
    """Mean response length, in tokens that the policy sampled."""
    response_tokens_max: int
    """Longest response, in tokens that the policy sampled."""
    truncated_share: float
    """Share of rollouts that reached the length limit, 0 to 1."""
    staleness_mean: float
    """Mean staleness of the rollouts, in optimizer steps."""
    staleness_max: int
    """Largest staleness, in optimizer steps."""
    staleness_limit: int
    """Largest staleness that admission allows, in optimizer steps."""
    update: UpdateMetrics
    """Metrics of the update. In JSON, its fields are on the same level as the others."""
    waiting_rollouts: int
    """Rollouts queued at the generators at the end of the step."""
    running_rollouts: int
    """Rollouts being decoded at the end of the step."""
    ready_groups: int
    """Scored groups that wait for the trainer at the end of the step."""
    busy_share: Mapping[str, float]
    """Share of the last ten steps, up to a second ago, in which each executor worked, 0 to 1, by executor name."""
    sync_s: float
    """Seconds from the start of `publish` until this version was released to the generators."""
    verdict: str | None = None
    """Who waits for whom, over the window of `busy_share`. The text names the window. None if it is under a second."""
    fingerprint: str | None = None
    """Fingerprint of this version's weights on the generators, in hexadecimal digits."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers from executors, a loss or an advantage."""

    def to_json(self) -> Row:
        """Returns flat JSON. Mappings become `busy_share.NAME` and `extra.NAME`."""
        return flat("step", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalMetrics:
    """One evaluation on held-out prompts."""

    step: int
    """Optimizer steps completed when the evaluation started. 0 means before training."""
    policy_version_min: int
    """Oldest policy version that sampled."""
    policy_version_max: int
    """Newest policy version that sampled."""
    accuracy: float
    """pass@1: mean share of right responses among the ones with a verdict, 0 to 1. NaN means that there are none."""
    pass_at_k: float
    """Chance that at least one of `k` responses is right, 0 to 1, over prompts with a verdict. Equals `accuracy` for k
    = 1."""
    k: int
    """Responses per prompt."""
    mean_response_tokens: float
    """Mean response length, in tokens that the policy sampled."""
    num_prompts: int
    """Prompts with responses."""
    wall_s: float
    """Seconds of the evaluation."""
    num_invalid: int = 0
    """Responses that the reward could not score."""
    invalid_reason: str | None = None
    """Reason of the first response that the reward could not score."""

    name: str | None = None
    """Name of the set. None means the only set of the run, without a name."""
    accuracy_low: float | None = None
    """Lower end of the 95 % interval of `accuracy`. NaN if there is no verdict, None in runs of earlier versions."""
    accuracy_high: float | None = None
    """Upper end of the interval."""
    num_effective: float | None = None
    """Independent answers that the responses are worth for the interval. With one response per problem: the
    problems."""
    pass_at: Mapping[str, float] = field(default_factory=dict)
    """pass@K by K: powers of two below `k`, and `k`. Empty for k = 1."""
    truncated_share: float | None = None
    """Share of responses that reached the length limit, 0 to 1. None in runs of earlier versions."""

    def to_json(self) -> Row:
        """Returns flat JSON. `pass_at` becomes `pass_at.K`."""
        return flat("eval", self)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> EvalMetrics:
        """Returns the metrics in a row of `to_json`, of this version or an earlier one. Raises TypeError for other
        rows."""
        known: dict[str, Any] = {name: math.nan if value is None else value for name, value in row.items()}
        known.pop("kind", None)
        pass_at = {name.removeprefix(_PASS_AT): known.pop(name) for name in row if name.startswith(_PASS_AT)}
        return cls(**known, pass_at=pass_at)

    @property
    def chances(self) -> dict[int, float]:
        """pass@k by k above 1. Runs of earlier versions have only that of all samples."""
        found = {int(k): share for k, share in self.pass_at.items() if k != "1"}
        return found or ({self.k: self.pass_at_k} if self.k > 1 else {})

    @property
    def accuracy_error(self) -> float:
        """Standard error of `accuracy`: half of its interval at one standard error."""
        return accuracy_error(asdict(self))


def accuracy_error(row: Mapping[str, Any]) -> float:
    """Returns the standard error of the accuracy in an evaluation's row."""
    return share_error(float(row["accuracy"]), _num_effective(row))


def accuracy_interval(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the 95 % interval of the accuracy in an evaluation's row."""
    return wilson(float(row["accuracy"]), _num_effective(row))


def _num_effective(row: Mapping[str, Any]) -> float:
    """Returns the independent answers behind an accuracy. In earlier versions, all samples of a problem count as
    one."""
    num_alike = row["num_prompts"] - float(row.get("num_invalid") or 0) / max(float(row.get("k") or 1), 1.0)
    return float(row.get("num_effective") or num_alike)


def held_out(name: str | None) -> str:
    """Returns text for a set of held-out problems. None means the only set."""
    return f"held-out {plain(name)}" if name else "held-out"


def unjudged(num_invalid: float, num_responses: float, reason: object) -> str:
    """Returns text: how many responses of an evaluation have no verdict, and the reason of the first."""
    return f"{num_invalid:,.0f} of {num_responses:,.0f} invalid: {plain(str(reason or 'no reason was given'))}"


def flat(kind: str, record: Any) -> Row:
    """Returns the fields of a dataclass, and of an update in it, as one flat JSON object that starts with its kind."""
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
    """Returns `value`, or None for NaN and infinities, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
