"""A clock that stands still while this process does: whoever stops it (Ctrl-Z, SIGSTOP) breaks no deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
BEAT_S = 0.5
"""The clock is looked at so often at least."""
PAUSE_S = 3.0
"""A longer time between two looks was a pause: nothing that came meanwhile has been seen."""


class PatientLoop(asyncio.SelectorEventLoop):
    """`time()` leaves pauses out, and with it every timer and timeout."""

    def __init__(self) -> None:
        self._seen_s, self._paused_s = super().time(), 0.0
        super().__init__()
        self._beat()

    def time(self) -> float:
        now_s = super().time()
        if (gap_s := now_s - self._seen_s) > PAUSE_S:
            self._paused_s += gap_s
        self._seen_s = now_s
        return now_s - self._paused_s

    def _beat(self) -> None:
        self.call_later(BEAT_S, self._beat)


def run_patiently(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as `asyncio.run` does, on a clock that stands still with the process. Raises what `main` raises."""
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(main)
