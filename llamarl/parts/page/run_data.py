"""`RunData`: reads the folder of one run and returns its data in the form that the page draws. It writes nothing."""

from __future__ import annotations

import json
import math
import time
import tomllib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from llamarl.config import ConfigError, RunConfig, load_recorded, open_file
from llamarl.config.load import flat_settings
from llamarl.observability.metrics import FORMER_NAMES, duration
from llamarl.observability.report import WORK_KINDS
from llamarl.observability.spans import AWAY, Span, SpanTable, merged
from llamarl.parts.page.follow import RowReader

MAX_SPANS = 100_000
"""Maximum number of spans kept per executor. The oldest are dropped."""
MAX_EXECUTORS = 24
"""Maximum number of executors on the timeline."""
MAX_FLOWS = 2_000
"""Number of newest steps whose groups are kept."""
MAX_TEXTS = 500
"""Number of newest warnings and phases that are kept."""
LARGEST = 1e100
"""Maximum absolute value of a number. Larger values count as unknown, because their squares would overflow."""
SILENT_S = 60.0
"""Seconds without a change of the files after which an unfinished run may be dead."""
KINDS = (*sorted(WORK_KINDS), "start", "checkpoint", AWAY)


class RunData:
    """Data of one run. `refresh` reads new data; other methods use memory, which is bounded except 8 bytes per metric
    and step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generation, self.num_changes = 0, 0
        """Number of restarts of reading, and of rows read."""
        self._clear()

    def _clear(self) -> None:
        self._metrics, self._events = RowReader(self.folder / "metrics.jsonl"), RowReader(self.folder / "events.jsonl")
        self.columns: dict[str, array[float]] = {"step": array("d")}
        self.evals = list[dict[str, Any]]()
        self.spans = dict[str, SpanTable]()
        self.flows = dict[int, dict[str, Any]]()
        self.texts: deque[tuple[str, float, str]] = deque(maxlen=MAX_TEXTS)
        """Kind, time and text of warnings and phases."""
        self.unjudged: dict[str, tuple[float, float, Any]] = {}
        """For each set, from its last evaluation: responses without a verdict, all responses, and the reason of the
        first."""
        self.verdict = ""
        """Verdict of the last step on the limit of the speed."""
        self.start: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.pauses = list[tuple[float, float]]()
        """Time of each `--resume`, and seconds since executors last worked in the previous session. All times of this
        object exclude these seconds, as if each session had continued where the previous one ended."""
        self._paused_s = self._last_event_s = 0.0
        self._is_starting = False
        """Whether a later session has started and no executor has worked in it yet."""
        self._wall_s = self._told_wall_s = 0.0
        """`wall_s` of the last step: summed over sessions, and as recorded in the row."""

    def refresh(self) -> bool:
        """Reads new data or a part of it. Returns whether there was any."""
        if self._metrics.was_replaced() | self._events.was_replaced():
            self._clear()
            self.generation += 1
        before = self.num_changes
        for _, row in self._metrics.rows():
            self.num_changes += 1
            with suppress(TypeError, ValueError, KeyError, OverflowError):
                self._measured(row)
        for _, row in self._events.rows():
            self.num_changes += 1
            with suppress(TypeError, ValueError, KeyError, AttributeError, OverflowError):
                self._said(row)
        return self.num_changes != before

    def read_all(self) -> None:
        """Reads all current data."""
        while self.refresh():
            pass

    def _measured(self, row: dict[str, Any]) -> None:
        row = {name: one for name, one in row.items() if not isinstance(one, (int, float)) or abs(one) < LARGEST}
        if row["kind"] == "eval":
            num_responses, name = float(row["num_prompts"]) * float(row.get("k", 1)), str(row.get("name") or "")
            self.unjudged[name] = float(row.get("num_invalid", 0)), num_responses, row.get("invalid_reason")
            known = {key: float(row[key]) for key in ("step", "accuracy", "num_prompts")} | {"name": name}
            self.evals.append({key: value for key, value in row.items() if key != "kind"} | known)
            return
        count, step = len(self.columns["step"]), float(row["step"])
        if count and step <= self.columns["step"][-1]:
            return  # trained again after a crash; the first row is kept
        self.verdict = str(row.get("verdict") or "")
        if isinstance(row.get("wall_s"), (int, float)):
            row["wall_s"] = self._whole_wall_s(float(row["wall_s"]), float(row.get("step_s") or 0.0))
        for name, value in row.items():
            if isinstance(value, (int, float)) or value is None:
                column = self.columns.setdefault(FORMER_NAMES.get(name, name), array("d", [math.nan]) * count)
                column.append(math.nan if value is None else float(value))
        for column in self.columns.values():
            if len(column) == count:
                column.append(math.nan)

    @property
    def eval_sets(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the evaluations of each set by name. An empty name means the only set."""
        found = dict[str, list[dict[str, Any]]]()
        for row in self.evals:
            found.setdefault(row["name"], []).append(row)
        return found

    def _whole_wall_s(self, told_s: float, step_s: float) -> float:
        """Returns `wall_s` since the first session began. Each session counts its own from 0."""
        is_resumed = told_s < self._told_wall_s + step_s / 2
        self._wall_s += step_s if is_resumed else told_s - self._told_wall_s
        self._told_wall_s = told_s
        return self._wall_s

    def _begun(self, row: dict[str, Any], told_s: float) -> None:
        """Records the start of a session and the pause before it."""
        if self.start:
            pause_s = max(told_s - self._last_event_s, 0.0)
            self.pauses.append((told_s - pause_s - self._paused_s, pause_s))
            self._paused_s += pause_s
            self._is_starting = True
        self.start, self.end = self.start or row, {}
        pause = f"resumed after a pause of {duration(self.pauses[-1][1])}" if self.pauses else "started"
        self.texts.append(("phase", told_s - self._paused_s, pause))

    def _said(self, row: dict[str, Any]) -> None:
        kind, told_s = row["kind"], _time_s(row["at_s"])
        if kind == "start":
            self._begun(row, told_s)
        self._last_event_s = max(self._last_event_s, told_s)
        at_s = told_s - self._paused_s
        if kind == "end":
            self.end = row
            self.texts.append(("end", at_s, f"{row['end']}. {row.get('reason', '')}".strip()))
        elif kind in ("warning", "phase"):
            self.texts.append((kind, at_s, str(row["text"])))
        elif kind == "spans":
            self._worked(row["spans"])
        elif kind == "flow":
            flow: dict[str, Any] = {
                name: self._running_s(value) for name, value in row.items() if name.endswith("ed_s")
            }
            flow["groups"] = [[int(group[0]), *map(self._running_s, group[1:])] for group in row["groups"]]
            if "trained_s" in flow:
                self.flows[int(row["step"])] = flow
            if len(self.flows) > MAX_FLOWS:
                del self.flows[next(iter(self.flows))]

    def _working_again(self, of_executors: dict[str, Any]) -> None:
        """Extends the last pause by the idle end of the previous session and the start of this session, until executors
        work."""
        self._is_starting = False
        ends = [table[-1].end_s for table in self.spans.values() if len(table)]
        starts = [self._running_s(start_s) for spans in of_executors.values() for _, start_s, _ in spans]
        if not ends or not starts or (idle_s := min(starts) - max(ends)) <= 0:
            return
        last_s = max(ends)
        self._paused_s += idle_s
        self.pauses[-1] = last_s, self.pauses[-1][1] + idle_s
        told = [(kind, min(at_s, last_s), text) for kind, at_s, text in self.texts]
        self.texts = deque(told, maxlen=MAX_TEXTS)

    def _worked(self, of_executors: dict[str, Any]) -> None:
        if self._is_starting:
            self._working_again(of_executors)
        for name, spans in of_executors.items():
            if name in self.spans or len(self.spans) < MAX_EXECUTORS:
                table = self.spans.setdefault(name, SpanTable(MAX_SPANS))
                running_s = self._running_s
                table.extend(Span(str(what), running_s(start_s), running_s(end_s)) for what, start_s, end_s in spans)

    def _running_s(self, value: Any) -> float:
        """Converts a time of the newest session to a time without pauses. Raises ValueError if it is not a time."""
        return _time_s(value) - self._paused_s

    @property
    def work(self) -> str:
        """`sft` for supervised runs, `train` for others. Older supervised runs recorded no start."""
        is_supervised = self.start.get("work") == "sft" or (
            not self.start and self.num_steps > 0 and "reward_mean" not in self.columns
        )
        return "sft" if is_supervised else "train"

    @property
    def num_steps(self) -> int:
        return len(self.columns["step"])

    @property
    def began_s(self) -> float:
        """Start of the run in seconds since the epoch. 0 means unknown."""
        return float(self.start.get("at_s", 0.0))

    @property
    def num_damaged(self) -> int:
        """Number of unreadable rows, including an incomplete last row."""
        files = (self._metrics, self._events)
        return sum(one.num_damaged + (one.is_torn and self.is_over) for one in files)

    @property
    def is_over(self) -> bool:
        """Whether the run has apparently ended."""
        return bool(self.end or self.summary) or self.silent_s > SILENT_S

    @property
    def silent_s(self) -> float:
        """Seconds since the last write."""
        names = ("metrics.jsonl", "events.jsonl", "config.toml", "journal.jsonl")
        times = [path.stat().st_mtime for path in (self.folder / name for name in names) if path.exists()]
        return max(time.time() - max(times), 0.0) if times else math.inf

    @property
    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`, which the run writes at its end. Empty before the end and after a resume."""
        return self.content("summary.json") if self.end or not self.start else {}

    def content(self, name: str) -> dict[str, Any]:
        """Returns the object in a JSON file of the folder. Empty if there is no file."""
        with suppress(OSError, ValueError, RecursionError), open_file(self.folder / name) as file:
            found = json.load(file)
            return found if isinstance(found, dict) else {}
        return {}

    def state(self) -> tuple[str, str]:
        """Returns `finished`, `interrupted`, `failed`, `planned`, `running`, `silent` or `empty`, and an
        explanation."""
        end = self.end or self.summary
        if end:
            return str(end.get("end", "finished")), str(end.get("reason") or end.get("end_reason") or "")
        if not self.start and 0 < self.planned_steps <= self.num_steps:
            return "finished", ""  # supervised runs of older versions did not record their end
        if self.silent_s <= SILENT_S:
            return "running", ""
        if not self.num_steps and not self.start:
            return "empty", "the run never started: its folder has only settings"
        hours = self.silent_s / 3600
        since = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
        return "silent", f"no file has changed for {since} and no end was recorded: the process may be dead"

    @property
    def planned_steps(self) -> int:
        """Planned steps of the run. 0 means unknown."""
        steps = self._raw_config().get("steps")
        return steps if isinstance(steps, int) else 0

    def settings(self) -> list[tuple[str, Any, bool]]:
        """Returns name and value of each setting, and whether the value is the default."""
        try:
            config = load_recorded(self.folder / "config.toml")
        except ConfigError:
            return [(name, value, False) for name, value in flat_settings(self._raw_config())]
        least = {"model": {"path": ""}, "data": {"train": ""}}
        plain = dict(flat_settings(RunConfig.model_validate(least).model_dump(mode="json", exclude_none=True)))
        found = flat_settings(config.model_dump(mode="json", exclude_none=True))
        return [(name, value, name in plain and plain[name] == value) for name, value in found]

    def _raw_config(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, RecursionError), open_file(self.folder / "config.toml") as file:
            return tomllib.load(file)
        return {}

    @property
    def reach(self) -> tuple[float, float]:
        """Returns the start of the first span and the end of the last one."""
        begins = [table[0].start_s for table in self.spans.values() if len(table)]
        ends = [table[-1].end_s for table in self.spans.values() if len(table)]
        return min(begins, default=self.began_s), max(ends, default=self.began_s)

    def spans_within(
        self, start_s: float = -math.inf, end_s: float = math.inf, max_spans: int = 1500
    ) -> dict[str, list[Any]]:
        """Returns kind (index in `KINDS`), start and length of each executor's spans in a window, in milliseconds since
        `began_s`. Adjacent spans are merged to about `max_spans`; the last list has the milliseconds of work in
        each."""
        first, last = max(start_s, self.reach[0]), min(end_s, self.reach[1])
        gap_s = max(last - first, 0.0) / max_spans
        found = dict[str, list[Any]]()
        for name, table in self.spans.items():
            by_kind = dict[str, list[Span]]()
            for span in table:
                if span.end_s >= first and span.start_s <= last:
                    by_kind.setdefault(span.name, []).append(span)
            found[name] = sorted(
                [KINDS.index(kind) if kind in KINDS else len(KINDS), *_milliseconds(begin, end, work_s, self.began_s)]
                for kind, spans in by_kind.items()
                for begin, end, work_s in _joined(spans, gap_s)
            )
        return found

    def series(self, after_step: int = 0, max_points: int = 1 << 30) -> dict[str, list[float | None]]:
        """Returns the values of each metric in later steps. Longer series are averaged, or reduced to the largest for
        maxima."""
        steps = self.columns["step"]
        begin = bisect_right(steps, after_step)
        every = max(1, math.ceil((len(steps) - begin) / max_points))
        return {
            name: _thinned(column[begin:], every, max if name.endswith("_max") else fmean)
            for name, column in self.columns.items()
        }


def _time_s(value: Any) -> float:
    """Returns a time in seconds. Raises ValueError if the value is not a time."""
    if not abs(time_s := float(value)) < LARGEST:
        raise ValueError(value)
    return time_s


def _milliseconds(begin_s: float, end_s: float, work_s: float, origin_s: float) -> list[float]:
    start, length, work = (round(1000 * one, 1) for one in (begin_s - origin_s, end_s - begin_s, work_s))
    return [start, length, work] if work < length else [start, length]


def _joined(spans: Sequence[Span], gap_s: float) -> Iterator[tuple[float, float, float]]:
    """Yields begin, end and work in seconds of merged spans. Gaps up to `gap_s` are merged and do not count as work."""
    begin, end, work = math.nan, math.nan, 0.0
    for start_s, end_s in merged(spans):
        if start_s - end <= gap_s:
            end, work = end_s, work + end_s - start_s
            continue
        if not math.isnan(begin):
            yield begin, end, work
        begin, end, work = start_s, end_s, end_s - start_s
    if not math.isnan(begin):
        yield begin, end, work


def _thinned(values: Sequence[float], every: int, joined: Callable[[list[float]], float]) -> list[float | None]:
    found: Iterable[float] = values
    if every > 1:
        parts = (values[start : start + every] for start in range(0, len(values), every))
        known = ([value for value in part if math.isfinite(value)] for part in parts)
        found = (joined(one) if one else math.nan for one in known)
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in found]
