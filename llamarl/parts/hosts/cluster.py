"""Executors on the hosts of a registry."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from llamarl.cluster.api import ExecutorHandle, ExecutorSpec, HostFailed, HostShare, HostStatus, Tell
from llamarl.cluster.monarch import (
    TRUST,
    BootstrapCommand,
    MonarchCluster,
    MonarchHandle,
    ProcMesh,
    Rank,
    attach_to_workers,
    bootstrap_command,
)
from llamarl.config.section import ADDRESS, WEIGHTS_ADDRESS
from llamarl.observability.spans import Span
from llamarl.parts.hosts.registry import Host, Registry

LOST_S = 1.0
"""Maximum seconds to wait for the other ranks of an executor that has lost a host."""


class HostedHandle(MonarchHandle):
    """An executor on other machines. Their agents report its processes and kill them."""

    def __init__(self, spec: ExecutorSpec, meshes: Sequence[tuple[ProcMesh, Rank]], hosts: Sequence[Host]) -> None:
        super().__init__(spec, meshes)
        self.hosts = tuple(host.name for host in hosts)
        self._places = [host for host, share in zip(hosts, spec.hosts, strict=True) for _ in range(share.num_ranks)]
        """Host of each rank."""
        for host in hosts:
            host.when_lost(partial(self._host_lost, host))

    def _host_lost(self, host: Host, reason: str) -> None:
        ranks = tuple(rank for rank, place in enumerate(self._places) if place is host)
        self._fail(HostFailed(self.name, ranks, reason))

    def _where(self, rank: int) -> str:
        return f" on host {self._places[rank].name}"

    def _local_pids(self) -> Iterable[tuple[int, int]]:
        return ()

    def _watch(self) -> None:
        self._watch_work()
        for rank, host in enumerate(self._places):
            host.when_ended(self.pids[rank], partial(self._process_told, rank))

    def _process_told(self, rank: int, cause: str) -> None:
        """Handles the agent's report that a process has ended. Monarch may know a better cause."""
        self._dead(rank, cause or None)

    async def _statuses(self, method: str, timeout_s: float) -> list[HostStatus]:
        """Returns the statuses of all ranks, with spans in this machine's clock."""
        statuses = await super()._statuses(method, timeout_s)
        return [
            replace(status, spans=[Span(name, start_s - host.offset_s, end_s - host.offset_s)
                                   for name, start_s, end_s in status.spans])
            for status, host in zip(statuses, self._places, strict=True)
        ]  # fmt: skip

    async def _stop(self, deadline_s: float, timeout_s: float) -> None:
        if not any(host.lost for host in self._places):
            await super()._stop(deadline_s, timeout_s)
        else:  # some ranks do not answer, and Monarch would wait for them
            self._kill()
            await asyncio.wait((asyncio.ensure_future(self._leave()),), timeout=min(timeout_s / 2, LOST_S))

    def _kill(self) -> None:
        for pid, host in zip(self.pids, self._places, strict=False):  # empty during startup
            host.tell("kill", pids=[pid])


class HostsCluster(MonarchCluster):
    """Executors on the hosts of a registry, over TLS."""

    def __init__(self, registry: Registry, address: str, env: Mapping[str, str]) -> None:
        """
        Args:
            address: address of this machine, as on the controller's certificate.
            env: variables by which Monarch finds the certificate.
        """
        os.environ.update({**env, ADDRESS: address})  # rendezvous address of ranks
        super().__init__(None, f"tls://{address}:0")
        self._registry = registry

    async def spawn(self, spec: ExecutorSpec, timeout_s: float, tell: Tell | None = None) -> ExecutorHandle:
        spec = replace(spec, hosts=tuple(sorted(spec.hosts, key=lambda share: -share.num_ranks)))
        try:
            hosts = [self._registry.hosts[share.name] for share in spec.hosts]
        except KeyError as error:
            raise HostFailed(spec.name, tuple(range(spec.num_ranks)), f"host {error} is not here") from None
        meshes, first = list[tuple[ProcMesh, Rank]](), 0
        for num_ranks, pairs in groupby(zip(hosts, spec.hosts, strict=True), lambda pair: pair[1].num_ranks):
            alike = list(pairs)  # a mesh has the same number of ranks on each host
            machines = attach_to_workers(name=f"at_{spec.name}", ca=TRUST, workers=[host.url for host, _ in alike])
            meshes.append(self._start(spec, machines, num_ranks, partial(_command_at, alike, first)))
            first += num_ranks * len(alike)
        assert first == spec.num_ranks, "hosts have all ranks together"
        return await self._ready(HostedHandle(spec, meshes, hosts), timeout_s, tell)

    async def shutdown(self, timeout_s: float) -> None:
        await super().shutdown(timeout_s)
        await self._registry.close()


def _command_at(
    alike: Sequence[tuple[Host, HostShare]], first: int, spec: ExecutorSpec, place: int
) -> BootstrapCommand:
    """Returns the command that starts a rank of a mesh on other hosts, whose ranks begin with `first`."""
    number, local = divmod(place, alike[0][1].num_ranks)
    host, share = alike[number]
    env = spec.env | share.env | {ADDRESS: host.inventory.address, WEIGHTS_ADDRESS: host.inventory.weights_address}
    return bootstrap_command(spec, first + place, local, env, Path(host.inventory.logs), launches=True)
