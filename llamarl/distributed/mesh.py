"""`RankMesh`: the ranks of an executor, as a grid of pipeline stages, data shards, context parts and tensor parts.

Tensors go by gloo (CPU) or NCCL (GPU), small messages by connections to rank 0. `set_up_device` makes torch's
process-wide settings. `gather_rows`, `scatter_rows`, `summed` and `exchange_rows` are collectives with gradients: the
gradient of a gather is a reduce-scatter, and vice versa. With one rank on the axis, collectives return their input.
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

from llamarl.config import ConfigError
from llamarl.config.section import PLACED, named_devices
from llamarl.distributed.links import BROKEN, RankLinks, RanksLost, Rendezvous, interface_of, local_host, own_address
from llamarl.distributed.store import TorchStore
from llamarl.distributed.watch import Watch, drop_incoming, end_collectives, open_sockets
from llamarl.observability.spans import stage

CPU = torch.device("cpu")
AXES = ("pp", "fsdp", "cp", "tp")
"""Axes, slowest first: ranks that communicate most often are neighbors, which share the fast links of a host."""


def set_up_device(name: str, threads: int, option: str) -> torch.device:
    """Returns the device to compute on, and sets this process's number of CPU threads.

    Raises:
        ConfigError: `name` is no usable device; names `option`.
    """
    torch.set_num_threads(threads)
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"`{option} = {name!r}`, but torch sees no GPU; use `cpu` or install a CUDA build of torch")
    named = () if PLACED in os.environ else named_devices(name)
    device = torch.device("cuda", named[0] if named else int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)  # otherwise NCCL and synchronizations make a context on the first device
    return device


class OtherFailed(RuntimeError):
    """Another rank has failed in work that all ranks do alike. All ranks are alive and in step."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """Takes the place of the value that a failed rank could not send."""

    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank's place on one axis. With one rank there is no group, and collectives return their input."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def gather(self, x: Tensor) -> Tensor:
        """Returns the rows of all ranks in rank order. All ranks have equally many."""
        if self.size == 1:
            return x
        rows = x.new_empty((self.size * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(rows, x.contiguous(), group=self.group)
        return rows

    def scatter(self, x: Tensor) -> Tensor:
        """Returns this rank's equal share of the rows of the sum over all ranks."""
        if self.size == 1:
            return x
        rows = x.new_empty((len(x) // self.size, *x.shape[1:]))
        dist.reduce_scatter_tensor(rows, x.contiguous(), group=self.group)
        return rows

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks, with the same bits on each. May overwrite `x`."""
        if self.size > 1:
            self.group.allreduce([x]).wait()  # per layer of a decoding step: `dist.all_reduce` takes longer
        return x

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Sends rows of a matrix to each rank and returns the received rows. Rows and counts are in rank order."""
        if self.size == 1:
            return x
        found = x.new_empty((sum(receives), *x.shape[1:]))
        # As bytes, because backends support different types.
        into, rows = (one.flatten(1).view(torch.uint8) for one in (found, x.contiguous()))
        dist.all_to_all_single(into, rows, list(receives), list(sends), group=self.group)
        return found

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Sends tensors to some ranks of this axis and receives others in place, all at once."""
        kinds = ((dist.isend, sends), (dist.irecv, receives))
        ops = [
            dist.P2POp(op, x, group=self.group, group_peer=rank) for op, tensors in kinds for rank, x in tensors.items()
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMesh:
    """This rank's place among the ranks of an executor. The default is a single process."""

    pp: Axis = Axis()
    """Pipeline stages: consecutive layers."""
    fsdp: Axis = Axis()
    """Shards of the batch."""
    cp: Axis = Axis()
    """Parts of every sequence."""
    tp: Axis = Axis()
    """Heads, feed-forward columns and vocabulary."""
    ep: Axis = Axis()
    """Experts of a mixture: neighboring ranks of the fsdp and cp axes."""
    world: Axis = Axis()
    shards: DeviceMesh | None = None
    """The fsdp and cp axes as one, over which FSDP2 shards parameters that all of these ranks share. None means one
    rank."""
    expert_shards: DeviceMesh | None = None
    """Ranks with the same experts, over which FSDP2 shards these. None means that experts are sharded like other
    weights."""

    links: RankLinks | None = None
    """Links to the other ranks. None means that there are no others."""
    watch: Watch | None = None
    """Watch over the other ranks. None means that there are no others."""
    store: TorchStore | None = None
    """Kept alive for the groups that were made with it."""

    @contextmanager
    def together(self, *alike: type[Exception]) -> Iterator[None]:
        """Context of work with collectives or messages. If one rank fails in it, the work of all ranks ends at once,
        with the cause.

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
        """Context of work with messages and without collectives, which all ranks do alike and which may fail on some
        ranks. If one fails, all raise an error and stay in step.

        Raises:
            OtherFailed: another rank has failed, with its error.
        """
        try:
            yield
        except OtherFailed:
            raise
        except BaseException as error:  # other ranks wait for a message, now or at the end
            with suppress(OtherFailed, RanksLost):
                self.exchange(_Failed(f"rank {self.world.rank} failed: {type(error).__name__}: {error}"))
            raise
        self.exchange(None)

    def _require_others(self) -> None:
        if self.watch is not None and self.watch.fired:
            raise RanksLost("collectives were ended")

    def check(self) -> None:
        """Raises RanksLost if work was ended by a rank that may never answer."""
        if self.watch is not None and self.watch.lost is not None:
            raise self.watch.lost

    def exchange(self, value: Any) -> list[Any]:
        """Sends a small picklable value to all ranks and returns theirs in rank order. Raises OtherFailed if a rank
        failed before it could send one, within `tried`."""
        values = [value] if self.links is None else self.links.exchange(value)
        if failed := next((one for one in values if isinstance(one, _Failed)), None):
            raise OtherFailed(failed.text)
        return values

    def gathered(self, parts: Mapping[int, bytes], owners: Sequence[int], num_bytes: int) -> memoryview:
        """Collects bytes from all ranks over the ranks' own network. `torch.chunk` cuts the bytes into parts, each on
        one rank.

        Args:
            parts: this rank's parts, by their place.
            owners: the rank that has each part.
        """
        whole = torch.empty(num_bytes, dtype=torch.uint8)
        sent = list[Any]()
        for place, (owner, part) in enumerate(zip(owners, whole.chunk(len(owners)), strict=True)):
            if owner == self.world.rank:
                if place not in parts:
                    raise TimeoutError(f"part {place} of {len(owners)} of a call did not arrive in time")
                part.numpy()[:] = np.frombuffer(parts[place], np.uint8)
            sent.append(dist.broadcast(part, owner, self.world.group, async_op=True))
        for one in sent:
            one.wait()
        return whole.numpy().data

    def close(self) -> None:
        """Disconnects from the other ranks. May be called again."""
        if self.watch is None or self.links is None or self.store is None:
            return
        if self.watch.stop() and dist.is_initialized():
            with suppress(RuntimeError):  # the other ranks may be gone
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
    """Connects the ranks of this executor. FSDP2 needs torch's default process group, so a process has one mesh.

    Args:
        sizes: sizes of `AXES` and of `ep`; missing ones are 1.
        rendezvous: the same for all ranks, and a new one for each restart. None means that there is one rank.
        start_timeout_s: limit for all ranks to connect.
        timeout_s: limit for one collective, message or reply, and so the largest delay between ranks.

    Raises:
        RanksLost: not all ranks have connected.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if math.prod(shape) == 1:
        return ALONE
    assert rendezvous is not None, "several ranks need a rendezvous"
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
    if device.type == "cpu":  # NCCL returns to its ports
        drop_incoming(sockets)
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
    """Returns the rank of this process and the number of ranks, from the environment variables of a cluster or
    torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def _own_interface(device: torch.device) -> Iterator[None]:
    """Context in which new groups listen where the others reach this process, unless the user's environment says
    otherwise. On one host this is the loopback, where other hosts cannot connect."""
    interface, given = interface_of(own_address()), os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface and device.type == "cuda":  # NCCL reads it at each connection
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _open_groups(
    store: TorchStore, shape: tuple[int, ...], device: torch.device, rank: int, world: int, timeout_s: float
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Returns the mesh of `AXES`, and the mesh over which FSDP2 shards experts. Raises RuntimeError."""
    timeout = timedelta(seconds=timeout_s)
    backend, bound = "gloo", None
    if device.type == "cuda":
        # NCCL's own watchdog would end the process at the time limit, before `Watch` can say where it was.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        # Groups over the same ranks work at the same time, on streams of FSDP and the trainer. NCCL then starts them in
        # the host's order, which is that of all ranks; it would slow down decoding, which has one group.
        if math.prod(shape[:-1]) > 1:
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        # With a bound device, all ranks make communicators here. The first sends of a pipeline do not involve all
        # ranks.
        backend, bound = "cpu:gloo,cuda:nccl", device
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    pp, fsdp, cp, tp = shape
    joined = ("pp", "shards", "tp")
    shards = init_device_mesh(device.type, (pp, fsdp * cp, tp), mesh_dim_names=joined) if cp > 1 else mesh
    for group in (*mesh.get_all_groups(), *shards.get_all_groups()):
        _set_pg_timeout(timeout, group)  # otherwise the limit is half an hour
    return mesh, shards["shards" if cp > 1 else "fsdp"] if fsdp * cp > 1 else None


def _expert_groups(shape: tuple[int, ...], ep: int, device: torch.device, timeout_s: float) -> DeviceMesh | None:
    """Returns a mesh of the same ranks in which neighbors share experts. None means that all ranks have the same
    experts."""
    if ep == 1:
        return None
    pp, fsdp, cp, tp = shape
    mesh = init_device_mesh(device.type, (pp, fsdp * cp // ep, ep, tp), mesh_dim_names=("pp", "shards", "ep", "tp"))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """Returns the rows of all ranks in rank order. The gradient is this rank's share of the sum over all ranks'
    gradients."""
    return _Gather.apply(x, axis) if axis.size > 1 else x


def scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's share of the rows of the sum over all ranks."""
    return _Scatter.apply(x, axis) if axis.size > 1 else x


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Returns the sum over all ranks, for a value that each rank then uses alike. The gradient stays as it is."""
    return _Sum.apply(x, axis) if axis.size > 1 else x


def exchange_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
    """Sends rows to each rank and returns the received rows, in rank order. Gradients go the other way.

    Args:
        sends: number of rows for each rank.
        receives: number of rows from each rank.
    """
    return _AllToAll.apply(x, sends, receives, axis) if axis.size > 1 else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return ctx.axis.scatter(grads[0]), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return ctx.axis.gather(grads[0]), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
        ctx.axis, ctx.sends, ctx.receives = axis, sends, receives
        return axis.all_to_all(x, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        return ctx.axis.all_to_all(grads[0], ctx.receives, ctx.sends), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return grads[0], None
