"""Account of a run's time: busy shares, overlap, what nobody accounts for, and who waits for whom."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from llamarl.observability.files import write_atomically
from llamarl.observability.formats import duration
from llamarl.observability.spans import AWAY, Span, covered_s, merged

WORK_KINDS = frozenset({"generate", "score", "train", "weight_sync", "evaluate", "reply"})
"""Span names that count as work; others (`start`) are drawn but not counted."""
TIE_SHARE = 0.10
"""Busy shares closer than this are equal: steps vary by about so much on shared machines."""
LOST_SHARE = 0.20
"""Above this share of time without any work, the controller is what everybody waits for."""

SpansByExecutor = Mapping[str, Sequence[Span]]
"""Spans of each executor, by its name (`generator-0`, `reward`, `trainer`), in any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounts:
    """A window of wall time, split by who worked. Shares are of the window, 0 to 1."""

    window_s: float
    """Length of the window, in seconds."""
    busy_share: dict[str, float]
    """Time that each executor worked, by executor."""
    kind_share: dict[str, dict[str, float]]
    """The same by executor and span name."""
    role_share: dict[str, float]
    """Mean `busy_share` of the replicas of a role: `generator-0` and `generator-1` are `generator`."""
    overlap_share: float
    """Time in which executors of at least two roles worked at once."""
    unaccounted_share: float
    """Time in which no executor worked."""
    away_share: float = 0.0
    """Part of that in which one that had died was not up again."""
    away: tuple[str, ...] = ()
    """Executors that were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedVerdict:
    """Verdict on what bounds the speed of a run."""

    bound: str
    """`generator-bound` (trainer, reward, any other role), `controller-bound`, `balanced` or `unknown`."""
    reason: str
    """Who waits for whom, in one sentence."""
    window: str
    """Steps and seconds that it was measured over, for example `steps 11 to 20, 7.3s`."""

    def __str__(self) -> str:
        return f"{self.bound} over {self.window}: {self.reason}"


def account(spans: SpansByExecutor, start_s: float, end_s: float) -> Accounts:
    """Accounts of [start_s, end_s], both on the clock of `spans.now_s`; all shares are 0 in an empty window."""
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
    """Seconds that intervals of at least two roles cover."""
    edges = sorted((at, change) for work in roles for begin, end in work for at, change in ((begin, 1), (end, -1)))
    covered, depth, since = 0.0, 0, 0.0
    for at, change in edges:
        if depth >= 2:
            covered += at - since
        depth, since = depth + change, at
    return covered


def verdict(accounts: Accounts, first_step: int, last_step: int) -> SpeedVerdict:
    """Who waits for whom, while nobody was away. Take a window of several steps: one step is noise."""
    steps = f"steps {first_step} to {last_step}" if last_step >= first_step else "no step"
    bound, reason = _bound(_present(accounts))
    if (share := accounts.away_share) >= 0.01:
        reason += (
            f"; not counted: {share:.0%} of the time, when all were idle until {', '.join(accounts.away)} was back"
        )
    return SpeedVerdict(bound=bound, reason=reason, window=f"{steps}, {duration(accounts.window_s)}")


def _present(accounts: Accounts) -> Accounts:
    """The same without the time in which nobody worked as one was away."""
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
    """All spans as a Chrome trace, one process per executor; ui.perfetto.dev opens it.

    Raises:
        OSError: the file cannot be written; an older one is untouched.
    """
    starts = [span.start_s for executor_spans in spans.values() for span in executor_spans]
    origin_s = min(starts, default=0.0)  # microseconds since 1970 would cost digits in the viewer
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
    """Each span with a row of the viewer, so that no two on a row overlap: rows can nest spans, not cross them."""
    placed: list[tuple[Span, int]] = []
    free_at_s: list[float] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        lane = next((lane for lane, at in enumerate(free_at_s) if at <= span.start_s), len(free_at_s))
        if lane == len(free_at_s):
            free_at_s.append(0.0)
        free_at_s[lane] = span.end_s
        placed.append((span, lane))
    return placed
