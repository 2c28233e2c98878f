"""Recovery of a run whose generator's processes die (`cluster.on_failure.generator`), or stand still.

The others go on with a dead generator's unfinished rollouts: from the segment that was parked last, or else from the
prompt. Staleness stays bounded: requests only go to generators that serve the released weights or newer ones, and a new
generator takes them over before its first request. One that stands still (stopped, swapped out) is not dead: the others
take over its work after a while, and it goes on when it answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Literal

from llamarl.cluster.api import ExecutorError, ExecutorHandle, MeshFailed
from llamarl.config.cluster import ClusterConfig
from llamarl.config.errors import ConfigError
from llamarl.controller.flight import NO_VERSION, Replica, Replicas
from llamarl.controller.ports import Executors
from llamarl.controller.restart import RestartBudget, TooManyRestarts
from llamarl.controller.supervision import Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.observability.formats import counted

SILENT_S = 10.0
"""A generator that has not said for so long what it does stands still; its host answers while it computes."""


Policy = Literal["stop", "drop", "respawn"]


def policy_of_generators(config: ClusterConfig, executors: Executors) -> Policy:
    """Policy for dead generators: that of `config`, where others can be started; an evaluation can start none."""
    wanted = config.on_failure.generator
    return "stop" if wanted == "respawn" and executors.spawn_generator is None else wanted


class Recovery:
    """Watches the generators, loses dead ones, replaces them, and lets others come and go."""

    def __init__(
        self,
        policy: Policy,
        replicas: Replicas,
        supervisor: Supervisor,
        telemetry: Telemetry,
        follow: Callable[[Replica], Coroutine[Any, Any, None]] | None,
        collect: Callable[[Replica], None],
        executors: Executors,
        deaths: RestartBudget,
    ) -> None:
        """
        Args:
            follow: the loop that keeps a replica's weights up to date, until it dies; None: nothing is trained.
            collect: starts the loop that takes what it generates.
            executors: where new generators come from.
        """
        self._policy, self._deaths = policy, deaths
        self._replicas = replicas
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._follow, self._collect = follow, collect
        self._spawn, self._free_slots = executors.spawn_generator, executors.free_generator_slots
        self._hosts_may_join = executors.hosts_may_join
        self._num_spawned = len(replicas.alive)
        self._num_starting = 0
        self.num_resubmitted = 0
        """Groups that others went on with."""

    def watch(self, replica: Replica) -> None:
        """Handles the death of this generator from now on."""
        if self._policy == "stop":
            self._supervisor.watch(replica.handle)
        else:
            replica.handle.failed.add_done_callback(
                lambda failed: None if failed.cancelled() else self._died(replica, failed.result())
            )

    async def add(self, handle: ExecutorHandle) -> None:
        """Brings a new generator to the newest weights, and into service. Raises what it fails with before that."""
        assert self._follow, "who only evaluates has all its generators"
        self._telemetry.joined(handle)
        replica = self._replicas.add(handle)
        # Until it serves, what befalls it is nobody else's matter.
        adopting = asyncio.create_task(self._follow(replica), name=f"weights of {replica.name}")
        try:
            await self._replicas.changed.until(lambda: self._replicas.serves(replica) or adopting.done())
            if adopting.done():
                adopting.result()
                raise MeshFailed(handle.name, (0,), "died before it had weights")
        except BaseException:
            adopting.cancel()
            if not replica.is_gone:
                self._replicas.lose(replica)
                self._telemetry.left(handle)
            raise
        replica.adopting = self._supervisor.take(adopting)
        self.watch(replica)
        self._collect(replica)

    async def remove(self, name: str, timeout_s: float) -> None:
        """Stops a generator; the others go on with its unfinished rollouts.

        Raises:
            ValueError: no generator that is up has this name, or it is the only one.
            ExecutorError: it does not give its rollouts back, or fails while it stops.
        """
        replica = next((one for one in self.staying if one.name == name), None)
        if replica is None or not self._others({name}):
            reason = "unknown" if replica is None else "the only generator"
            raise ValueError(f"{name} cannot be removed: it is {reason}")
        await self._replicas.drain(replica)
        if not replica.is_gone:
            self._replicas.lose(replica)
            self._telemetry.left(replica.handle)
            await replica.handle.stop(timeout_s)

    def fill(self, limit: int) -> int:
        """Starts generators where there is room for them, so many at most; how many."""
        number = min(limit, self._free_slots())
        for _ in range(number):
            self._num_starting += 1
            self._supervisor.start(self._start_one(), "a new generator")
        return number

    @property
    def staying(self) -> list[Replica]:
        """Generators that are up, and not about to leave."""
        return [one for one in self._replicas.alive if one.adopting is not None and not one.is_leaving]

    def _others(self, names: Collection[str]) -> list[Replica]:
        """Generators with which the run can go on without these: those that stay, and those that have come and have
        weights. Steps wait for these then, so that one catches up which is too slow to do so beside them."""
        others = [one for one in self._replicas.alive if one.name not in names and not one.is_leaving]
        return [one for one in others if one.adopting is not None or one.version != NO_VERSION]

    async def until_others(self, names: Collection[str]) -> None:
        """The run can go on without these generators, or no other starts any more; somebody else's deadline holds."""

        def has_come() -> bool:
            starting = self._num_starting or any(one.adopting is None for one in self._replicas.alive)
            return not starting or bool(self._others(names))

        await self._replicas.changed.until(has_come)

    async def silence_loop(self) -> None:
        """Consumes the ages of the generators' statuses; produces requests to others; unblocked by time alone."""
        while True:
            await asyncio.sleep(SILENT_S / 4)
            silent = [one for one in self._replicas.alive if self._telemetry.silent_s(one.handle) > SILENT_S]
            others = [one for one in self._replicas.alive if one not in silent]
            answers = any(self._replicas.serves(one) for one in others)
            for replica in (one for one in silent if self._replicas.owes(one) and answers):
                if requests := self._replicas.withdraw(replica):
                    self._telemetry.warn(
                        f"{replica.name} does not answer for {SILENT_S:g} s; until it does, its work "
                        f"({counted(len(requests), 'unfinished group')}) goes to {_named(others)}"
                    )
                    self._replicas.resume(requests)

    def _died(self, replica: Replica, error: ExecutorError) -> None:
        if replica.is_gone:  # it was removed, and ends
            return
        if not isinstance(error, MeshFailed):  # its code raised: what is in its place would raise too
            self._supervisor.fail(error)
            return
        requests = self._replicas.lose(replica)
        self.num_resubmitted += len(requests)
        self._telemetry.left(replica.handle)
        try:
            is_replaced = self._is_replaced(error)
        except TooManyRestarts as last:
            self._supervisor.fail(last)
            return
        num_started = self.fill(1) if is_replaced else 0
        if not self._replicas.alive and not self._num_starting and not (is_replaced and self._hosts_may_join):
            self._supervisor.fail(error)
            return
        self._telemetry.warn(f"{error}; {self._what_follows(len(requests), num_started)}")
        self._replicas.resume(requests)

    def _what_follows(self, num_groups: int, num_started: int) -> str:
        """Sentence on a dead generator's groups, and on who takes its place."""
        work, alive = f"its work ({counted(num_groups, 'unfinished group')})", self._replicas.alive
        if not alive:
            return f"{work} waits for {_next(self._num_starting)}"
        left = f"{counted(len(alive), 'generator')} {'is' if len(alive) == 1 else 'are'} left"
        return f"{work} goes to {_named(alive)} and {'a new generator starts' if num_started else left}"

    def _is_replaced(self, error: ExecutorError) -> bool:
        """Whether another generator takes the place of a dead one. Raises TooManyRestarts."""
        if self._policy == "respawn":
            self._deaths.count(error)
        return self._policy == "respawn"

    async def _start_one(self) -> None:
        """Starts a generator. Raises when that fails and no other is left."""
        assert self._spawn is not None
        number, self._num_spawned = self._num_spawned, self._num_spawned + 1
        try:
            await self.add(await self._spawn(number))
        except (ExecutorError, ConfigError) as error:
            is_replaced = isinstance(error, MeshFailed) and self._is_replaced(error)
            num_started = self.fill(1) if is_replaced else 0
            if not (num_started or self._replicas.alive or self._hosts_may_join):
                raise
            alive = self._replicas.alive
            run = f"goes on with {_named(alive)}" if alive else f"waits for {_next(self._num_starting - 1)}"
            follows = "another one starts" if num_started else f"the run {run}"
            self._telemetry.warn(f"a new generator did not start, {follows}: {error}")
        finally:
            self._num_starting -= 1
            self._replicas.changed.notify()


def _named(others: Sequence[Replica]) -> str:
    """Generators that go on, for people."""
    return others[0].name if len(others) == 1 else "the others"


def _next(num_starting: int) -> str:
    """Who is waited for when no generator is left."""
    return "a new generator, which starts" if num_starting else "a host with room"
