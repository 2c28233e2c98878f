"""Supervision of a run's loops: a failure anywhere ends the run with its cause, and so does a stall.

The event loop's clock stops while the process is stopped (Ctrl-Z, SIGSTOP), so that no deadline passes meanwhile.
"""

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
"""Longest time between two readings of the clock."""
PAUSE_S = 3.0
"""A longer gap between two readings means that the process was stopped, and does not count as time."""


class PausableClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()`, and with it every timer and timeout, excludes pauses of the process."""

    def __init__(self) -> None:
        self._last_read_s, self._paused_s = super().time(), 0.0
        super().__init__()
        self._beat()
        self.is_interrupted = False
        self._on_interrupt: Callable[[], object] = lambda: None

    def time(self) -> float:
        now_s = super().time()
        if (gap_s := now_s - self._last_read_s) > PAUSE_S:
            self._paused_s += gap_s
        self._last_read_s = now_s
        return now_s - self._paused_s

    def _beat(self) -> None:
        self.call_later(BEAT_S, self._beat)

    def interrupt(self) -> None:
        """Passes on a Ctrl-C that another thread received."""
        self.is_interrupted = True
        self._on_interrupt()

    def listen(self, on_interrupt: Callable[[], object]) -> None:
        """Calls `on_interrupt` at each interrupt, and now if one has already come."""
        self._on_interrupt = on_interrupt
        if self.is_interrupted:
            on_interrupt()


def run_pausable(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` like `asyncio.run`, on a `PausableClockLoop`. Raises what `main` raises.

    If a loop already runs in this thread, as in a notebook, `main` runs in another thread, and Ctrl-C calls the
    loop's `interrupt`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=PausableClockLoop) as runner:
            return runner.run(main)
    return _run_in_thread(main)


def _run_in_thread(main: Coroutine[Any, Any, T]) -> T:
    loop, ended = PausableClockLoop(), threading.Event()
    result = Future[T]()

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                result.set_result(runner.run(main))
        except BaseException as error:  # the thread that waits below raises it
            result.set_exception(error)
        finally:
            ended.set()

    threading.Thread(target=work, name="run", daemon=True).start()
    while not ended.is_set():
        try:
            ended.wait()  # not Thread.join, which takes the thread for ended once it is interrupted
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(loop.interrupt)
    return result.result()


@contextmanager
def rare_garbage_collections() -> Iterator[None]:
    """Makes garbage collections rare. With default thresholds they take a quarter of the controller's time, although
    none of its many records is part of a cycle."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Interrupted(Exception):
    """The user or the system ended the run (Ctrl-C, SIGTERM)."""


class Stalled(RuntimeError):
    """Nothing finished for twice `cluster.timeout_s`; the message lists what each object waits for."""


class Signal:
    """Wakes tasks that wait for a condition.

    Example::

        changed = Signal()
        await changed.until(lambda: buffer.num_free > 0)    # in one task
        changed.notify()                                    # in another task, after a slot was freed
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Has all waiting tasks check their condition again."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until `condition` holds. The deadline is the caller's."""
        while not condition():
            await self.wait()

    async def wait(self) -> None:
        """Waits for the next `notify`."""
        await self._event.wait()


class Supervisor:
    """Owns the background tasks of a run. The first exception in any of them ends the run.

    Example::

        supervisor = Supervisor()
        supervisor.start(scoring.loop(), "score")
        await supervisor.run(training.run())    # raises what a background task raises
        await supervisor.stop()
    """

    def __init__(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(asyncio.Future.exception)  # a failure after the end needs no reader
        self._tasks = set[asyncio.Task[Any]]()

    def start(self, loop: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Runs `loop` in the background. Returns its task."""
        return self.take(asyncio.create_task(loop, name=name))

    def take(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """Supervises a task that already runs, like `start`."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def watch(self, handle: ExecutorHandle) -> None:
        """Ends the run when this executor fails."""
        handle.failed.add_done_callback(lambda failed: None if failed.cancelled() else self.fail(failed.result()))

    def fail(self, error: BaseException) -> None:
        """Ends the run with `error`. Later errors are ignored."""
        if not self._failure.done():
            self._failure.set_exception(error)

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs `main` until it ends or a background task fails. Returns its result, or raises that failure.

        A `NonFiniteStep` is raised without the executor's traceback, since no code is at fault.
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
        """Returns the death of the executor whose call failed, which may be detected a second later."""
        await asyncio.wait({self._failure}, timeout=1.0)
        return self._failure.exception() or error if self._failure.done() else error

    async def stop(self) -> None:
        """Cancels the background tasks and waits until they have ended."""
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
    """Ends a run in which nothing has finished for `timeout_s`.

    Example::

        watch = StallWatch(config.cluster.stall_timeout_s)
        supervisor.start(watch.loop(describe), "stall watch")
        watch.progress()    # after each answer of a generator, scored group, step and sync
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_s = asyncio.get_running_loop().time()

    def progress(self) -> None:
        """Restarts the timeout, since something finished."""
        self._last_s = asyncio.get_running_loop().time()

    async def loop(self, describe: Callable[[], Awaitable[str]]) -> None:
        """Sleeps until the timeout after the last progress. Raises Stalled with the text that `describe` returns."""
        clock = asyncio.get_running_loop()
        while (rest_s := self._last_s + self._timeout_s - clock.time()) > 0:
            await asyncio.sleep(rest_s)
        raise Stalled(f"nothing finished for {self._timeout_s:g} s (twice cluster.timeout_s): {await describe()}")
