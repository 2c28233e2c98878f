"""Account of a run's time, and the report of a run that has ended: text for the terminal, and `summary.json`."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from llamarl.observability.files import write_atomically
from llamarl.observability.metrics import (
    ABSENT,
    EvalMetrics,
    Row,
    duration,
    flat,
    held_out,
    last_question,
    number,
    of_sources,
    percent,
    plain,
)
from llamarl.observability.screen import CompletionView
from llamarl.observability.spans import AWAY, Span, covered_s, merged

WORK_KINDS = frozenset({"generate", "score", "train", "weight_sync", "evaluate", "reply"})
"""Span names that count as work. Others (`start`) are drawn but not counted."""
TIE_SHARE = 0.10
"""Busy shares that differ by less count as equal: steps vary this much on shared machines."""
LOST_SHARE = 0.20
"""If nobody works for a larger share of the time, all wait for the controller."""

SpansByExecutor = Mapping[str, Sequence[Span]]
"""Spans by executor name (`generator-0`, `reward`, `trainer`), in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounts:
    """A window of wall time, split by who worked. Shares are of the window, 0 to 1."""

    window_s: float
    """Length of the window, in seconds."""
    busy_share: dict[str, float]
    """Share in which each executor worked, by executor."""
    kind_share: dict[str, dict[str, float]]
    """The same by executor and span name."""
    role_share: dict[str, float]
    """Mean `busy_share` of the replicas of a role: `generator-0` and `generator-1` are `generator`."""
    overlap_share: float
    """Share in which executors of at least two roles worked at once."""
    unaccounted_share: float
    """Share in which no executor worked."""
    away_share: float = 0.0
    """Part of `unaccounted_share` in which a dead executor was not replaced yet."""
    away: tuple[str, ...] = ()
    """Names of these executors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedVerdict:
    """Verdict on what limits the speed of a run."""

    bound: str
    """`generator-bound` (trainer, reward, any other role), `controller-bound`, `balanced` or `unknown`."""
    reason: str
    """Who waits for whom, in one sentence."""
    window: str
    """Steps and seconds of the measurement, for example `steps 11 to 20, 7.3s`."""

    def __str__(self) -> str:
        return f"{self.bound} over {self.window}: {self.reason}"


def account(spans: SpansByExecutor, start_s: float, end_s: float) -> Accounts:
    """Returns the accounts of [start_s, end_s], on the clock of `spans.now_s`. All shares of an empty window are 0."""
    window_s = max(end_s - start_s, 0.0)
    by_kind: dict[str, dict[str, list[Span]]] = {name: defaultdict(list) for name in spans}
    by_role: dict[str, list[Span]] = defaultdict(list)
    away: dict[str, list[Span]] = defaultdict(list)
    for name, executor_spans in spans.items():
        for span in [one for one in executor_spans if one.end_s > start_s and one.start_s < end_s]:
            if span.name in WORK_KINDS:
                by_kind[name][span.name].append(span)
                by_role[role_of(name)].append(span)
            elif span.name == AWAY:
                away[name].append(span)

    def share(work: Sequence[Span]) -> float:
        return covered_s(work, start_s, end_s) / window_s if window_s else 0.0

    busy_share = {name: share([span for work in kinds.values() for span in work]) for name, kinds in by_kind.items()}
    replicas: dict[str, list[float]] = defaultdict(list)
    for name, busy in busy_share.items():
        replicas[role_of(name)].append(busy)
    all_work = [span for work in by_role.values() for span in work]
    with_away = all_work + [span for one in away.values() for span in one]
    overlap_s = _covered_twice_s([merged(work, start_s, end_s) for work in by_role.values()])
    return Accounts(
        window_s=window_s,
        busy_share=busy_share,
        kind_share={name: {kind: share(work) for kind, work in kinds.items()} for name, kinds in by_kind.items()},
        role_share={role: sum(shares) / len(shares) for role, shares in replicas.items()},
        overlap_share=overlap_s / window_s if window_s else 0.0,
        unaccounted_share=1.0 - share(all_work) if window_s else 0.0,
        away_share=share(with_away) - share(all_work),
        away=tuple(away),
    )


@cache
def role_of(executor: str) -> str:
    """`generator-1` -> `generator`."""
    return re.sub(r"[-_.]?\d+$", "", executor)


def _covered_twice_s(roles: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Returns the seconds that intervals of at least two roles cover."""
    edges = sorted((at, change) for work in roles for begin, end in work for at, change in ((begin, 1), (end, -1)))
    covered, depth, since = 0.0, 0, 0.0
    for at, change in edges:
        if depth >= 2:
            covered += at - since
        depth, since = depth + change, at
    return covered


def verdict(accounts: Accounts, first_step: int, last_step: int) -> SpeedVerdict:
    """Returns who waits for whom while no executor is away. Use a window of several steps: one step is noise."""
    steps = f"steps {first_step} to {last_step}" if last_step >= first_step else "no step"
    bound, reason = _bound(_present(accounts))
    if (share := accounts.away_share) >= 0.01:
        reason += (
            f"; not counted: {share:.0%} of the time, when all were idle until {', '.join(accounts.away)} was back"
        )
    return SpeedVerdict(bound=bound, reason=reason, window=f"{steps}, {duration(accounts.window_s)}")


def _present(accounts: Accounts) -> Accounts:
    """Returns the accounts without the time in which nobody worked because an executor was away."""
    away_share = accounts.away_share
    scale = 1 / (1 - away_share) if away_share < 1 else 0.0
    return replace(
        accounts,
        role_share={role: scale * share for role, share in accounts.role_share.items()},
        overlap_share=scale * accounts.overlap_share,
        unaccounted_share=scale * (accounts.unaccounted_share - away_share),
    )


def _bound(accounts: Accounts) -> tuple[str, str]:
    roles = accounts.role_share
    generator, trainer = roles.get("generator", 0.0), roles.get("trainer", 0.0)
    if not any(roles.values()):
        return "unknown", "no executor has done any work yet"
    if accounts.unaccounted_share > LOST_SHARE:
        lost = f"all executors are idle {accounts.unaccounted_share:.0%} of the time"
        return "controller-bound", f"{lost} and wait for the controller"
    top = max(roles, key=lambda role: roles[role])
    if top not in ("generator", "trainer") and roles[top] > max(generator, trainer) + TIE_SHARE:
        return f"{top}-bound", f"trainer and generator wait for the {top}, which is busy {roles[top]:.0%} of the time"
    bound = "balanced"
    if abs(generator - trainer) >= TIE_SHARE:
        bound = "generator-bound" if generator > trainer else "trainer-bound"
    return bound, _reason(bound, accounts, generator, trainer)


def _reason(bound: str, accounts: Accounts, generator: float, trainer: float) -> str:
    if accounts.overlap_share < 0.25 * min(generator, trainer):
        return f"generator ({generator:.0%} of the time) and trainer ({trainer:.0%}) take turns"
    if bound == "generator-bound":
        return f"the trainer waits for rollouts {1 - trainer:.0%} of the time; the generator is busy {generator:.0%}"
    if bound == "trainer-bound":
        return f"the generator waits for the trainer {1 - generator:.0%} of the time; the trainer is busy {trainer:.0%}"
    return f"generator ({generator:.0%}) and trainer ({trainer:.0%}) are about equally busy"


def write_trace(path: Path, spans: SpansByExecutor) -> None:
    """Writes all spans as a Chrome trace, one process per executor. ui.perfetto.dev opens it.

    Raises:
        OSError: the file cannot be written; an older one is unchanged.
    """
    starts = [span.start_s for executor_spans in spans.values() for span in executor_spans]
    origin_s = min(starts, default=0.0)  # microseconds since 1970 would lose digits in the viewer
    events: list[dict[str, Any]] = []
    for process, (name, executor_spans) in enumerate(spans.items(), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
        )
        events += [_event(span, process, lane, origin_s) for span, lane in _lanes(executor_spans)]
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _event(span: Span, process: int, lane: int, origin_s: float) -> dict[str, Any]:
    start_us, duration_us = (span.start_s - origin_s) * 1e6, (span.end_s - span.start_s) * 1e6
    return {
        "ph": "X",
        "name": span.name,
        "cat": "work" if span.name in WORK_KINDS else "other",
        "ts": round(start_us, 1),
        "dur": round(duration_us, 1),
        "pid": process,
        "tid": lane,
    }


def _lanes(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Assigns each span a row of the viewer, so that spans of a row do not overlap: rows nest spans and cannot cross
    them."""
    placed: list[tuple[Span, int]] = []
    free_at_s: list[float] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        lane = next((lane for lane, at in enumerate(free_at_s) if at <= span.start_s), len(free_at_s))
        if lane == len(free_at_s):
            free_at_s.append(0.0)
        free_at_s[lane] = span.end_s
        placed.append((span, lane))
    return placed


LABEL_WIDTH = 20
COLUMN_WIDTH = 12
COMPLETION_LETTERS = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """A file of the run."""

    path: Path
    meaning: str
    """One line for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """A whole run."""

    name: str
    """Name of the run."""
    end: Literal["finished", "interrupted", "failed"]
    """All steps done; stopped by the user; ended by an error."""
    end_reason: str = ""
    """One sentence, if the run did not finish."""
    steps: int
    """Optimizer steps completed."""
    first_step: int = 1
    """First step since the run started or resumed."""
    start_s: float
    """Seconds from the command to the start of the loop: processes, models, first evaluation."""
    wall_s: float
    """Seconds of the loop."""
    samples_per_s: float
    """Rollouts that the trainer trained on, per second of `wall_s`."""
    unaccounted_share: float
    """Share of `wall_s` in which no executor worked, 0 to 1."""
    overlap_share: float
    """Share of `wall_s` in which at least two roles worked at once, 0 to 1."""
    busy_share: Mapping[str, float]
    """Share of `wall_s` in which each executor worked, 0 to 1, by executor name."""
    staleness_max: int
    """Largest staleness of a rollout that was trained on, in optimizer steps."""
    staleness_limit: int
    """Largest staleness that admission allowed, in optimizer steps."""
    max_staleness: int
    """S: `rollout.max_staleness`."""
    invalid_share: float
    """Share of rollouts that the reward could not score, 0 to 1."""
    verdict: SpeedVerdict
    """Verdict on what limited the speed."""
    before: tuple[EvalMetrics, ...] = ()
    """Held-out problems before training, by set. Empty without evaluation."""
    after: tuple[EvalMetrics, ...] = ()
    """Held-out problems after training."""
    completions: tuple[CompletionView, ...] = ()
    """A few of the last responses."""
    files: tuple[RunFile, ...] = ()
    """Files of the run."""
    warnings: tuple[str, ...] = ()
    """Warnings that the user got."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further numbers for `summary.json`."""

    def to_json(self) -> Row:
        """Returns the numbers as flat JSON. Evaluations become `accuracy_before`, `pass_at_k_after` and so on, and
        evaluations of named sets `accuracy_before.NAME`."""
        texts = {"verdict", "before", "after", "completions", "files", "warnings"}
        row = {key: value for key, value in flat("summary", self).items() if key not in texts}
        for when, entries in (("before", self.before), ("after", self.after)):
            for entry in entries:
                of_set = f".{entry.name}" if entry.name else ""
                shown = {key: value for key, value in entry.to_json().items() if key not in ("kind", "name")}
                row |= {f"{key}_{when}{of_set}": value for key, value in shown.items()}
        return row | {"bound": self.verdict.bound, "verdict": str(self.verdict), "num_warnings": len(self.warnings)}


def write_summary(path: Path, summary: RunSummary) -> None:
    """Writes `summary.json` atomically.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, json.dumps(summary.to_json(), indent=2, allow_nan=False) + "\n")


def render_summary(summary: RunSummary) -> str:
    """Returns the report of a run that has ended, as plain text for a terminal or a log."""
    sections = [
        _headline(summary),
        _held_out(summary),
        _time(summary),
        _completions(summary),
        [f"warning: {plain(text)}" for text in summary.warnings],
        _files(summary),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _headline(summary: RunSummary) -> list[str]:
    first, last = summary.first_step, summary.steps
    steps = f"{last:,} steps" if first == 1 else f"steps {first:,} to {last:,}" if last >= first else "no new step"
    took = f"{steps} in {duration(summary.wall_s)}, after a start-up of {duration(summary.start_s)}"
    if summary.end == "finished":
        return [f"{summary.name}: finished {took}"]
    why = f": {plain(summary.end_reason)}" if summary.end_reason else ""
    return [f"{summary.name}: {summary.end.upper()}{why}", f"after {took}"]


def _held_out(summary: RunSummary) -> list[str]:
    sets = list(dict.fromkeys(entry.name for entry in (*summary.before, *summary.after)))
    before, after = ({entry.name: entry for entry in entries} for entries in (summary.before, summary.after))
    return [line for name in sets for line in _of_set(before.get(name), after.get(name))]


def _of_set(before: EvalMetrics | None, after: EvalMetrics | None) -> list[str]:
    known = after or before
    assert known is not None

    def cells(show: Callable[[EvalMetrics], str]) -> tuple[str, str]:
        return show(before) if before else ABSENT, show(after) if after else ABSENT

    lines = [
        _table(f"{held_out(known.name)} ({known.num_prompts:,})", "before", "after", "change"),
        _table("accuracy", *cells(lambda entry: percent(entry.accuracy, 1)), _change(before, after)),
        *(_table(f"pass@{k}", *cells(partial(_chance, k=k))) for k in known.chances),
        _table("mean tokens", *cells(lambda entry: number(entry.mean_response_tokens))),
    ]
    if bad := [entry for entry in (after, before) if entry and entry.num_invalid]:
        lines += [_table("invalid", *cells(lambda entry: f"{entry.num_invalid:,}"), plain(bad[0].invalid_reason or ""))]
    return lines


def _chance(entry: EvalMetrics, k: int) -> str:
    return percent(entry.chances[k], 1) if k in entry.chances else ABSENT


def _table(label: str, before: str, after: str, change: str = "") -> str:
    room = LABEL_WIDTH + COLUMN_WIDTH - len(name := label.ljust(LABEL_WIDTH))
    cells = f"{name} {before.rjust(room - 1)}{after.rjust(COLUMN_WIDTH)}"
    return (cells + "    " + change).rstrip()


def _change(before: EvalMetrics | None, after: EvalMetrics | None) -> str:
    """Returns the difference in points with its standard error, as if both were independent."""
    if before is None or after is None or math.isnan(before.accuracy + after.accuracy):
        return ""
    error = math.hypot(before.accuracy_error, after.accuracy_error)
    return f"{100 * (after.accuracy - before.accuracy):+.1f} points (standard error {100 * error:.1f})"


def _time(summary: RunSummary) -> list[str]:
    idle = ", ".join(f"{name} {percent(1 - share)}" for name, share in summary.busy_share.items())
    return [
        _fact("verdict", str(summary.verdict)),
        _fact("idle", idle or ABSENT),
        _fact(
            "overlap",
            f"{percent(summary.overlap_share)} of the time; all idle {percent(summary.unaccounted_share, 1)}",
        ),
        _fact("speed", f"{number(summary.samples_per_s)} rollouts/s"),
        _fact("staleness", f"at most {summary.staleness_max} of {summary.staleness_limit} (S {summary.max_staleness})"),
        _fact("invalid rewards", percent(summary.invalid_share, 1)),
        *_sources(summary.extra),
    ]


def _sources(extra: Mapping[str, float]) -> list[str]:
    """Returns a line for each source of a mixture."""
    rewards, *shares = (of_sources(extra, name) for name in ("reward", "share", "right", "flat", "invalid"))
    what = ("of the groups", "right", "flat groups", "invalid")
    lines = list[str]()
    for label in shares[0]:
        told = [f"{percent(of.get(label))} {one}" for of, one in zip(shares, what, strict=True)]
        lines.append(
            _fact("" if lines else "sources", f"{label}: reward {number(rewards.get(label))}, {', '.join(told)}")
        )
    return lines


def _fact(label: str, text: str) -> str:
    return label.ljust(LABEL_WIDTH) + text


def _completions(summary: RunSummary) -> list[str]:
    lines = []
    for entry in summary.completions:
        lines.append(
            _fact(f"reward {number(entry.reward)}", "> " + _short(plain(last_question(entry.prompt)), from_end=False))
        )
        lines.append(_fact(f"advantage {entry.advantage:+.2f}", "  " + _short(plain(entry.response), from_end=True)))
    return lines


def _short(text: str, *, from_end: bool) -> str:
    if len(text) <= COMPLETION_LETTERS:
        return text
    return "…" + text[-COMPLETION_LETTERS:] if from_end else text[:COMPLETION_LETTERS] + "…"


def _files(summary: RunSummary) -> list[str]:
    """Returns one line: the folder, and the names of the files in it."""
    if not summary.files:
        return []
    folder = summary.files[0].path.parent
    return [_fact("files", f"{folder}: {', '.join(file.path.name for file in summary.files)}")]
