"""Spans: what each executor did when. The run accounts for its own wall time with them."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, overload

AWAY = "away"
"""Name of the time between an executor's last word and the return of the one that was started in its place."""


class Span(NamedTuple):
    """One stretch of work."""

    name: str
    """Kind of work: generate, score, train, weight_sync, evaluate, reply, start; or `AWAY`."""
    start_s: float
    """Seconds since the epoch (monotonic within a process)."""
    end_s: float


_EPOCH_OFFSET_S = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds since the epoch; never runs backwards within a process."""
    return time.monotonic() + _EPOCH_OFFSET_S


class SpanLog:
    """Spans of one process, thread-safe. One that continues the last one (same name, gap under `join_s`) joins it."""

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
        """The spans since the last drain."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


class SpanTable(Sequence[Span]):
    """The newest spans, at least `max_spans` of them, in 18 bytes each: a run of weeks has many."""

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
        """Spans in order, as any sequence would give them, in a fifth of the time."""
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
    """Disjoint intervals of [start_s, end_s] that the spans cover, in order."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        begin, end = max(span.start_s, start_s), min(span.end_s, end_s)
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def covered_s(spans: Iterable[Span], start_s: float, end_s: float) -> float:
    """Seconds of [start_s, end_s] that at least one span covers."""
    return sum(end - begin for begin, end in merged(spans, start_s, end_s))
