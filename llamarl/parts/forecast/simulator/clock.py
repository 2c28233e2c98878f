"""A virtual clock: an event loop whose time jumps to the next timer whenever nothing is ready. It never sleeps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingScheduled(RuntimeError):
    """Every task waits for another one and no timer is set: virtual time would stand still for ever."""


class _VirtualSelector(selectors.DefaultSelector):
    """Instead of waiting for files it moves the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingScheduled("every task waits for another one and no timer is set")
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual and starts at 0; files, sockets and other threads are never heard of."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """At once, in no time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except OSError as error:
            future.set_exception(error)
        return future

    def spend(self, seconds: float) -> None:
        """The code that runs now takes so long: nothing else runs meanwhile."""
        self._clock.now_s += seconds


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` under a virtual clock. Raises NothingScheduled, and whatever `main` raises."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)
