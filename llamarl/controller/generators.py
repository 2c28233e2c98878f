"""`Generators`: all generator replicas as one. Requests are scattered, rollouts gathered, partial ones scattered again.

A replica is *in service* while it serves the released version or a newer one and is not about to leave; only then it is
given requests. `controller.sync` says which versions are served and released; `docs/staleness.md` proves the bound.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from functools import reduce
from operator import attrgetter
from typing import Any

from llamarl.channels.channel import Channel, deal
from llamarl.cluster.api import CallTimeout, ExecutorHandle, MeshFailed, chunks
from llamarl.controller.supervision import Signal, Supervisor
from llamarl.executors.replies import Collected, DecodingWork, Published
from llamarl.rollouts.pieces import split
from llamarl.rollouts.segments import UNFINISHED, continued, ids_only, not_begun
from llamarl.types import GenerationRequest, Rollout

NO_VERSION = -1
"""Older than every version."""
ABORT_INTERVAL_S = 1.0
"""A replica that is about to leave is asked so often for what it still decodes."""


class Replica:
    """One generator and what the controller knows of it."""

    def __init__(self, handle: ExecutorHandle) -> None:
        self.handle = handle
        self.version = NO_VERSION
        """It is known to serve this one; it may have begun to serve a newer one."""
        self.fetching = NO_VERSION
        """What it fetches now."""
        self.fetching_since_s = math.inf
        self.adopt_s = math.inf
        """How long its last adoption took, from call to answer."""
        self.tried: Published | None = None
        """What it fetched last, with or without success."""
        self.num_failures = 0
        """Fetches in a row that ended with a failure or a mismatch."""
        self.is_leaving = False
        self.is_gone = False
        self.follower: asyncio.Task[None] | None = None
        """Keeps its weights up to date."""
        self.requests = dict[int, GenerationRequest]()
        """What it has not answered completely, by group."""
        self._missing = dict[int, dict[int, Rollout | None]]()
        """The rollouts that it owes, by group and index, with what they began with; None: with the prompt."""
        self._parked = dict[int, list[Rollout]]()
        """Partial rollouts of groups that it still works on."""
        self.num_outstanding = 0
        """Rollouts that it owes."""
        self.withdrawn = set[tuple[int, int]]()
        """Rollouts, by group and index, that others generate by now: what it says of them is dropped."""
        self.has_delivered = False
        """It has finished or parked a rollout."""
        self.busy = asyncio.Event()
        """Set while it owes something, and when it is gone."""
        self.num_waiting = 0
        self.num_running = 0
        self.generated_tokens = 0
        self.work = DecodingWork()

    def owe(self, requests: Sequence[GenerationRequest]) -> None:
        """It is about to be asked for these."""
        for request in requests:
            missing: dict[int, Rollout | None] = {partial.index: partial for partial in request.partials}
            missing = missing or dict.fromkeys(range(request.group_size))
            self.requests[request.group_id], self._missing[request.group_id] = request, missing
            self.num_outstanding += len(missing)
        self.busy.set()

    def deliver(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[GenerationRequest]]:
        """It has answered: whole rollouts that are finished, and requests to go on with parked ones.

        Those of a group go on together, once it works on none of them any more: they share the prefill of their prompt.
        """
        self.has_delivered = True
        finished, to_go_on = list[Rollout](), list[GenerationRequest]()
        for rollout in rollouts:
            group_id = rollout.group_id
            if (group_id, rollout.index) in self.withdrawn:
                self.withdrawn.remove((group_id, rollout.index))
                continue
            self.num_outstanding -= 1
            missing = self._missing[group_id]
            partial = missing.pop(rollout.index)
            whole = continued(partial, rollout) if partial else rollout
            if rollout.finish_reason in UNFINISHED:
                self._parked.setdefault(group_id, []).append(whole)
            else:
                finished.append(whole)
            if not missing:
                del self._missing[group_id]
                request, parked = self.requests.pop(group_id), self._parked.pop(group_id, None)
                if parked:
                    to_go_on.append(replace(request, partials=tuple(parked)))
        if not self.num_outstanding and not self.withdrawn:
            self.busy.clear()
        return finished, to_go_on

    def unanswered(self) -> list[GenerationRequest]:
        """What somebody else must generate now that it is gone: from the last segment on, or from the prompt."""
        left = list[GenerationRequest]()
        for group_id, request in self.requests.items():
            missing = (partial or not_begun(group_id, index) for index, partial in self._missing[group_id].items())
            left.append(replace(request, partials=(*missing, *self._parked.get(group_id, ()))))
        return left

    def withdraw(self) -> list[GenerationRequest]:
        """As `unanswered`, of one that is there but does not answer. It owes nothing any more."""
        requests = self.unanswered()
        self.withdrawn |= {(group_id, index) for group_id, missing in self._missing.items() for index in missing}
        self.num_outstanding = 0
        for owed in (self.requests, self._missing, self._parked):
            owed.clear()
        return requests


class Generators:
    """Scatter and gather over the replicas that are alive."""

    def __init__(
        self,
        handles: Sequence[ExecutorHandle],
        collected: Channel[Rollout],
        supervisor: Supervisor,
        timeout_s: float,
        *,
        segment_tokens: int = 0,
        survives_deaths: bool = False,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """With `survives_deaths`, calls to a dead replica have no effect: somebody sees the death and calls `lose`.
        `progress` is told when something has come in."""
        self.replicas = [Replica(handle) for handle in handles]
        self.released = NO_VERSION
        """Replicas that serve an older version are left behind."""
        self.num_resumed = 0
        """Partial rollouts that went on."""
        self._scattered = set[int]()
        """Groups whose partial rollouts are too long for one call, so that several replicas may have some."""
        self._collected = collected
        self._supervisor = supervisor
        self.timeout_s = timeout_s
        self._segment_tokens = segment_tokens
        self._survives_deaths = survives_deaths
        self._progress = progress
        self._changed = Signal()
        """A replica came, went, adopted a version or owes less."""
        self._tokens_of_lost = 0
        """Sampled by replicas that are gone."""
        self._work_of_lost = DecodingWork()

    def serves(self, replica: Replica) -> bool:
        """Whether it is in service."""
        return replica.version >= self.released and not replica.is_leaving and not replica.withdrawn

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Gives each request to the replica in service that owes the fewest rollouts; waits while there is none.

        A replica that still has another request of the same group is passed over: engines take one at a time.
        """
        scattered = self._scattered & {request.group_id for request in requests}
        await self._changed.until(lambda: any(self._may_have(replica, scattered) for replica in self.replicas))
        able = [replica for replica in self.replicas if self._may_have(replica, scattered)]
        if len(requests) == 1:
            dealt = [(min(able, key=attrgetter("num_outstanding")), list(requests))]
        else:
            size = len(requests[0].partials) or requests[0].group_size
            dealt = list(zip(able, deal(requests, [one.num_outstanding for one in able], size), strict=True))
        for replica, part in dealt:
            if part:  # what is owed is what `lose` gives back, whatever becomes of the call
                replica.owe(part)
                self._supervisor.start(self._send(replica, part), f"requests to {replica.handle.name}")

    def _may_have(self, replica: Replica, scattered: Set[int]) -> bool:
        return self.serves(replica) and (not scattered or scattered.isdisjoint(replica.requests))

    async def _send(self, replica: Replica, requests: Iterable[GenerationRequest]) -> None:
        """A task of its own: one that hangs must not keep the others waiting."""
        wired = (
            replace(request, segment_tokens=self._segment_tokens, partials=tuple(map(ids_only, request.partials)))
            for request in requests
        )
        for chunk in chunks(wired):
            await self.call(replica, "submit", chunk)

    def resume(self, requests: Iterable[GenerationRequest]) -> None:
        """Unfinished requests go to whoever is free."""
        together = list[GenerationRequest]()
        for request in requests:
            first, *rest = split(request)
            together.append(first)
            if rest:
                self._scattered.add(request.group_id)
            for part in rest:
                self._supervisor.start(self.submit([part]), "partial rollouts")
        if together:
            self._supervisor.start(self.submit(together), "partial rollouts")

    async def call(self, replica: Replica, method: str, *args: Any) -> Any:
        """None from a replica that is gone, or that is dead where deaths are survived."""
        try:
            return await replica.handle.call(method, *args, timeout_s=self.timeout_s)
        except MeshFailed:
            if not (self._survives_deaths or replica.is_gone):
                raise
            return None

    def collect_from(self, replica: Replica) -> None:
        """Starts the loop that takes what `replica` finishes."""
        self._supervisor.start(self._collect(replica), f"collect {replica.handle.name}")

    async def _collect(self, replica: Replica) -> None:
        """Consumes what `replica` finishes or parks while it is there; produces into the channel of collected rollouts,
        and requests to go on with what is parked.

        Waits for requests to be owed, then for the replica to finish some of them.
        """
        while True:
            await replica.busy.wait()
            reply: Collected | None = None if replica.is_gone else await self.call(replica, "collect")
            if reply is None or replica.is_gone:
                return
            finished, to_go_on = replica.deliver(reply.rollouts)
            replica.num_waiting, replica.num_running = reply.num_waiting, reply.num_running
            replica.generated_tokens, replica.work = reply.generated_tokens, reply.work
            self.num_resumed += sum(len(request.partials) for request in to_go_on)
            self.resume(to_go_on)
            self._changed.notify()
            self._progress()
            for rollout in finished:
                await self._collected.put(rollout)

    def adopted(self, replica: Replica, version: int) -> None:
        """`replica` serves `version` from now on."""
        replica.version = version
        self._changed.notify()

    def release(self, version: int) -> None:
        """Replicas that serve an older version are left behind from now on."""
        self.released = max(self.released, version)
        self._changed.notify()

    def add(self, handle: ExecutorHandle) -> Replica:
        """A new replica, which has no weights yet and gets no requests."""
        replica = Replica(handle)
        self.replicas.append(replica)
        return replica

    def lose(self, replica: Replica) -> list[GenerationRequest]:
        """A replica is gone; what it has not answered completely."""
        replica.is_gone = True
        replica.busy.set()
        if replica.follower is not None:
            replica.follower.cancel()
        self.replicas.remove(replica)
        self._tokens_of_lost += replica.generated_tokens
        self._work_of_lost = self._work_of_lost.plus(replica.work)
        self._changed.notify()
        return replica.unanswered()

    def withdraw(self, replica: Replica) -> list[GenerationRequest]:
        """What a replica has not answered completely is for others to do; it gets no new requests until it knows."""
        requests = replica.withdraw()
        ids = [request.group_id for request in requests]
        self._supervisor.start(self.call(replica, "abort", ids), f"withdraw from {replica.handle.name}")
        return requests

    async def drain(self, replica: Replica) -> None:
        """Takes back what `replica` decodes; the others go on with it.

        Raises CallTimeout.
        """
        replica.is_leaving = True
        clock = asyncio.get_running_loop()
        deadline_s = clock.time() + self.timeout_s
        while replica.num_outstanding and not replica.is_gone:
            if clock.time() > deadline_s:
                owes = f"still owes {replica.num_outstanding} rollouts"
                raise CallTimeout(replica.handle.name, "abort", self.timeout_s, owes)
            await self.call(replica, "abort", list(replica.requests))
            emptied = self._changed.until(lambda: replica.is_gone or not replica.num_outstanding)
            try:
                await asyncio.wait_for(emptied, ABORT_INTERVAL_S)
            except TimeoutError:  # a request was on its way when the last abort came
                continue

    def debts(self) -> list[str]:
        """What each replica still owes, for a stall report."""
        return [
            f"{replica.handle.name} owes {replica.num_outstanding} rollouts"
            + ("" if self.serves(replica) else f" and is left behind at version {replica.version}")
            for replica in self.replicas
        ]

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled by all replicas since their start."""
        return self._tokens_of_lost + sum(replica.generated_tokens for replica in self.replicas)

    @property
    def work(self) -> DecodingWork:
        """What all replicas have done since their start."""
        return reduce(DecodingWork.plus, (replica.work for replica in self.replicas), self._work_of_lost)

    @property
    def num_waiting(self) -> int:
        """Rollouts queued at the replicas, as of their last replies."""
        return sum(replica.num_waiting for replica in self.replicas)

    @property
    def num_running(self) -> int:
        """Rollouts being decoded, as of the last replies."""
        return sum(replica.num_running for replica in self.replicas)
