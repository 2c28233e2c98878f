"""`Tracker`, the base class of trackers, and a thread that feeds it without blocking the run."""

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
"""Maximum rows in the queue of a tracker. Further rows are dropped while the queue is full."""
CLOSE_S = 4.0
"""Seconds that a tracker has to send its last rows at the end of a run."""


class Tracker(ABC):
    """Runs in a separate thread, including its constructor. An exception stops the tracker with a warning."""

    PACKAGE: ClassVar[str]
    """Package that the constructor imports."""

    @abstractmethod
    def __init__(self, subject: Subject) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends finite numbers by name: of a step, of an evaluation as `eval.NAME`, or of a named set as
        `eval.SET/NAME`."""

    def close(self) -> None:
        """Sends the remaining rows and releases the tracker."""
        return


def tracker_class(name: str) -> type[Tracker]:
    """Returns the class of a tracker. Raises ConfigError if it does not exist or its package is not installed."""
    if name not in (known := members(FAMILY)):
        raise ConfigError(f"metrics.sinks: {name!r} is not a sink; known: jsonl, {', '.join(known)}")
    found: type[Tracker] = getattr(importlib.import_module(f"{FAMILY}.{name}"), name.capitalize())
    if importlib.util.find_spec(found.PACKAGE) is None:
        raise ConfigError(f"metrics.sinks: {name!r} needs a package: pip install 'llamarl[{name}]'; or leave it out")
    return found


class TrackerThread:
    """Sends rows to one tracker. Warns once if the tracker fails or falls behind; the run continues."""

    def __init__(self, name: str, subject: Subject, warn: Callable[[str], None]) -> None:
        """Raises ConfigError if the tracker cannot be used."""
        self._name, self._warn, self._kind = name, warn, tracker_class(name)
        self._rows = Queue[Row | None](MAX_ROWS)
        self._is_over, self._has_told = threading.Event(), False
        self._thread = threading.Thread(target=self._run, args=(subject,), name=f"metrics {name}", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Queues a row without waiting. Called from one thread."""
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
        except Exception as error:  # an error in a tracker's package must not stop the run
            self._tell(f"failed and gets no more rows: {type(error).__name__}: {error}".split("\n", 1)[0])
        finally:
            self._is_over.set()

    def _tell(self, text: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._warn(f"metrics.sinks: {self._name} {text}; metrics.jsonl has everything")

    def end(self) -> None:
        """Marks the end of the rows."""
        try:
            self._rows.put_nowait(None)
        except Full:  # the tracker hangs and would not read the mark
            with suppress(Empty):
                while True:
                    self._rows.get_nowait()
            self._rows.put_nowait(None)

    def wait(self, timeout_s: float) -> None:
        """Waits at most `timeout_s` until the queued rows have been sent."""
        if not self._is_over.wait(max(timeout_s, 0.0)):
            self._tell(f"has not ended {CLOSE_S:g} s after the run")


def numbers(row: Row) -> dict[str, float]:
    """Returns the numbers of a row of `metrics.jsonl`, with None for values that are not finite."""
    of_set = f"{row['name']}/" if row.get("name") else ""
    prefix = f"eval.{of_set}" if row["kind"] == "eval" else ""
    return {
        prefix + name: float(value) for name, value in row.items() if isinstance(value, (int, float)) and name != "step"
    }


class Trackers:
    """All trackers of a run, as a recorder."""

    def __init__(self, names: Sequence[str], subject: Subject, warn: Callable[[str], None]) -> None:
        """Raises ConfigError if a tracker cannot be used."""
        self.each = [TrackerThread(name, subject, warn) for name in dict.fromkeys(names) if name != "jsonl"]

    def row(self, row: Row) -> None:
        for one in self.each:
            one.put(row)

    def close(self) -> None:
        """Waits briefly for all trackers together."""
        for one in self.each:
            one.end()
        until_s = time.monotonic() + CLOSE_S
        for one in self.each:
            one.wait(until_s - time.monotonic())
