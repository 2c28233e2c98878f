"""`Generators`: all generator replicas as one. Requests are scattered, rollouts gathered, new weights broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llamarl.channels.channel import Channel, deal
from llamarl.cluster.api import ExecutorHandle, chunks
from llamarl.executors.replies import Collected
from llamarl.types import GenerationRequest, Rollout
from llamarl.weight_sync.layout import SegmentAddress, TensorSpec


class Replica:
    """One generator and what the controller knows of it."""

    def __init__(self, handle: ExecutorHandle) -> None:
        self.handle = handle
        self.num_outstanding = 0
        """Rollouts that it owes."""
        self.busy = asyncio.Event()
        """Set while it owes something."""
        self.num_waiting = 0
        self.num_running = 0
        self.generated_tokens = 0

    def owe(self, change: int) -> None:
        self.num_outstanding += change
        (self.busy.set if self.num_outstanding else self.busy.clear)()


class Generators:
    """Scatter, gather and broadcast over the replicas."""

    def __init__(self, handles: Sequence[ExecutorHandle], collected: Channel[Rollout], timeout_s: float) -> None:
        self.replicas = [Replica(handle) for handle in handles]
        self._collected = collected
        self._timeout_s = timeout_s

    async def weight_specs(self) -> tuple[TensorSpec, ...]:
        """What the replicas want to receive; all of them hold the same model."""
        specs = await asyncio.gather(
            *(replica.handle.call("weight_specs", timeout_s=self._timeout_s) for replica in self.replicas)
        )
        assert all(spec == specs[0] for spec in specs), "replicas differ"
        return specs[0]

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Gives each request to the replica that owes the fewest rollouts."""
        size = requests[0].group_size
        dealt = deal(requests, [replica.num_outstanding for replica in self.replicas], size)
        await asyncio.gather(
            *(self._submit_to(replica, part) for replica, part in zip(self.replicas, dealt, strict=True) if part)
        )

    async def _submit_to(self, replica: Replica, requests: list[GenerationRequest]) -> None:
        replica.owe(sum(request.group_size for request in requests))
        for chunk in chunks(requests):
            await replica.handle.call("submit", chunk, timeout_s=self._timeout_s)

    async def collect(self, replica: Replica) -> None:
        """Consumes what `replica` finishes, for ever; produces into the channel of collected rollouts.

        Waits for requests to be owed, then for the replica to finish some of them.
        """
        while True:
            await replica.busy.wait()
            reply: Collected = await replica.handle.call("collect", timeout_s=self._timeout_s)
            replica.owe(-len(reply.rollouts))
            replica.num_waiting, replica.num_running = reply.num_waiting, reply.num_running
            replica.generated_tokens = reply.generated_tokens
            for rollout in reply.rollouts:
                await self._collected.put(rollout)

    async def adopt(self, version: int, address: SegmentAddress) -> float:
        """All replicas take over published weights; the longest stall of any of them, in seconds."""
        stalls = await asyncio.gather(
            *(
                replica.handle.call("adopt", version, address, timeout_s=self._timeout_s)
                for replica in self.replicas
            )
        )
        return max(stalls)

    def debts(self) -> list[str]:
        """What each replica still owes, for a stall report."""
        return [f"{replica.handle.name} owes {replica.num_outstanding} rollouts" for replica in self.replicas]

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled by all replicas since their start."""
        return sum(replica.generated_tokens for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Rollouts queued at the replicas, as of their last replies."""
        return sum(replica.num_waiting for replica in self.replicas)

    @property
    def num_running(self) -> int:
        """Rollouts being decoded, as of the last replies."""
        return sum(replica.num_running for replica in self.replicas)
