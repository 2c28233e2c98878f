"""A virtual clock: an event loop whose time jumps to the next timer whenever nothing is ready. It never sleeps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingScheduled(RuntimeError):
    """Every task waits for another one and no timer is set, so virtual time would never advance."""


class _VirtualSelector(selectors.DefaultSelector):
    """Advances the clock instead of waiting for files."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingScheduled("every task waits for another one and no timer is set")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0. Files, sockets and other threads are ignored."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Runs the function at once, in zero virtual time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except OSError as error:
            future.set_exception(error)
        return future

    def spend(self, seconds: float) -> None:
        """Advances the clock by the duration of the running code, which blocks everything else."""
        self._clock.now_s += seconds


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as `asyncio.run`, under a virtual clock. Raises NothingScheduled, and any error of `main`."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
