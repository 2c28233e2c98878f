"""Key numbers at the top of the page, each with its change and the chart that shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from llamarl.observability.metrics import accuracy_error, counted, duration, number, percent, plain
from llamarl.parts.page.run_data import RunData
from llamarl.parts.page.trend import ends

HELD_OUT = "held out "
"""Prefix of a held-out set's name in place of the name of a metric. Names of metrics contain no blank."""
RECENT = 10
"""Steps over which a speed is averaged."""
MAX_SETS = 3
"""Maximum number of held-out sets with a separate key number."""
FALL_ERRORS = 2.0
"""Standard errors by which an accuracy must lie below its best to count as a fall. More evaluations raise it, as the
best of many is high by chance."""
Level = Literal["", "good", "advice", "bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyNumber:
    """One number of the strip at the top of the page."""

    id: str
    label: str
    value: str
    detail: str = ""
    """Comparison of the value with another one, in a few words."""
    level: Level = ""
    series: str = ""
    """Metric of the sparkline; empty means that there is none."""
    chart: str = ""
    """Identifier of the chart or section that shows more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fall:
    """A held-out accuracy that lies below its best by more than chance."""

    best: dict[str, Any]
    now: dict[str, Any]

    def __str__(self) -> str:
        best, now = (percent(float(one["accuracy"]), 1) for one in (self.best, self.now))
        return f"best {best} at step {self.best['step']:.0f}, now {now}"


def fall(evals: Sequence[dict[str, Any]]) -> Fall | None:
    """The fall of the newest evaluation from the best one. None means that it lies within its error."""
    if len(evals) < 2:
        return None
    best, now = max(evals, key=lambda one: float(one["accuracy"])), evals[-1]
    error = math.hypot(accuracy_error(best), accuracy_error(now))
    return Fall(best=best, now=now) if best["accuracy"] - now["accuracy"] > fall_errors(len(evals)) * error else None


def fall_errors(num_evals: int) -> float:
    """Returns the standard errors that a drop from the best of `num_evals` evaluations must exceed."""
    return max(FALL_ERRORS, math.sqrt(2 * math.log(num_evals)))


def key_numbers(data: RunData) -> list[dict[str, Any]]:
    """Returns the key numbers of a run, the most important first."""
    is_simulated = bool(data.content("forecast.json"))  # a simulation does not learn
    learned = () if is_simulated else (*_accuracies(data), *_reward(data), *_loss(data))
    return [asdict(one) for one in (*learned, *_steps(data), *_speed(data), *_staleness(data))]


def _accuracies(data: RunData) -> Iterator[KeyNumber]:
    for name, evals in list(data.eval_sets.items())[:MAX_SETS]:
        first, now = evals[0], evals[-1]
        share, before = float(now["accuracy"]), float(first["accuracy"])
        error = math.hypot(accuracy_error(first), accuracy_error(now))
        level: Level = ""
        if fell := fall(evals):
            level, detail = "advice", str(fell)
        elif len(evals) == 1:
            detail = "before training" if not now["step"] else f"at step {now['step']:.0f}"
        else:
            detail = f"from {percent(before, 1)}, {100 * (share - before):+.1f} ± {100 * error:.1f} points"
            level = "good" if share - before > FALL_ERRORS * error else ""
        yield KeyNumber(
            id=f"accuracy {name}".strip(), label=f"Held-out accuracy{f', {plain(name)}' if name else ''}",
            value=percent(share, 1), detail=detail, level=level, series=HELD_OUT + name, chart="solve",
        )  # fmt: skip


def _known(data: RunData, *names: str) -> list[float]:
    """Finite values of the first of these metrics that the run has."""
    for name in names:
        if found := [value for value in data.columns.get(name, ()) if math.isfinite(value)]:
            return found
    return []


def _reward(data: RunData) -> Iterator[KeyNumber]:
    if rewards := _known(data, "reward_mean"):
        found = ends(rewards)
        last = found.last if found else fmean(rewards)
        detail = f"mean of {'last ' * bool(found)}{counted(found.num if found else len(rewards), 'step')}"
        detail += f", from {number(found.first)}" if found else ""
        yield KeyNumber(
            id="reward", label="Reward (train)", value=number(last), detail=detail, series="reward_mean", chart="reward"
        )


def _loss(data: RunData) -> Iterator[KeyNumber]:
    """Yields the loss of supervised runs only. The loss of a policy gradient does not measure progress."""
    losses = _known(data, "loss") if data.work == "sft" else []
    if losses:
        detail = f"mean of {_recent(losses)}, from {number(losses[0])}"
        yield KeyNumber(
            id="loss", label="Loss", value=number(fmean(losses[-RECENT:])), detail=detail, series="loss", chart="loss"
        )


def _recent(values: Sequence[float]) -> str:
    """Returns text that names the steps over which a key number is averaged."""
    return f"last {counted(min(len(values), RECENT), 'step')}"


def _steps(data: RunData) -> Iterator[KeyNumber]:
    state, _ = data.state()
    planned, step_s = data.planned_steps, _known(data, "step_s")
    left_s = (planned - data.num_steps) * fmean(step_s[-RECENT:]) if step_s else math.nan
    detail = f"about {duration(left_s)} left" if state == "running" and left_s > 0 else state
    value = f"{data.num_steps:,} of {planned:,}" if planned else f"{data.num_steps:,}"
    level: Level = "bad" if state in ("failed", "silent") else "good" if state == "finished" else ""
    yield KeyNumber(id="steps", label="Steps", value=value, detail=detail, level=level, chart="messages")
    if walls := _known(data, "wall_s"):
        detail = f"{duration(fmean(step_s))} per step" if step_s else ""
        if data.pauses:
            detail += f", {counted(len(data.pauses) + 1, 'session')}"
        yield KeyNumber(
            id="time", label="Wall time", value=duration(walls[-1]), detail=detail, series="step_s", chart="duration"
        )


def _speed(data: RunData) -> Iterator[KeyNumber]:
    names = ("generated_tokens_per_s", "extra.train_tokens_per_s", "train_tokens_per_s")
    name = next((name for name in names if _known(data, name)), "")
    if speeds := _known(data, name):
        verdict = str((data.summary or {}).get("verdict") or data.verdict)
        yield KeyNumber(
            id="speed", label="Tokens per second", value=number(fmean(speeds[-RECENT:])),
            detail=f"mean of {_recent(speeds)}, {verdict.split(' ', maxsplit=1)[0].rstrip(':,.')}", series=name,
            chart="throughput",
        )  # fmt: skip


def _staleness(data: RunData) -> Iterator[KeyNumber]:
    ages, limits = _known(data, "staleness_max"), _known(data, "staleness_limit")
    if ages and limits:
        oldest, limit = max(ages), max(limits)
        mean = _known(data, "staleness_mean")
        yield KeyNumber(
            id="staleness", label="Staleness, max of limit", value=f"{oldest:.0f} of {limit:.0f}",
            detail=f"mean {number(fmean(mean), 2)} steps" if mean else "steps", level="bad" if oldest > limit else "",
            series="staleness_mean", chart="staleness",
        )  # fmt: skip
