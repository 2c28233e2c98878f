"""`RestartableHandle`: the handle of an executor that is restarted when its processes die (`cluster.on_failure`).

Calls without an answer are repeated, in their order, once the new processes are in the state of the old ones. Callers
notice only the time. An executor that keeps no state between calls is ready as soon as it runs. Trainer and critic set
`RestartableHandle.restore`, which has them train again on the steps since their checkpoint (`train_loop.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from llamarl.cluster.api import (
    CallTimeout,
    ExecutorError,
    ExecutorHandle,
    HostFailed,
    HostStatus,
    MeshFailed,
)
from llamarl.config.cluster import ClusterConfig
from llamarl.config.errors import ConfigError
from llamarl.controller.ports import Executors, SpawnAgain
from llamarl.controller.supervision import Signal, Supervisor
from llamarl.observability.report import role_of
from llamarl.observability.spans import AWAY, Span, now_s

T = TypeVar("T")
STOP_S = 2.0
"""Seconds in which the remaining processes of a dead executor may end before they are killed."""
NOT_REPEATED = frozenset({"save", "commit", "publish_sample"})
"""Calls that new processes cannot answer: the caller gets `Restarted`."""
RESTART_WINDOW_S = 600.0
"""Deaths that are older do not count against `cluster.max_restarts`."""
FIRST_PAUSE_S = 0.5
"""Pause after a restart that failed. Each further failure doubles it."""


class TooManyRestarts(MeshFailed):
    """An executor would be restarted more often than `cluster.max_restarts` allows. The message lists all deaths."""

    def __str__(self) -> str:
        return self.cause


class Restarted(MeshFailed):
    """A call was lost with the processes of its executor, which runs again."""


class RestartBudget:
    """Counts deaths of executors, and limits restarts to `cluster.max_restarts` per role within
    RESTART_WINDOW_S.

    Example::

        budget = RestartBudget(config.cluster, num_generators=4, warn=telemetry.warn)
        budget.count(error)    # raises TooManyRestarts after the last allowed death
    """

    def __init__(self, config: ClusterConfig, num_generators: int, warn: Callable[[str], None]) -> None:
        self._max, self._num_generators = config.max_restarts, num_generators
        self.warn = warn
        self._deaths = list[tuple[float, str, str]]()
        """Time, executor and cause of every death."""
        self._counted = deque[tuple[float, str]]()
        """Time and role of the deaths within the window."""

    def count(self, error: ExecutorError) -> None:
        """Counts a death. Raises TooManyRestarts if the executor must not be restarted again."""
        now_s, role = asyncio.get_running_loop().time(), role_of(error.executor)
        self._deaths.append((now_s, error.executor, _cause(error)))
        if not isinstance(error, HostFailed):
            self._counted.append((now_s, role))
        while self._counted and self._counted[0][0] < now_s - RESTART_WINDOW_S:
            self._counted.popleft()
        allowed = self._max * (self._num_generators if role == "generator" else 1)
        number = sum(counted == role for _, counted in self._counted)
        if number <= allowed:
            return
        table = "\n".join(f"  {died_s - now_s:8.1f} s  {name}: {cause}" for died_s, name, cause in self._deaths[-20:])
        raise TooManyRestarts(
            error.executor, (), f"{role} died {number} times within {RESTART_WINDOW_S:g} s and is not restarted again "
            f"(cluster.max_restarts = {self._max}); all deaths, in seconds before the end:\n{table}",
        )  # fmt: skip


def _cause(error: ExecutorError) -> str:
    cause = error.cause if isinstance(error, MeshFailed) else error.__cause__ or error
    return str(cause).split("\n", 1)[0]


class RestartableHandle(ExecutorHandle):
    """The handle of an executor through all its restarts. It fails when the executor may not be restarted, or when its
    code raises.

    Example::

        handle = RestartableHandle(handle, executors.spawn_again, supervisor, budget)
        trained.on_trainer_restart(weights.trainer_died, weights.trainer_restarted)    # sets `on_death` and `restore`
        await handle.call("step", ...)    # answered by new processes if the old ones die meanwhile
    """

    def __init__(
        self,
        current: ExecutorHandle,
        spawn: SpawnAgain,
        supervisor: Supervisor,
        budget: RestartBudget,
    ) -> None:
        """
        Args:
            current: handle of the processes that run now.
            spawn: starts the executor with the given name.
        """
        self.name = current.name
        self.failed: asyncio.Future[ExecutorError] = asyncio.get_running_loop().create_future()
        self.on_death: Callable[[], None] = lambda: None
        """Called at each death, before the restart."""
        self.restore: Callable[[ExecutorHandle], Awaitable[str]] | None = None
        """Brings new processes to the state of the old ones. Returns text on the checkpoint they began from."""
        self._spawn, self._supervisor, self._budget = spawn, supervisor, budget
        self._is_up = True
        self._saver: ExecutorHandle | None = None
        """Handle of the processes that saved last; only these can commit."""
        self._last_status_s, self._away = now_s(), list[Span]()
        """Time of the last status, and periods without processes that no status has reported yet."""
        self._num_numbered = 0
        self._num_in_flight = 0
        self._drained = Signal()
        """Notified when no call is in flight."""
        self._waiting = dict[int, asyncio.Future[None]]()
        """Calls that wait for the restart, by number."""
        self._use(current)

    def _use(self, current: ExecutorHandle) -> None:
        self._current, self.pids, self.hosts = current, current.pids, current.hosts
        current.failed.add_done_callback(
            lambda failed: None if failed.cancelled() else self._ended(current, failed.result())
        )

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return await self._call(lambda current: current.call(method, *args, timeout_s=timeout_s, **kwargs), method)

    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        return await self._call(lambda current: current.call_each(method, *args, timeout_s=timeout_s, **kwargs), method)

    async def _call(self, send: Callable[[ExecutorHandle], Awaitable[T]], method: str) -> T:
        """Calls the current processes, and the next ones if these die meanwhile. Returns the answer."""
        number, self._num_numbered, self.num_calls = self._num_numbered, self._num_numbered + 1, self.num_calls + 1
        while True:
            while not self._is_up or min(self._waiting, default=number) < number:
                await (asyncio.sleep(0) if self._is_up else self._restarted(number))
            if method == "commit" and self._saver is not self._current:
                raise Restarted(self.name, (0,), "what was saved was lost with the processes")
            current, self._num_in_flight = self._current, self._num_in_flight + 1
            try:
                answer = await send(current)
                self._saver = current if method == "save" else self._saver
                return answer
            except ExecutorError as error:
                if not _is_death(error) or self.failed.done():
                    raise
                self._ended(current, error)
            finally:
                self._num_in_flight -= 1
                if not self._num_in_flight:
                    self._drained.notify()
            await self._restarted(number)
            if method in NOT_REPEATED:
                raise Restarted(self.name, (0,), f"{method} was lost with the processes")

    async def _restarted(self, number: int) -> None:
        """Waits for the restart. Raises the error of the last death if there is none."""
        if self.failed.done():
            raise self.failed.result()
        self._waiting[number] = restarted = asyncio.get_running_loop().create_future()
        try:
            await restarted
        finally:  # later calls wait for this one until then, even if its caller was cancelled
            del self._waiting[number]

    def _waiting_calls(self) -> list[asyncio.Future[None]]:
        return [waiting for _, waiting in sorted(self._waiting.items()) if not waiting.done()]

    async def status(self, timeout_s: float) -> HostStatus:
        return await self._current.status(timeout_s)

    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        first, *others = await self._current.status_each(timeout_s)
        if self._is_up:
            self._last_status_s = now_s()
        away, self._away = self._away, []
        return [replace(first, spans=[*away, *first.spans]), *others]

    async def stop(self, timeout_s: float) -> None:
        await self._current.stop(timeout_s)

    def _ended(self, ended: ExecutorHandle, error: ExecutorError) -> None:
        """Handles the end of the current processes once, with the cause that is noticed first."""
        if ended is not self._current or not self._is_up or self.failed.done():
            return
        self._is_up = False
        if not _is_death(error):  # the executor's code raised, and would raise again
            self._fail(error)
            return
        self.on_death()
        self._supervisor.start(self._restart(error), f"new {self.name}")

    def _fail(self, error: ExecutorError) -> None:
        self.failed.set_result(error)
        for waiting in self._waiting_calls():
            waiting.set_exception(error)

    async def _restart(self, error: ExecutorError) -> None:
        """Consumes a death; waits for new processes, which `restore` brings to the old state; produces these, and
        repeats calls without an answer; unblocked by the start of the processes."""
        pause_s = 0.0
        while True:
            error = await self._clear(error)
            try:
                self._budget.count(error)
                self._budget.warn(f"{error}; it is started again")
                await asyncio.sleep(pause_s)
                current = await self._spawn(self.name)
                self._use(current)
                origin = f" from {await self.restore(current)}" if self.restore else ""
                break
            except TooManyRestarts as refused:
                self._fail(refused)
                return
            except ConfigError as refused:  # no devices are left for it
                self._fail(HostFailed(self.name, (0,), f"{_cause(error)}; {refused}"))
                return
            except ExecutorError as failed:
                if not _is_death(failed):
                    self._fail(failed)
                    return
                error, pause_s = failed, 2 * pause_s or FIRST_PAUSE_S
        await self._drained.until(lambda: not self._num_in_flight)  # each call notices the death by itself
        self._is_up = True
        self._away.append(Span(AWAY, self._last_status_s, now_s()))
        place = f", on {', '.join(current.hosts)}" if any(current.hosts) else ""
        self._budget.warn(f"{self.name} continues{origin}{place}")
        for waiting in self._waiting_calls():
            waiting.set_result(None)
        if current.failed.done():
            self._ended(current, current.failed.result())

    async def _clear(self, error: ExecutorError) -> ExecutorError:
        """Ends the remaining processes, which may hold devices. Returns the cause of the death."""
        current = self._current
        was_killed = current.failed.done() and len(current.pids) == 1
        stopping = asyncio.ensure_future(current.stop(STOP_S))
        stopping.add_done_callback(lambda stopped: stopped.cancelled() or stopped.exception())
        await asyncio.wait({stopping}, timeout=0.0 if was_killed else None)
        knows_cause = current.failed.done() and error.executor == self.name and not isinstance(error, HostFailed)
        return current.failed.result() if knows_cause and _is_death(current.failed.result()) else error


def with_restarts(
    executors: Executors, config: ClusterConfig, supervisor: Supervisor, budget: RestartBudget
) -> Executors:
    """Returns the executors with a `RestartableHandle` for each one that is restarted, generators excepted."""
    spawn = executors.spawn_again
    if spawn is None:
        return executors

    def restartable(handle: ExecutorHandle) -> ExecutorHandle:
        if getattr(config.on_failure, handle.name.replace("-", "_")) == "stop":
            return handle
        return RestartableHandle(handle, spawn, supervisor, budget)

    return replace(
        executors,
        reward=restartable(executors.reward),
        trainer=restartable(executors.trainer) if executors.trainer else None,
        models={name: restartable(handle) for name, handle in executors.models.items()},
    )


def _is_death(error: ExecutorError) -> bool:
    return isinstance(error, MeshFailed | CallTimeout)
