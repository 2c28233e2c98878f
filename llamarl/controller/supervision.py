"""Loops side by side: the first failure of any loop or executor ends them all, and a stall ends the run by name."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from llamarl.cluster.api import ExecutorError, ExecutorHandle
from llamarl.training.result import NonFiniteStep

T = TypeVar("T")
BEAT_S = 0.5
"""The clock is looked at so often at least."""
PAUSE_S = 3.0
"""A longer time between two looks was a pause: nothing that came meanwhile has been seen."""


class PausableClockLoop(asyncio.SelectorEventLoop):
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


def run_pausable(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as `asyncio.run` does, on a clock that stands still with the process.

    Where a loop runs in this thread already, as in a notebook, in a thread of its own; Ctrl-C then calls the loop's
    `interrupt`. Raises what `main` raises.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=PausableClockLoop) as runner:
            return runner.run(main)
    return _run_beside(main)


def _run_beside(main: Coroutine[Any, Any, T]) -> T:
    loop, ended = PausableClockLoop(), threading.Event()
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


@contextmanager
def rare_garbage_collections() -> Iterator[None]:
    """Many records are in flight and none is part of a cycle: the default thresholds spend a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Interrupted(Exception):
    """The user or the system asked the run to end (Ctrl-C, SIGTERM)."""


class Stalled(RuntimeError):
    """Nothing finished for too long; the message says who waits for whom."""


class Signal:
    """Says that something has changed, to those who wait for a condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Everybody who waits looks again."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition`; somebody else's deadline holds."""
        while not condition():
            await self.wait()

    async def wait(self) -> None:
        """Waits for the next change."""
        await self._event.wait()


class Supervisor:
    """Owns the background loops of one run."""

    def __init__(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(asyncio.Future.exception)  # after the end nobody takes it, which is no fault
        self._tasks = set[asyncio.Task[Any]]()

    def start(self, loop: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs `loop` in the background; what it raises ends the run."""
        return self.take(asyncio.create_task(loop, name=name))

    def take(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Watches over a loop that runs already, as `start` does over one that it begins."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def watch(self, handle: ExecutorHandle) -> None:
        """The death of this executor ends the run."""
        handle.failed.add_done_callback(lambda failed: None if failed.cancelled() else self.fail(failed.result()))

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error`; only the first one counts."""
        if not self._failure.done():
            self._failure.set_exception(error)

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """`main`'s result, unless something in the background fails first: then that error.

        A step that was not finite is no fault of the code, so its sentence comes without the executor's traceback.
        """
        task = asyncio.create_task(main, name="main")
        try:
            await asyncio.wait({task, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return task.result()
        except ExecutorError as error:
            cause = await self._cause(error)
            if isinstance(cause.__cause__, NonFiniteStep):
                raise cause.__cause__ from None
            raise cause from error.__cause__
        finally:
            await _cancel({task})

    async def _cause(self, error: ExecutorError) -> BaseException:
        """A call that failed because its executor died is reported as that death, which may be noticed a bit later."""
        await asyncio.wait({self._failure}, timeout=1.0)
        return self._failure.exception() or error if self._failure.done() else error

    async def stop(self) -> None:
        """Cancels the background loops and waits until they have ended."""
        await _cancel(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in (pending := list(tasks)):
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


class StallWatch:
    """Raises when nothing has finished for `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s = asyncio.get_running_loop().time()

    def progress(self) -> None:
        """Something finished: a rollout, a reward, a train step, an adoption."""
        self._last_s = asyncio.get_running_loop().time()

    async def loop(self, describe: Callable[[], Awaitable[str]]) -> None:
        """Sleeps until the deadline of the last progress. Raises Stalled, which says what `describe` does."""
        clock = asyncio.get_running_loop()
        while (rest := self._last_s + self._timeout_s - clock.time()) > 0:
            await asyncio.sleep(rest)
        raise Stalled(f"nothing finished for {self._timeout_s:g} s (cluster.stall_timeout_s): {await describe()}")
