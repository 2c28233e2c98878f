"""What a page says first: how the run went, in claims that each name the picture that shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llamarl.observability.accounting import account, verdict
from llamarl.observability.formats import number, percent
from llamarl.observability.page.run_data import RunData

PART = 0.2
"""Share of the steps at the beginning, and at the end, that are compared."""
ERRORS = 2.0
"""Standard errors that a change must have to be called one."""
MISMATCH_KL, TRUNCATED_SHARE, INVALID_SHARE, FLAT_SHARE, IDLE_SHARE = 0.05, 0.2, 0.05, 0.6, 0.5
COLLAPSED_SHARE, COLLAPSED_NATS = 0.2, 0.05
"""Of its first entropy, and in nats per token, below which little is left to explore."""
GRADIENT_GROWTH = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One thing that can be seen."""

    text: str
    """A clause, without an end mark."""
    chart: str
    """Identifier of the picture."""
    level: Literal["good", "note", "bad"] = "note"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """A metric over the first and the last steps."""

    first: float
    last: float
    error: float
    """Standard error of their difference, as if steps were independent."""

    @property
    def change(self) -> float:
        return self.last - self.first


def ends(values: Sequence[float]) -> Ends | None:
    """None: there are fewer than four values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 4:
        return None
    size = max(2, int(PART * len(known)))
    (first, of_first), (last, of_last) = _mean(known[:size]), _mean(known[-size:])
    return Ends(first=first, last=last, error=math.sqrt(of_first + of_last))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """And the variance of it."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


def accuracy_error(entry: dict[str, Any]) -> float:
    """Standard error of a held-out accuracy, as if each prompt were right or wrong: sqrt(p (1 - p) / n)."""
    share = float(entry["accuracy"])
    return math.sqrt(max(share * (1 - share), 0.0) / max(float(entry["num_prompts"]), 1.0))


def findings(data: RunData) -> list[dict[str, str]]:
    """The claims about a run, what it learnt first, then what bounds its speed, then what looks wrong."""
    state, reason = data.state()
    claims = list[Claim]()
    if state in ("failed", "interrupted", "silent", "empty"):
        what = {"failed": "the run failed", "interrupted": "the run was interrupted"}.get(state, "")
        text = ": ".join(filter(None, [what, reason]))
        claims.append(Claim(text=text, chart="messages", level="note" if state == "interrupted" else "bad"))
    if data.num_damaged:
        claims.append(Claim(text=f"{data.num_damaged} rows are torn or damaged", chart="messages", level="bad"))
    if data.num_steps:
        claims += (*_learnt(data), *_speed(data), *_wrong(data))
    elif state != "empty":
        claims.append(Claim(text="no step has been completed", chart="messages"))
    return [asdict(claim) for claim in claims]


def _learnt(data: RunData) -> Iterator[Claim]:
    if len(data.evals) > 1:
        before, after = data.evals[0], data.evals[-1]
        change = 100 * (after["accuracy"] - before["accuracy"])
        error = 100 * math.hypot(accuracy_error(before), accuracy_error(after))
        verb, level = _verb(change, error)
        text = (
            f"held-out accuracy {verb} from {percent(before['accuracy'], 1)} to {percent(after['accuracy'], 1)} "
            f"({change:+.1f} ± {error:.1f} points)"
        )
        yield Claim(text=text, chart="solve", level=level)
    reward = ends(data.columns.get("reward_mean", ()))
    if reward:
        verb, level = _verb(reward.change, reward.error)
        text = f"reward {verb} from {reward.first:.3g} to {reward.last:.3g} ({reward.change:+.3g} ± {reward.error:.2g})"
        yield Claim(text=text, chart="reward", level=level if len(data.evals) < 2 else "note")
    else:
        yield Claim(text=f"{data.num_steps} steps are too few to say whether it learns", chart="reward")


def _verb(change: float, error: float) -> tuple[str, Literal["good", "note", "bad"]]:
    if abs(change) <= ERRORS * error:
        return "did not change beyond its error,", "note"
    return ("rose", "good") if change > 0 else ("fell", "bad")


def _speed(data: RunData) -> Iterator[Claim]:
    spans = {name: list(table) for name, table in data.spans.items()}
    work = [span for of_one in spans.values() for span in of_one if span.name == "train"]
    if work:  # from the first step on: what comes before is starting up
        start_s, end_s = min(span.start_s for span in work), max(span.end_s for span in work)
        found = account(spans, start_s, end_s)
        text = str(verdict(found))
        idle = [name for name, share in found.busy_share.items() if share < IDLE_SHARE and name.startswith("generator")]
        yield Claim(text=text, chart="timeline")
        if idle:
            yield Claim(text=f"{', '.join(idle[:4])} idle more than half of the time", chart="timeline", level="bad")
    elif bound := data.summary.get("verdict"):
        yield Claim(text=str(bound), chart="busy")


def _wrong(data: RunData) -> Iterator[Claim]:
    def last(name: str) -> Ends | None:
        return ends(data.columns.get(name, ()))

    stale = [
        (now, limit)
        for now, limit in zip(
            data.columns.get("staleness_max", ()), data.columns.get("staleness_limit", ()), strict=False
        )
        if now > limit
    ]
    if stale:
        yield Claim(text=f"staleness exceeded its bound in {len(stale)} steps", chart="staleness", level="bad")
    kl = last("kl_to_behavior")
    if kl and kl.last > MISMATCH_KL and kl.change > ERRORS * kl.error:
        text = f"trainer and generators drift apart: KL {number(kl.first)} → {number(kl.last)} nats per token"
        yield Claim(text=text, chart="kl", level="bad")
    entropy = last("extra.entropy_mean")
    if entropy and entropy.last < COLLAPSED_SHARE * entropy.first and entropy.last < COLLAPSED_NATS:
        text = f"entropy collapsed: {number(entropy.first)} → {number(entropy.last)} nats per token"
        yield Claim(text=text, chart="entropy", level="bad")
    truncated = last("truncated_share")
    if truncated and truncated.last > TRUNCATED_SHARE and truncated.change > ERRORS * truncated.error:
        text = f"more responses end by length: {percent(truncated.first)} → {percent(truncated.last)}"
        yield Claim(text=text, chart="truncated", level="bad")
    invalid = last("invalid_share")
    if invalid and max(invalid.first, invalid.last) > INVALID_SHARE:
        text = f"{percent(max(invalid.first, invalid.last))} of the rewards are invalid"
        yield Claim(text=text, chart="truncated", level="bad")
    gradient = last("grad_norm")
    if gradient and gradient.last > GRADIENT_GROWTH * gradient.first > 0:
        text = f"gradient norm grew from {number(gradient.first)} to {number(gradient.last)}"
        yield Claim(text=text, chart="grad", level="bad")
    if num := sum(kind == "warning" for kind, _, _ in data.texts):
        yield Claim(text=f"{num} warning{'s' if num > 1 else ''}", chart="messages")
