"""Recovery of a run whose generators die (`cluster.on_failure.generator`) or freeze.

Other generators continue the unfinished rollouts of a dead one, from the last parked segment or from the prompt. The
staleness stays bounded, since each request names the oldest version that may serve it (`admission.py`). A new generator
adopts weights before its first request. A generator that freezes (stopped, swapped out) is not dead: others take
over its work, and it continues when it answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llamarl.cluster.api import ExecutorError, ExecutorHandle, MeshFailed
from llamarl.config.cluster import ClusterConfig
from llamarl.config.errors import ConfigError
from llamarl.controller.flight import Replica, Replicas
from llamarl.controller.ports import Executors
from llamarl.controller.progress import NO_VERSION
from llamarl.controller.restart import RestartBudget, TooManyRestarts
from llamarl.controller.services import Services
from llamarl.observability.metrics import counted

SILENT_S = 10.0
"""Age of its last status from which on a generator counts as frozen. Its host answers even while it computes."""


Policy = Literal["stop", "drop", "respawn"]


def policy_of_generators(config: ClusterConfig, executors: Executors) -> Policy:
    """Returns the policy for dead generators: that of `config`, or "stop" where no generator can be started."""
    policy = config.on_failure.generator
    return "stop" if policy == "respawn" and executors.spawn_generator is None else policy


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoops:
    """The loops that serve one generator."""

    adopt: Callable[[Replica], Coroutine[Any, Any, None]] | None
    """Keeps its weights up to date until it dies; None means that nothing is trained."""
    collect: Callable[[Replica], None]
    """Starts the loop that collects its rollouts."""


class Recovery:
    """Watches the generators, removes and replaces dead ones, and adds and removes generators while the run continues.

    Example::

        recovery = Recovery(policy, executors, replicas, loops, budget, services)
        recovery.watch(replica)                             # handles its death
        recovery.fill(limit=2)                              # starts up to 2 generators on free devices
        await recovery.remove("generator-0", timeout_s=60)
    """

    def __init__(
        self,
        policy: Policy,
        executors: Executors,
        replicas: Replicas,
        loops: ReplicaLoops,
        budget: RestartBudget,
        services: Services,
    ) -> None:
        """
        Args:
            executors: starts new generators.
            loops: to run for new generators.
        """
        self._policy, self._budget = policy, budget
        self._replicas, self._loops = replicas, loops
        self._supervisor, self._telemetry = services.supervisor, services.telemetry
        self._spawn, self._free_slots = executors.spawn_generator, executors.free_generator_slots
        self._hosts_may_join = executors.hosts_may_join
        self._num_spawned = len(replicas.alive)
        self._num_starting = 0
        self.num_resubmitted = 0
        """Groups of dead generators that others continued."""

    def watch(self, replica: Replica) -> None:
        """Handles the death of this generator from now on."""
        if self._policy == "stop":
            self._supervisor.watch(replica.handle)
        else:
            replica.handle.failed.add_done_callback(
                lambda failed: None if failed.cancelled() else self._died(replica, failed.result())
            )

    async def add(self, handle: ExecutorHandle) -> None:
        """Brings a new generator to the newest weights and into service. Raises what it fails with before that."""
        assert self._loops.adopt, "an evaluation has all its generators"
        self._telemetry.joined(handle)
        replica = self._replicas.add(handle)
        # Its failure does not end the run before it is in service.
        adopting = asyncio.create_task(self._loops.adopt(replica), name=f"weights of {replica.name}")
        try:
            await self._replicas.changed.until(lambda: self._replicas.in_service(replica) or adopting.done())
            if adopting.done():
                adopting.result()
                raise MeshFailed(handle.name, (0,), "died before it had weights")
        except BaseException:
            adopting.cancel()
            if not replica.is_gone:
                self._replicas.remove(replica)
                self._telemetry.left(handle)
            raise
        replica.adopting = self._supervisor.take(adopting)
        self.watch(replica)
        self._loops.collect(replica)

    async def remove(self, name: str, timeout_s: float) -> None:
        """Stops a generator. Others continue its unfinished rollouts.

        Raises:
            ValueError: no generator in service has this name, or it is the only one.
            ExecutorError: it does not return its rollouts, or fails while it stops.
        """
        replica = next((replica for replica in self.staying if replica.name == name), None)
        if replica is None or not self._others({name}):
            reason = "unknown" if replica is None else "the only generator"
            raise ValueError(f"{name} cannot be removed: it is {reason}")
        await self._replicas.drain(replica)
        if not replica.is_gone:
            self._replicas.remove(replica)
            self._telemetry.left(replica.handle)
            await replica.handle.stop(timeout_s)

    def fill(self, limit: int) -> int:
        """Starts up to `limit` generators on free devices. Returns their number."""
        number = min(limit, self._free_slots())
        for _ in range(number):
            self._num_starting += 1
            self._supervisor.start(self._start_generator(), "a new generator")
        return number

    @property
    def staying(self) -> list[Replica]:
        """Generators that have been in service and are not about to leave."""
        return [replica for replica in self._replicas.alive if replica.adopting is not None and not replica.is_leaving]

    def _others(self, names: Collection[str]) -> list[Replica]:
        """Returns the generators with which the run can continue without these: the ones that stay, and new ones with
        weights. If only new ones are left, steps wait for them, so that a slow one catches up."""
        others = [replica for replica in self._replicas.alive if replica.name not in names and not replica.is_leaving]
        return [replica for replica in others if replica.adopting is not None or replica.version != NO_VERSION]

    async def until_others(self, names: Collection[str]) -> None:
        """Waits until the run can continue without these generators, or no other generator is starting. The deadline is
        the caller's."""

        def is_settled() -> bool:
            is_starting = self._num_starting or any(replica.adopting is None for replica in self._replicas.alive)
            return not is_starting or bool(self._others(names))

        await self._replicas.changed.until(is_settled)

    async def silence_loop(self) -> None:
        """Consumes the ages of the generators' statuses; waits for time; produces requests to other generators
        when a generator is silent; unblocked by time."""
        replicas = self._replicas
        while True:
            await asyncio.sleep(SILENT_S / 4)
            silent = [replica for replica in replicas.alive if self._telemetry.silent_s(replica.handle) > SILENT_S]
            others = [replica for replica in replicas.alive if replica not in silent]
            can_continue = any(replicas.in_service(replica) for replica in others)
            for replica in (replica for replica in silent if replicas.num_owed(replica) and can_continue):
                if requests := replicas.withdraw(replica):
                    self._telemetry.warn(
                        f"{replica.name} does not answer for {SILENT_S:g} s; until it does, its work "
                        f"({counted(len(requests), 'unfinished group')}) goes to {_named(others)}"
                    )
                    replicas.resume(requests)

    def _died(self, replica: Replica, error: ExecutorError) -> None:
        if replica.is_gone:  # it was removed, and its processes end
            return
        if not isinstance(error, MeshFailed):  # its code raised, and that of a new one would raise too
            self._supervisor.fail(error)
            return
        requests = self._replicas.remove(replica)
        self.num_resubmitted += len(requests)
        self._telemetry.left(replica.handle)
        try:
            is_replaced = self._is_replaced(error)
        except TooManyRestarts as refused:
            self._supervisor.fail(refused)
            return
        num_started = self.fill(1) if is_replaced else 0
        if not self._replicas.alive and not self._num_starting and not (is_replaced and self._hosts_may_join):
            self._supervisor.fail(error)
            return
        self._telemetry.warn(f"{error}; {self._consequence(len(requests), num_started)}")
        self._replicas.resume(requests)

    def _consequence(self, num_groups: int, num_started: int) -> str:
        work, alive = f"its work ({counted(num_groups, 'unfinished group')})", self._replicas.alive
        if not alive:
            return f"{work} waits for {_next(self._num_starting)}"
        left = f"{counted(len(alive), 'generator')} {'is' if len(alive) == 1 else 'are'} left"
        return f"{work} goes to {_named(alive)} and {'a new generator starts' if num_started else left}"

    def _is_replaced(self, error: ExecutorError) -> bool:
        """Whether a dead generator is replaced. Raises TooManyRestarts."""
        if self._policy == "respawn":
            self._budget.count(error)
        return self._policy == "respawn"

    async def _start_generator(self) -> None:
        """Starts a generator. Raises if that fails and no other generator is left."""
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
            run = f"continues with {_named(alive)}" if alive else f"waits for {_next(self._num_starting - 1)}"
            follows = "another one starts" if num_started else f"the run {run}"
            self._telemetry.warn(f"a new generator did not start, {follows}: {error}")
        finally:
            self._num_starting -= 1
            self._replicas.changed.notify()


def _named(others: Sequence[Replica]) -> str:
    return others[0].name if len(others) == 1 else "the others"


def _next(num_starting: int) -> str:
    return "a new generator, which starts" if num_starting else "a host with free devices"
