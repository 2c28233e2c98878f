"""Activity of a process: spans of work, the stage that each thread is in, and the resources in use."""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, overload

AWAY = "away"
"""Span name of the time between an executor's last reply and the first reply of its replacement."""


class Span(NamedTuple):
    """One stretch of work."""

    name: str
    """Kind of work: generate, score, train, weight_sync, evaluate, reply, start; or `AWAY`."""
    start_s: float
    """Seconds since the epoch (monotonic within a process)."""
    end_s: float


_EPOCH_OFFSET_S = time.time() - time.monotonic()


def now_s() -> float:
    """Returns the seconds since the epoch. Never runs backwards within a process."""
    return time.monotonic() + _EPOCH_OFFSET_S


class SpanLog:
    """Spans of one process, thread-safe. A span with the name of the last one and a gap under `join_s` extends it."""

    def __init__(self, join_s: float = 0.002) -> None:
        self._join_s = join_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        start_s = now_s()
        try:
            yield
        finally:
            self.add(Span(name, start_s, now_s()))

    def add(self, span: Span) -> None:
        with self._lock:
            last = self._spans[-1] if self._spans else None
            if last and last.name == span.name and span.start_s - last.end_s < self._join_s:
                self._spans[-1] = Span(span.name, min(last.start_s, span.start_s), max(last.end_s, span.end_s))
            else:
                self._spans.append(span)

    def drain(self) -> list[Span]:
        """Returns the spans since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


class SpanTable(Sequence[Span]):
    """The newest spans, at least `max_spans`, in 18 bytes each: a run of weeks has many."""

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self._times_s, self._kinds, self._names = array("d"), array("H"), list[str]()

    def extend(self, spans: Iterable[Span]) -> None:
        for name, start_s, end_s in spans:
            if name not in self._names:
                self._names.append(name)
            self._times_s.extend((start_s, end_s))
            self._kinds.append(self._names.index(name))
        if (surplus := len(self) - self._max_spans) > self._max_spans // 4:
            del self._times_s[: 2 * surplus], self._kinds[:surplus]

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[Span]:
        """Yields the spans in order, five times as fast as by index."""
        columns = (self._kinds[:], self._times_s[::2], self._times_s[1::2])
        return (Span(self._names[kind], start_s, end_s) for kind, start_s, end_s in zip(*columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return Span(self._names[self._kinds[at]], self._times_s[2 * at], self._times_s[2 * at + 1])


def merged(spans: Iterable[Span], start_s: float = -math.inf, end_s: float = math.inf) -> list[tuple[float, float]]:
    """Returns the disjoint intervals of [start_s, end_s] that the spans cover, in order."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        begin, end = max(span.start_s, start_s), min(span.end_s, end_s)
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def covered_s(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Returns the seconds of [start_s, end_s] that at least one span covers."""
    return sum(end - begin for begin, end in merged(spans, start_s, end_s))


_stages = dict[int, str]()
DELAY_S = 8.0
"""Longest time without output of a command, or of a call from Python, in seconds."""


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Sets the stage of this thread, such as `loading the model`, for a block or a decorated function."""
    thread, outer = threading.get_ident(), stage_of(threading.get_ident())
    _stages[thread] = text
    try:
        yield
    finally:
        _stages[thread] = outer


def stage_of(thread: int | None) -> str:
    """Returns the stage of a thread. Empty means that it has none."""
    return _stages.get(thread or 0, "")


def stage_here(thread: int) -> str:
    """Returns the stage of a thread or, if it has none, the newest stage of another thread of this process. Empty means
    that no thread has a stage."""
    return stage_of(thread) or next((text for text in reversed([*_stages.values()]) if text), "")


@contextmanager
def report_delays(command: str, work: str = "checking the settings") -> Iterator[Callable[[], None]]:
    """Prints a line on stderr every `DELAY_S` that names the current stage, until the end of the block or the first
    call of the yielded function.

    Args:
        command: of llamarl. Empty means a call from Python.
        work: is printed if there is no stage.
    """
    thread, is_over = threading.get_ident(), threading.Event()

    def tell() -> None:
        while not is_over.wait(DELAY_S):
            doing = stage_here(thread) or work
            sys.stderr.write(f"{f'llamarl {command}'.rstrip()}: still {doing}; Ctrl-C ends it\n")
            sys.stderr.flush()

    threading.Thread(target=tell, name="delay", daemon=True).start()
    try:
        yield is_over.set
    finally:
        is_over.set()


GROUPS = "/sys/fs/cgroup"
"""Mount point of control groups, version 2."""


MIN_FILES = 512
"""Fewest files that a process must be allowed to open, next to connections to other ranks and hosts."""
MAX_IN_METRICS = 16
"""Executors whose memory is in the metrics of every step. The summary has all."""


class Usage(NamedTuple):
    """Current memory, descriptors and threads of one process."""

    rss_bytes: int
    """Resident memory."""
    descriptors: int
    """Open files and sockets. 0 means unknown."""
    threads: int
    """0 means unknown."""


NOTHING = Usage(0, 0, 0)


def usage() -> Usage:
    """Returns the usage of this process. Never fails, since health checks use it."""
    try:
        with open("/proc/self/statm") as file:
            rss_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Usage(rss_bytes, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    except OSError:  # no descriptor is left, or this is macOS, which has only the peak at low cost
        unit = 1024 if sys.platform == "linux" else 1
        return Usage(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 0, 0)


def by_kind(executors: Mapping[str, Usage], limit: int | None) -> dict[str, float]:
    """Returns `rss_bytes.NAME` and so on for this process (the controller) and the first `limit` executors."""
    found = {"controller": usage(), **dict(list(executors.items())[:limit])}
    return {f"{kind}.{name}": value for name, one in found.items() for kind, value in one._asdict().items() if value}


def available_bytes() -> float:
    """Returns the memory that this process can still use, within the limits of its control groups."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found = 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1].rpartition("::")[2]
    except (OSError, StopIteration, IndexError):
        return math.inf
    for folder in (own := Path(GROUPS, group.strip("/")), *own.parents):
        with suppress(OSError, ValueError):  # no limit, or the root
            limit = int((folder / "memory.max").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            found = min(found, float(limit - used))
    return found
