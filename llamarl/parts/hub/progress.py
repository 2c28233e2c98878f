"""Progress of a fetch on standard error: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

LINE_S = 10.0
"""Seconds between two lines."""


class FetchProgress(Protocol):
    """Receives the progress of a fetch."""

    def at(self, num_bytes: int) -> None:
        """Sets the number of fetched bytes."""

    def say(self, text: str) -> None:
        """Prints a line above the bar."""


@contextmanager
def shown(title: str, total_bytes: int | None = None, lines: bool = False) -> Iterator[FetchProgress]:
    """Shows progress of a slow operation and clears it from a terminal afterwards. `lines` prints lines instead of a
    bar."""
    console = Console(stderr=True)
    if lines or not console.is_terminal:
        yield _Lines(title, total_bytes)
        return
    columns = [TextColumn("{task.description}", markup=False)]
    if total_bytes is not None:
        columns += [BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with Bars(*columns, console=console, transient=True) as bars:
        yield _Bar(bars, title, total_bytes)


class _Bar:
    def __init__(self, bars: Bars, title: str, total_bytes: int | None) -> None:
        self._bars, self._title = bars, title
        self._task = bars.add_task(title, total=total_bytes)

    def at(self, num_bytes: int) -> None:
        self._bars.update(self._task, completed=num_bytes)

    def say(self, text: str) -> None:
        self._bars.console.print(f"{self._title}: {text}", markup=False, highlight=False)


class _Lines:
    def __init__(self, title: str, total_bytes: int | None) -> None:
        self._title, self._total_bytes = title, total_bytes
        self._next_s = 0.0

    def at(self, num_bytes: int) -> None:
        is_over = num_bytes == self._total_bytes
        if self._total_bytes and (is_over or time.monotonic() >= self._next_s):
            self._next_s = time.monotonic() + LINE_S
            self.say(f"{num_bytes / 1e6:,.1f} of {self._total_bytes / 1e6:,.1f} MB")

    def say(self, text: str) -> None:
        sys.stderr.write(f"{self._title}: {text}\n")
        sys.stderr.flush()
