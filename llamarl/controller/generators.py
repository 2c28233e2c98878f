"""`Generators`: all generator replicas as one. Requests are scattered, rollouts gathered, new weights broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import reduce
from typing import Any

from llamarl.channels.channel import Channel, deal
from llamarl.cluster.api import ExecutorHandle, MeshFailed, chunks
from llamarl.executors.replies import Collected, DecodingWork
from llamarl.types import GenerationRequest, Rollout
from llamarl.weight_sync.layout import SegmentAddress, TensorSpec


class Replica:
    """One generator and what the controller knows of it."""

    def __init__(self, handle: ExecutorHandle) -> None:
        self.handle = handle
        self.requests = dict[int, GenerationRequest]()
        """What it has not answered completely, by group."""
        self._num_missing = dict[int, int]()
        """Rollouts that it owes, by group."""
        self.num_outstanding = 0
        """Rollouts that it owes."""
        self.has_delivered = False
        """It has finished a rollout."""
        self.busy = asyncio.Event()
        """Set while it owes something."""
        self.num_waiting = 0
        self.num_running = 0
        self.generated_tokens = 0
        self.work = DecodingWork()

    def owe(self, requests: Sequence[GenerationRequest]) -> None:
        """It is about to be asked for these."""
        for request in requests:
            self.requests[request.group_id] = request
            self._num_missing[request.group_id] = request.group_size
            self.num_outstanding += request.group_size
        self.busy.set()

    def deliver(self, rollouts: Sequence[Rollout]) -> None:
        """It has answered."""
        self.has_delivered = True
        for rollout in rollouts:
            self._num_missing[rollout.group_id] -= 1
            if not self._num_missing[rollout.group_id]:
                del self._num_missing[rollout.group_id], self.requests[rollout.group_id]
        self.num_outstanding -= len(rollouts)
        if not self.num_outstanding:
            self.busy.clear()


class Generators:
    """Scatter, gather and broadcast over the replicas that are alive."""

    def __init__(
        self,
        handles: Sequence[ExecutorHandle],
        collected: Channel[Rollout],
        timeout_s: float,
        survives_deaths: bool = False,
    ) -> None:
        """With `survives_deaths`, calls to a dead replica have no effect: somebody sees the death and calls `lose`."""
        self.replicas = [Replica(handle) for handle in handles]
        self._collected = collected
        self._timeout_s = timeout_s
        self._survives_deaths = survives_deaths
        self._joined = asyncio.Event()
        """Set while there are replicas."""
        if handles:
            self._joined.set()
        self._tokens_of_lost = 0
        """Sampled by replicas that have died."""
        self._work_of_lost = DecodingWork()

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        """What the replicas want to receive; all of them hold the same model."""
        specs = await asyncio.gather(
            *(replica.handle.call("weight_specs", timeout_s=self._timeout_s) for replica in self.replicas)
        )
        assert all(spec == specs[0] for spec in specs), "replicas differ"
        return specs[0]

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Gives each request to the replica that owes the fewest rollouts; waits while there is none."""
        await self._joined.wait()
        size = requests[0].group_size
        dealt = deal(requests, [replica.num_outstanding for replica in self.replicas], size)
        busy = [(replica, part) for replica, part in zip(self.replicas, dealt, strict=True) if part]
        for replica, part in busy:  # before anything can fail: what is owed is what `lose` gives back
            replica.owe(part)
        await asyncio.gather(*(self._submit_to(replica, part) for replica, part in busy))

    async def _submit_to(self, replica: Replica, requests: list[GenerationRequest]) -> None:
        for chunk in chunks(requests):
            await self._call(replica, "submit", chunk)

    async def _call(self, replica: Replica, method: str, *args: Any) -> Any:
        """None from a replica that is dead, where deaths are survived."""
        try:
            return await replica.handle.call(method, *args, timeout_s=self._timeout_s)
        except MeshFailed:
            if not self._survives_deaths:
                raise
            return None

    async def collect(self, replica: Replica) -> None:
        """Consumes what `replica` finishes while it lives; produces into the channel of collected rollouts.

        Waits for requests to be owed, then for the replica to finish some of them.
        """
        while True:
            await replica.busy.wait()
            reply: Collected | None = await self._call(replica, "collect")
            if reply is None:
                return
            replica.deliver(reply.rollouts)
            replica.num_waiting, replica.num_running = reply.num_waiting, reply.num_running
            replica.generated_tokens, replica.work = reply.generated_tokens, reply.work
            for rollout in reply.rollouts:
                await self._collected.put(rollout)

    async def adopt(self, version: int, address: SegmentAddress) -> float:
        """All replicas take over published weights; the longest stall of any of them, in seconds."""
        stalls = await asyncio.gather(*(self._call(replica, "adopt", version, address) for replica in self.replicas))
        return max((stall_s for stall_s in stalls if stall_s is not None), default=0.0)

    async def join(self, handle: ExecutorHandle, version: int, address: SegmentAddress) -> Replica:
        """A new replica: it takes over published weights, and only then requests."""
        await handle.call("adopt", version, address, timeout_s=self._timeout_s)
        replica = Replica(handle)
        self.replicas.append(replica)
        self._joined.set()
        return replica

    def lose(self, replica: Replica) -> list[GenerationRequest]:
        """A replica has died; the requests that it has not answered completely."""
        self.replicas.remove(replica)
        if not self.replicas:
            self._joined.clear()
        self._tokens_of_lost += replica.generated_tokens
        self._work_of_lost = self._work_of_lost.plus(replica.work)
        return list(replica.requests.values())

    def debts(self) -> list[str]:
        """What each replica still owes, for a stall report."""
        return [f"{replica.handle.name} owes {replica.num_outstanding} rollouts" for replica in self.replicas]

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
