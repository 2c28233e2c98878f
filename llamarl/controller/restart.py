"""`RestartableHandle`: one executor through all its lives. When its processes die, others follow by
`cluster.on_failure`.

Calls that were not answered are asked again, in their order, once the new processes are as the old ones were; callers
notice nothing but the time. Executors that only answer are as they were when they are up; trainer and critic are
brought there by whoever knows what they have learnt (`optimized.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, HostFailed, HostStatus, MeshFailed
from llamarl.config.cluster import ClusterConfig
from llamarl.config.errors import ConfigError
from llamarl.controller.ports import Executors, SpawnAgain
from llamarl.controller.supervision import Supervisor
from llamarl.observability.accounting import role_of
from llamarl.observability.spans import AWAY, Span, now_s

T = TypeVar("T")
STOP_S = 2.0
"""Seconds that what is left of an executor has to end; then it is killed."""
NOT_REPEATED = frozenset({"save", "commit", "publish_sample"})
"""Calls that mean nothing to a new life: the caller hears that they are lost."""
FIRST_PAUSE_S = 0.5
"""Before an executor is started again that did not come up; each further one is twice as long."""


class TooManyRestarts(MeshFailed):
    """An executor would be replaced more often than `cluster.max_restarts` allows. The message lists all deaths."""

    def __str__(self) -> str:
        return self.cause


class Restarted(MeshFailed):
    """A call was lost with the processes of its executor, which is up again."""


class RestartBudget:
    """All executors of a run that died, and whether one more may be replaced."""

    def __init__(self, config: ClusterConfig, replicas: int, tell: Callable[[str], None]) -> None:
        """`tell` gets sentences for the user."""
        self._max, self._window_s, self._replicas = config.max_restarts, config.restart_window_s, replicas
        self.tell = tell
        self._all = list[tuple[float, str, str]]()
        """When, who and of what."""
        self._counted = deque[tuple[float, str]]()
        """When, and in which role."""

    def count(self, error: ExecutorError) -> None:
        """One more has died, and is to be replaced. Raises TooManyRestarts."""
        now_s, role = asyncio.get_running_loop().time(), role_of(error.executor)
        self._all.append((now_s, error.executor, _cause(error)))
        if not isinstance(error, HostFailed):
            self._counted.append((now_s, role))
        while self._counted and self._counted[0][0] < now_s - self._window_s:
            self._counted.popleft()
        allowed = self._max * (self._replicas if role == "generator" else 1)
        number = sum(one == role for _, one in self._counted)
        if number <= allowed:
            return
        table = "\n".join(f"  {when_s - now_s:8.1f} s  {who}: {cause}" for when_s, who, cause in self._all[-20:])
        raise TooManyRestarts(
            error.executor, (), f"{role} died {number} times within {self._window_s:g} s and is not replaced again "
            f"(cluster.max_restarts = {self._max}); these died, seconds before the end:\n{table}",
        )  # fmt: skip


def _cause(error: ExecutorError) -> str:
    own = error.cause if isinstance(error, MeshFailed) else error.__cause__ or error
    return str(own).split("\n", 1)[0]


class RestartableHandle(ExecutorHandle):
    """Handle of an executor through all its lives. It fails when it is not to be started again, or its code raises."""

    def __init__(
        self,
        life: ExecutorHandle,
        spawn: SpawnAgain,
        supervisor: Supervisor,
        deaths: RestartBudget,
    ) -> None:
        """`spawn` starts the executor of a name."""
        self.name = life.name
        self.failed: asyncio.Future[ExecutorError] = asyncio.get_running_loop().create_future()
        self.died: Callable[[], None] = lambda: None
        """Hears of each death, at once."""
        self.restore: Callable[[ExecutorHandle], Awaitable[str]] | None = None
        """Brings a new life to where the last one was; where from, for people."""
        self._spawn, self._supervisor, self._deaths = spawn, supervisor, deaths
        self._is_up = True
        self._saver: ExecutorHandle | None = None
        """The life that saved last: only that one can commit."""
        self._heard_s, self._away = now_s(), list[Span]()
        """When a life last told its status, and the times without one that nobody has been told of."""
        self._number = 0
        self._in_flight = 0
        self._waiting = dict[int, asyncio.Future[None]]()
        """Calls that wait for the next life, by their numbers."""
        self._lives(life)

    def _lives(self, life: ExecutorHandle) -> None:
        self._life, self.pids, self.hosts = life, life.pids, life.hosts
        life.failed.add_done_callback(lambda failed: None if failed.cancelled() else self._ended(life, failed.result()))

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return await self._call(lambda life: life.call(method, *args, timeout_s=timeout_s, **kwargs), method)

    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        return await self._call(lambda life: life.call_each(method, *args, timeout_s=timeout_s, **kwargs), method)

    async def _call(self, ask: Callable[[ExecutorHandle], Awaitable[T]], method: str) -> T:
        """Answer of the life at hand; where it dies meanwhile, the next one is asked."""
        number, self._number, self.num_calls = self._number, self._number + 1, self.num_calls + 1
        while True:
            while not self._is_up or min(self._waiting, default=number) < number:
                await (asyncio.sleep(0) if self._is_up else self._turn(number))
            if method == "commit" and self._saver is not self._life:
                raise Restarted(self.name, (0,), "what was saved was lost with the processes")
            life, self._in_flight = self._life, self._in_flight + 1
            try:
                answer = await ask(life)
                self._saver = life if method == "save" else self._saver
                return answer
            except ExecutorError as error:
                if not _is_death(error) or self.failed.done():
                    raise
                self._ended(life, error)
            finally:
                self._in_flight -= 1
            await self._turn(number)
            if method in NOT_REPEATED:
                raise Restarted(self.name, (0,), f"{method} was lost with the processes")

    async def _turn(self, number: int) -> None:
        """Waits for the next life. Raises what it failed with, if there is none."""
        if self.failed.done():
            raise self.failed.result()
        self._waiting[number] = next_life = asyncio.get_running_loop().create_future()
        try:
            await next_life
        finally:  # until then later calls wait for it, also where its caller has been cancelled
            del self._waiting[number]

    def _of_calls(self) -> list[asyncio.Future[None]]:
        """Futures that calls wait for, in the order of the calls."""
        return [waiting for _, waiting in sorted(self._waiting.items()) if not waiting.done()]

    async def status(self, timeout_s: float) -> HostStatus:
        return await self._life.status(timeout_s)

    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        first, *others = await self._life.status_each(timeout_s)
        if self._is_up:
            self._heard_s = now_s()
        away, self._away = self._away, []
        return [replace(first, spans=[*away, *first.spans]), *others]

    async def stop(self, timeout_s: float) -> None:
        await self._life.stop(timeout_s)

    def _ended(self, life: ExecutorHandle, error: ExecutorError) -> None:
        """A life is over: the first to notice says why."""
        if life is not self._life or not self._is_up or self.failed.done():
            return
        self._is_up = False
        if not _is_death(error):  # its code raised: the next life's would raise, too
            self._fail(error)
            return
        self.died()
        self._supervisor.start(self._live_on(error), f"new {self.name}")

    def _fail(self, error: ExecutorError) -> None:
        self.failed.set_result(error)
        for waiting in self._of_calls():
            waiting.set_exception(error)

    async def _live_on(self, error: ExecutorError) -> None:
        """Consumes deaths; produces the next life, and asks again what was not answered; unblocked by its start."""
        pause_s = 0.0
        while True:
            error = await self._cleared(error)
            try:
                self._deaths.count(error)
                self._deaths.tell(f"{error}; it is started again")
                await asyncio.sleep(pause_s)
                life = await self._spawn(self.name)
                self._lives(life)
                origin = f" from {await self.restore(life)}" if self.restore else ""
                break
            except TooManyRestarts as last:
                self._fail(last)
                return
            except ConfigError as refused:  # there is no place for it any more
                self._fail(HostFailed(self.name, (0,), f"{_cause(error)}; {refused}"))
                return
            except ExecutorError as again:
                if not _is_death(again):
                    self._fail(again)
                    return
                error, pause_s = again, 2 * pause_s or FIRST_PAUSE_S
        while self._in_flight:  # each call hears of the end by itself
            await asyncio.sleep(0.01)
        self._is_up = True
        self._away.append(Span(AWAY, self._heard_s, now_s()))
        place = f", on {', '.join(life.hosts)}" if any(life.hosts) else ""
        self._deaths.tell(f"{self.name} goes on{origin}{place}")
        for waiting in self._of_calls():
            waiting.set_result(None)
        if life.failed.done():
            self._ended(life, life.failed.result())

    async def _cleared(self, error: ExecutorError) -> ExecutorError:
        """Ends what is left of a life, which may hold devices; what it died of."""
        life = self._life
        was_killed = life.failed.done() and len(life.pids) == 1
        stopping = asyncio.ensure_future(life.stop(STOP_S))
        stopping.add_done_callback(lambda stopped: stopped.cancelled() or stopped.exception())
        await asyncio.wait({stopping}, timeout=0.0 if was_killed else None)
        is_of_life = life.failed.done() and error.executor == self.name and not isinstance(error, HostFailed)
        return life.failed.result() if is_of_life and _is_death(life.failed.result()) else error


def with_restarts(
    executors: Executors, config: ClusterConfig, supervisor: Supervisor, deaths: RestartBudget
) -> Executors:
    """The executors, with a `RestartableHandle` for each, but generators, that is to be started again."""
    spawn = executors.spawn_again
    if spawn is None:
        return executors

    def of(handle: ExecutorHandle) -> ExecutorHandle:
        if getattr(config.on_failure, handle.name.replace("-", "_")) == "stop":
            return handle
        return RestartableHandle(handle, spawn, supervisor, deaths)

    return replace(
        executors,
        reward=of(executors.reward),
        trainer=of(executors.trainer) if executors.trainer else None,
        models={name: of(handle) for name, handle in executors.models.items()},
    )


def _is_death(error: ExecutorError) -> bool:
    return isinstance(error, MeshFailed | CallTimeout)
