"""A clock that stands still while this process does: whoever stops it (Ctrl-Z, SIGSTOP) breaks no deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
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
        self.is_interrupted = False
        self._on_interrupt: Callable[[], object] = lambda: None

    def time(self) -> float:
        now_s = super().time()
        if (gap_s := now_s - self._seen_s) > PAUSE_S:
            self._paused_s += gap_s
        self._seen_s = now_s
        return now_s - self._paused_s

    def _beat(self) -> None:
        self.call_later(BEAT_S, self._beat)

    def interrupt(self) -> None:
        """Ctrl-C has reached another thread: who listens, now or later, ends what runs here, in order."""
        self.is_interrupted = True
        self._on_interrupt()

    def listen(self, on_interrupt: Callable[[], object]) -> None:
        """From now on this hears of interrupts, and of one that came before."""
        self._on_interrupt = on_interrupt
        if self.is_interrupted:
            on_interrupt()


def run_patiently(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as `asyncio.run` does, on a clock that stands still with the process.

    Where a loop runs in this thread already, as in a notebook, in a thread of its own; Ctrl-C then calls the loop's
    `interrupt`. Raises what `main` raises.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=PatientLoop) as runner:
            return runner.run(main)
    return _run_beside(main)


def _run_beside(main: Coroutine[Any, Any, T]) -> T:
    loop, ended = PatientLoop(), threading.Event()
    result = Future[T]()

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                result.set_result(runner.run(main))
        except BaseException as error:  # whatever it is, it is for who waits below
            result.set_exception(error)
        finally:
            ended.set()

    threading.Thread(target=work, name="run", daemon=True).start()
    while not ended.is_set():
        try:
            ended.wait()  # a join that is interrupted takes its thread for ended
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(loop.interrupt)
    return result.result()
