"""`RankMesh`: the ranks of a trainer, as a grid of pipeline stages, data shares, context parts and tensor parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from llamarl.distributed.groups import RanksLost, own_rank
from llamarl.distributed.watch import Watch, open_sockets

AXES = ("pp", "fsdp", "cp", "tp")
"""Slowest first: ranks that talk most often are neighbors, which a host's links serve best."""


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
            dist.all_reduce(x, group=self.group)
        return x

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
    """Where this rank is. The default is a process by itself."""

    pp: Axis = Axis()
    """Consecutive layers."""
    fsdp: Axis = Axis()
    """Shares of the batch."""
    cp: Axis = Axis()
    """Parts of every sequence."""
    tp: Axis = Axis()
    """Heads, feed-forward columns and vocabulary."""
    world: Axis = Axis()
    shards: DeviceMesh | None = None
    """The fsdp and cp axes as one, over which FSDP2 cuts what is the same on all of these ranks; None: just one."""

    watch: Watch | None = None
    """Of the other ranks; None: there are none."""

    @contextmanager
    def together(self, *alike: type[Exception]) -> Iterator[None]:
        """Work with collectives. When one rank fails in it, the others end at once, and say why.

        Args:
            alike: errors that all ranks raise, for the same reason.

        Raises:
            RanksLost: another rank has failed, with its error, or is lost.
        """
        try:
            yield
            if self.watch is not None and self.watch.fired:
                raise RanksLost("collectives were ended")
        except alike:
            raise
        except BaseException as error:
            if self.watch is not None and (cause := self.watch.cause(error)):
                raise cause from error
            raise

    def check(self) -> None:
        """Raises RanksLost when work has ended by a rank that may never answer."""
        if self.watch is not None and self.watch.lost is not None:
            raise self.watch.lost

    def exchange(self, value: Any) -> list[Any]:
        """Gives a small picklable value to all ranks and returns theirs in rank order."""
        values = [value] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leaves the others."""
        if self.watch is not None:
            self.watch.stop()
        if self.world.group is not None and dist.is_initialized():
            with suppress(RuntimeError):  # they may be gone
                dist.destroy_process_group()


ALONE = RankMesh()


def join_mesh(
    sizes: Mapping[str, int], meeting: str, device: torch.device, *, start_timeout_s: float, timeout_s: float = 60.0
) -> RankMesh:
    """Meets the other ranks of this executor, if it has any. FSDP2 needs torch's default process group: one mesh in a
    process.

    Args:
        sizes: of `AXES`.
        meeting: a file that does not exist yet, the same for all, in a folder that only this user may enter.
        start_timeout_s: for all ranks to arrive.
        timeout_s: for one collective: so far may ranks be apart.

    Raises:
        RanksLost: not all ranks have come.
    """
    if all(size == 1 for size in sizes.values()):
        return ALONE
    assert not Path(meeting).parent.stat().st_mode & 0o077, f"others may enter the folder of {meeting}"
    rank, world = own_rank()
    shape = tuple(sizes[axis] for axis in AXES)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, and nobody else can connect
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, others = dist.FileStore(meeting, world), open_sockets()
    store.set_timeout(timedelta(seconds=start_timeout_s))
    try:
        dist.init_process_group(
            backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        pp, fsdp, cp, tp = shape
        joined = ("pp", "shards", "tp")
        shards = init_device_mesh(device.type, (pp, fsdp * cp, tp), mesh_dim_names=joined) if cp > 1 else mesh
        for group in (*mesh.get_all_groups(), *shards.get_all_groups()):
            _set_pg_timeout(timedelta(seconds=timeout_s), group)  # else theirs is half an hour
    except RuntimeError as error:
        raise RanksLost(f"rank {rank} did not meet all {world} ranks in {start_timeout_s:g} s: {error}") from error
    places = zip(AXES, mesh.get_coordinate() or (), shape, strict=True)
    return RankMesh(
        **{axis: Axis(place, size, mesh.get_group(axis)) for axis, place, size in places},
        world=Axis(rank, world, dist.group.WORLD),
        watch=Watch(Path(f"{meeting}.notes"), rank, world, open_sockets().keys() - others),
        shards=shards["shards" if cp > 1 else "fsdp"] if fsdp * cp > 1 else None,
    )
