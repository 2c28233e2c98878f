"""What a run does when a generator's processes die (`cluster.on_generator_failure`), or stand still.

The others go on with a dead generator's unfinished rollouts: from the segment that was parked last, or else from the
prompt. Staleness stays bounded: requests only go to generators that serve the released weights or newer ones, and a new
generator takes them over before its first request. One that stands still (stopped, swapped out) is not dead: the others
take over its work after a while, and it goes on when it answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from llamarl.cluster.api import ExecutorError, ExecutorHandle, MeshFailed
from llamarl.controller.generators import Generators, Replica
from llamarl.controller.supervision import Supervisor
from llamarl.controller.telemetry import Telemetry

SILENT_S = 10.0
"""A generator that has not said for so long what it does stands still; its host answers while it computes."""

SpawnGenerator = Callable[[int], Awaitable[ExecutorHandle]]
"""Starts the generator of this number."""


class Recovery:
    """Watches the generators, loses dead ones and lets new ones in."""

    def __init__(
        self,
        policy: Literal["stop", "drop", "respawn"],
        generators: Generators,
        supervisor: Supervisor,
        telemetry: Telemetry,
        admit: Callable[[ExecutorHandle], Awaitable[None]],
        spawn: SpawnGenerator | None,
    ) -> None:
        """`admit` brings a new generator up to date and into service; it calls `watch` for it."""
        assert policy != "respawn" or spawn is not None, "nobody can start generators"
        self._policy = policy
        self._generators = generators
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._admit = admit
        self._spawn = spawn
        self._num_spawned = len(generators.replicas)
        self._num_starting = 0
        self.num_resubmitted = 0
        """Groups that others went on with."""

    def watch(self, replica: Replica) -> None:
        """From now on the death of this generator is handled."""
        if self._policy == "stop":
            self._supervisor.watch(replica.handle)
        else:
            replica.handle.failed.add_done_callback(
                lambda failed: None if failed.cancelled() else self._died(replica, failed.result())
            )

    async def silence_loop(self) -> None:
        """Consumes the ages of the generators' statuses; produces requests to others; unblocked by time alone."""
        while True:
            await asyncio.sleep(SILENT_S / 4)
            silent = [one for one in self._generators.replicas if self._telemetry.silent_s(one.handle) > SILENT_S]
            answers = any(self._generators.serves(one) for one in self._generators.replicas if one not in silent)
            for replica in (one for one in silent if one.requests and answers):
                requests = self._generators.withdraw(replica)
                self._telemetry.warn(
                    f"{replica.handle.name} does not answer for {SILENT_S:g} s; "
                    f"{len(requests)} unfinished groups go to the others until it does"
                )
                self._generators.resume(requests)

    def _died(self, replica: Replica, error: ExecutorError) -> None:
        if replica.is_gone:  # it was removed, and ends
            return
        if not isinstance(error, MeshFailed):  # its code raised: what is in its place would raise too
            self._supervisor.fail(error)
            return
        requests = self._generators.lose(replica)
        self.num_resubmitted += len(requests)
        self._telemetry.left(replica.handle)
        # One that dies before it has finished anything would be replaced for ever.
        is_replaced = self._policy == "respawn" and replica.has_delivered
        if is_replaced:
            self._num_starting += 1
            self._supervisor.start(self._replace(), f"replacement of {replica.handle.name}")
        elif not self._generators.replicas and not self._num_starting:
            self._supervisor.fail(error)
            return
        follows = "a new generator starts" if is_replaced else f"{len(self._generators.replicas)} generators are left"
        self._telemetry.warn(f"{error}; {len(requests)} unfinished groups go to the others and {follows}")
        self._generators.resume(requests)

    async def _replace(self) -> None:
        """Starts a generator in place of a dead one. Raises when that fails and no other is left."""
        assert self._spawn is not None
        number, self._num_spawned = self._num_spawned, self._num_spawned + 1
        try:
            await self._admit(await self._spawn(number))
        except (ExecutorError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) or not self._generators.replicas:
                raise
            self._telemetry.warn(f"no replacement, the run goes on with the other generators: {error}")
        finally:
            self._num_starting -= 1
