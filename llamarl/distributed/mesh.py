"""`RankMesh`: the ranks of an executor, as a grid of pipeline stages, data shares, context parts and tensor parts.

Tensors go by gloo (CPU) or NCCL (GPU), small messages by way of rank 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from llamarl.distributed.interrupt import deafen, end_collectives, open_sockets
from llamarl.distributed.links import BROKEN, RankLinks, RanksLost, interface_of, local_host, own_address
from llamarl.distributed.rendezvous import Rendezvous
from llamarl.distributed.store import TorchStore
from llamarl.distributed.watch import Watch
from llamarl.observability.spans import stage

CPU = torch.device("cpu")
AXES = ("pp", "fsdp", "cp", "tp")
"""Slowest first: ranks that talk most often are neighbors, which a host's links serve best."""


class OtherFailed(RuntimeError):
    """Another rank could not do what all of them were to do; all are there, and in step."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """Stands in the place of what a rank was to give."""

    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank's place on one axis. With one rank there is no group, and collectives give back what they get."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks, in rank order; each has as many."""
        if self.size == 1:
            return x
        rows = x.new_empty((self.size * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(rows, x.contiguous(), group=self.group)
        return rows

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's equal share of the rows of the sum over all ranks."""
        if self.size == 1:
            return x
        rows = x.new_empty((len(x) // self.size, *x.shape[1:]))
        dist.reduce_scatter_tensor(rows, x.contiguous(), group=self.group)
        return rows

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks, the same bits on each; may overwrite `x`."""
        if self.size > 1:
            self.group.allreduce([x]).wait()  # a call per layer of a decoding step: `dist.all_reduce` takes longer
        return x

    def spread(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """So many rows of a matrix, in rank order, to each rank; those that each sends here, in rank order."""
        if self.size == 1:
            return x
        found = x.new_empty((sum(receives), *x.shape[1:]))
        # As bytes: which types travel differs between backends.
        into, rows = (one.flatten(1).view(torch.uint8) for one in (found, x.contiguous()))
        dist.all_to_all_single(into, rows, list(receives), list(sends), group=self.group)
        return found

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Sends to some ranks of this axis and fills what comes from some, all at once."""
        kinds = ((dist.isend, sends), (dist.irecv, receives))
        ops = [
            dist.P2POp(op, x, group=self.group, group_peer=rank) for op, tensors in kinds for rank, x in tensors.items()
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMesh:
    """This rank's place among the ranks of an executor. The default is a process by itself."""

    pp: Axis = Axis()
    """Consecutive layers."""
    fsdp: Axis = Axis()
    """Shares of the batch."""
    cp: Axis = Axis()
    """Parts of every sequence."""
    tp: Axis = Axis()
    """Heads, feed-forward columns and vocabulary."""
    ep: Axis = Axis()
    """Experts of a mixture: some neighbors of the fsdp and cp axes."""
    world: Axis = Axis()
    shards: DeviceMesh | None = None
    """The fsdp and cp axes as one, over which FSDP2 cuts what is the same on all of these ranks; None: just one."""
    expert_shards: DeviceMesh | None = None
    """Ranks of them that have the same experts, over which FSDP2 cuts these; None: experts are cut as all else."""

    links: RankLinks | None = None
    """Links to the other ranks; None: there are none."""
    watch: Watch | None = None
    """Watch over the other ranks; None: there are none."""
    store: TorchStore | None = None
    """Kept for the groups that were made with it."""

    @contextmanager
    def together(self, *alike: type[Exception]) -> Iterator[None]:
        """Work with collectives or messages. When one rank fails in it, the others end at once, and say why.

        Args:
            alike: errors that all ranks raise, for the same reason.

        Raises:
            RanksLost: another rank has failed, with its error, or is lost; now, or in earlier work.
        """
        try:
            self._require_others()
            yield
            self._require_others()
        except alike:
            raise
        except BaseException as error:
            if self.watch is not None and (cause := self.watch.cause(error)):
                raise cause from error
            raise

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Work with messages and without collectives, which all ranks do alike and which may fail on some of them: then
        it fails on all at once, and they go on.

        Raises:
            OtherFailed: another rank has failed, with its error.
        """
        try:
            yield
        except OtherFailed:
            raise
        except BaseException as error:  # others wait for a message, now or at the end
            with suppress(OtherFailed, RanksLost):
                self.exchange(_Failed(f"rank {self.world.rank} failed: {type(error).__name__}: {error}"))
            raise
        self.exchange(None)

    def _require_others(self) -> None:
        if self.watch is not None and self.watch.fired:
            raise RanksLost("collectives were ended")

    def check(self) -> None:
        """Raises RanksLost when work has ended by a rank that may never answer."""
        if self.watch is not None and self.watch.lost is not None:
            raise self.watch.lost

    def exchange(self, value: Any) -> list[Any]:
        """Gives a small picklable value to all ranks and returns theirs in rank order. Raises OtherFailed: within
        `tried` one of them has none to give."""
        values = [value] if self.links is None else self.links.exchange(value)
        if failed := next((one for one in values if isinstance(one, _Failed)), None):
            raise OtherFailed(failed.text)
        return values

    def gathered(self, parts: Mapping[int, bytes], owners: Sequence[int], num_bytes: int) -> memoryview:
        """Bytes of which each part is on one rank, as `torch.chunk` cuts them, over the ranks' own network.

        Args:
            parts: this rank's, by their place.
            owners: the rank that has each part.
        """
        whole = torch.empty(num_bytes, dtype=torch.uint8)
        sent = list[Any]()
        for place, (owner, part) in enumerate(zip(owners, whole.chunk(len(owners)), strict=True)):
            if owner == self.world.rank:
                if place not in parts:
                    raise TimeoutError(f"part {place} of {len(owners)} of a call has not come in time")
                part.numpy()[:] = np.frombuffer(parts[place], np.uint8)
            sent.append(dist.broadcast(part, owner, self.world.group, async_op=True))
        for one in sent:
            one.wait()
        return whole.numpy().data

    def close(self) -> None:
        """Leaves the others; may be called again."""
        if self.watch is None or self.links is None or self.store is None:
            return
        self.watch.stop()
        if dist.is_initialized():
            with suppress(RuntimeError):  # they may be gone
                dist.destroy_process_group()
        self.links.close()
        self.store.close()


ALONE = RankMesh()


@stage("meets its other ranks")
def join_mesh(
    sizes: Mapping[str, int],
    rendezvous: Rendezvous | None,
    device: torch.device,
    *,
    start_timeout_s: float = 120.0,
    timeout_s: float = 60.0,
) -> RankMesh:
    """Meets the other ranks of this executor, if it has any. FSDP2 needs torch's default process group: one mesh in a
    process.

    Args:
        sizes: of `AXES`, and of `ep`; those that are missing are 1.
        rendezvous: the same for all ranks, and another for each epoch of them; None: there is one rank.
        start_timeout_s: for all ranks to arrive.
        timeout_s: for one collective, message or reply: so far may ranks be apart.

    Raises:
        RanksLost: not all ranks have come.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if math.prod(shape) == 1:
        return ALONE
    assert rendezvous is not None, "ranks have to meet somewhere"
    rank, world = own_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    links = RankLinks(rank, world, timeout_s)
    try:
        store, notes = TorchStore(rendezvous, start_timeout_s), rendezvous.connect(rank)
        others = open_sockets()
        if rank:
            links.connect(store.get("rank 0").decode(), rendezvous.secret)
        else:
            tell = partial(store.set, "rank 0")
            links.listen(local_host(notes), rendezvous.secret, tell, start_timeout_s)
        with _own_interface(device):
            mesh, shards = _open_groups(store, shape, device, rank, world, timeout_s)
            experts = _expert_groups(shape, sizes.get("ep", 1), device, timeout_s)
    except (RuntimeError, *BROKEN) as error:
        links.close()
        cause = f"{type(error).__name__}: {error}"
        raise RanksLost(f"rank {rank} did not meet all {world} ranks in {start_timeout_s:g} s: {cause}") from error
    sockets = open_sockets().keys() - others
    if device.type == "cpu":  # NCCL comes back to its ports
        deafen(sockets)
    places = zip(AXES, mesh.get_coordinate() or (), shape, strict=True)
    return RankMesh(
        **{axis: Axis(place, size, mesh.get_group(axis)) for axis, place, size in places},
        ep=Axis() if experts is None else Axis(experts.get_local_rank("ep"), sizes["ep"], experts.get_group("ep")),
        world=Axis(rank, world, dist.group.WORLD),
        shards=shards,
        expert_shards=None if experts is None else experts["shards"],
        links=links,
        watch=Watch(notes, rank, world, lambda: end_collectives(sockets)),
        store=store,
    )


def own_rank() -> tuple[int, int]:
    """Rank of this process and number of ranks, as a cluster or torchrun has put them into the environment."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def _own_interface(device: torch.device) -> Iterator[None]:
    """Groups made meanwhile listen where the others reach this process, on one host at the loopback, where nobody else
    can connect, unless the user's environment says where."""
    interface, given = interface_of(own_address()), os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface and device.type == "cuda":  # NCCL looks whenever it connects
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _open_groups(
    store: TorchStore, shape: tuple[int, ...], device: torch.device, rank: int, world: int, timeout_s: float
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of `AXES`, and of what FSDP2 cuts over. Raises RuntimeError."""
    timeout = timedelta(seconds=timeout_s)
    backend, bound = "gloo", None
    if device.type == "cuda":
        # NCCL's own watchdog would end the process at the time limit, before `Watch` can say where it was.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # Bound to the device, communicators are made here, by all ranks: the first sends of a pipeline are not by all.
        backend, bound = "cpu:gloo,cuda:nccl", device
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    pp, fsdp, cp, tp = shape
    joined = ("pp", "shards", "tp")
    shards = init_device_mesh(device.type, (pp, fsdp * cp, tp), mesh_dim_names=joined) if cp > 1 else mesh
    for group in (*mesh.get_all_groups(), *shards.get_all_groups()):
        _set_pg_timeout(timeout, group)  # else theirs is half an hour
    return mesh, shards["shards" if cp > 1 else "fsdp"] if fsdp * cp > 1 else None


def _expert_groups(shape: tuple[int, ...], ep: int, device: torch.device, timeout_s: float) -> DeviceMesh | None:
    """The same ranks, of which neighbors among what FSDP2 cuts over share experts; None: all have the same."""
    if ep == 1:
        return None
    pp, fsdp, cp, tp = shape
    mesh = init_device_mesh(device.type, (pp, fsdp * cp // ep, ep, tp), mesh_dim_names=("pp", "shards", "ep", "tp"))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh
