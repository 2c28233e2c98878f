"""`Tracker`, and what gives it rows without ever waiting for it."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import ClassVar

from llamarl.config import ConfigError
from llamarl.config.ref import members
from llamarl.observability.metrics import Row
from llamarl.observability.sinks import Subject

FAMILY = "llamarl.parts.page.trackers"
MAX_ROWS = 1000
"""Rows that may wait for a tracker; further ones are left out while so many do."""
CLOSE_S = 4.0
"""Seconds that a tracker has for its last rows when the run ends."""


class Tracker(ABC):
    """Lives in a thread of its own, from its constructor on. Whatever it raises ends it, with a warning."""

    PACKAGE: ClassVar[str]
    """Package that is imported, in the constructor and not before."""

    @abstractmethod
    def __init__(self, subject: Subject) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Finite numbers by name: of a step, or, as `eval.NAME`, of an evaluation; `eval.SET/NAME` of a named set."""

    def close(self) -> None:
        """Nothing more comes."""
        return


def tracker_class(name: str) -> type[Tracker]:
    """Raises ConfigError: there is none of this name, or its package is not installed."""
    if name not in (known := members(FAMILY)):
        raise ConfigError(f"metrics.sinks: {name!r} is not a sink; known: jsonl, {', '.join(known)}")
    found: type[Tracker] = getattr(importlib.import_module(f"{FAMILY}.{name}"), name.capitalize())
    if importlib.util.find_spec(found.PACKAGE) is None:
        raise ConfigError(f"metrics.sinks: {name!r} needs a package: pip install 'llamarl[{name}]'; or leave it out")
    return found


class TrackerThread:
    """Rows to one tracker. It says once when it fails or does not keep up, and the run goes on."""

    def __init__(self, name: str, subject: Subject, warn: Callable[[str], None]) -> None:
        """Raises ConfigError."""
        self._name, self._warn, self._kind = name, warn, tracker_class(name)
        self._rows = Queue[Row | None](MAX_ROWS)
        self._is_over, self._has_told = threading.Event(), False
        self._thread = threading.Thread(target=self._run, args=(subject,), name=f"metrics {name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Queues a row and comes back at once; called from one thread."""
        try:
            if not self._is_over.is_set():
                self._rows.put_nowait(row)
        except Full:
            self._tell(f"does not keep up; rows are left out while {MAX_ROWS} wait")

    def _run(self, subject: Subject) -> None:
        try:
            tracker = self._kind(subject)
            while (row := self._rows.get()) is not None:
                tracker.log(int(row["step"] or 0), numbers(row))
            tracker.close()
        except Exception as error:  # of somebody else's package: the run matters more
            self._tell(f"failed and gets no more rows: {type(error).__name__}: {error}".split("\n", 1)[0])
        finally:
            self._is_over.set()

    def _tell(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._warn(f"metrics.sinks: {self._name} {text}; metrics.jsonl has everything")

    def end(self) -> None:
        """Nothing more comes."""
        try:
            self._rows.put_nowait(None)
        except Full:  # it hangs: nobody would see the end
            with suppress(Empty):
                while True:
                    self._rows.get_nowait()
            self._rows.put_nowait(None)

    def wait(self, timeout_s: float) -> None:
        """Waits until what is on its way has arrived, `timeout_s` at most."""
        if not self._is_over.wait(max(timeout_s, 0.0)):
            self._tell(f"has not ended {CLOSE_S:g} s after the run")


def numbers(row: Row) -> dict[str, float]:
    """Numbers of a row of `metrics.jsonl`, where what is not finite is None."""
    of_set = f"{row['name']}/" if row.get("name") else ""
    prefix = f"eval.{of_set}" if row["kind"] == "eval" else ""
    return {
        prefix + name: float(value) for name, value in row.items() if isinstance(value, (int, float)) and name != "step"
    }


class Trackers:
    """All of a run, as its recorder."""

    def __init__(self, names: Sequence[str], subject: Subject, warn: Callable[[str], None]) -> None:
        """Raises ConfigError."""
        self.each = [TrackerThread(name, subject, warn) for name in dict.fromkeys(names) if name != "jsonl"]

    def row(self, row: Row) -> None:
        for one in self.each:
            one.put(row)

    def close(self) -> None:
        """Waits for all of them together, but not for long."""
        for one in self.each:
            one.end()
        until_s = time.monotonic() + CLOSE_S
        for one in self.each:
            one.wait(until_s - time.monotonic())
