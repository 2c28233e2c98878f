"""Base of every transport: a publisher on each trainer rank, a subscriber on each generator rank, and their proof.

Several trainer ranks write parts of one generator rank's tensors. With its bytes each writer publishes, per tensor, the
sum of their fingerprints and their number; a version exists for a reader once all writers have published it, and it is
served only after every tensor has been found to be what the writers together say.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.kernels.copy import MODULUS, Share, copy_part, fingerprint, read
from llamarl.kernels.half import rounded
from llamarl.models.quantize import QUANTIZED_DTYPES, NonFiniteWeights, quantize_rows
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import LayoutError, assemble_layout
from llamarl.sharding.reshard import ReshardPlan, plan_reshard
from llamarl.sharding.tensor_parallel import is_router
from llamarl.weight_sync.layout import Address, Layout, TensorSpec, lay_out

CPU = torch.device("cpu")
Exchange = Callable[[Any], list[Any]]
"""Gives a value to all trainer ranks and returns theirs in rank order, as `all_gather_object` does."""


class Superseded(RuntimeError):
    """The wanted version is not, or no longer, to be had; a newer one is or will be."""


class FingerprintMismatch(RuntimeError):
    """A tensor arrived that is not what was published."""

    def __init__(self, tensor: str, version: int, rank: int, cause: str) -> None:
        super().__init__(tensor, version, rank, cause)
        self.tensor, self.version, self.rank, self.cause = tensor, version, rank, cause

    def __str__(self) -> str:
        return f"{self.tensor} of version {self.version} on generator rank {self.rank}: {self.cause}"


class TransferFailed(RuntimeError):
    """A version could not be fetched: the other side died, hangs or cannot be reached. The next fetch starts anew."""


class NoFreeSlot(RuntimeError):
    """Generators hold on to more versions than there are slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenBox:
    """A rectangle of a generator rank's tensor that one trainer rank writes."""

    tensor: int
    """Position among the generator rank's specs."""
    box: Box
    """Part of the parameter, in the coordinates of the whole one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterPlan:
    """Plan of what one trainer rank writes."""

    rank: int
    num_writers: int
    held: Mapping[str, Box]
    """Part of each parameter that this rank's tensors hold."""
    layouts: tuple[Layout, ...]
    """Layouts of the generator ranks of a replica, each different one once."""
    parts: tuple[tuple[WrittenBox, ...], ...]
    """Parts that this rank writes, for each layout."""
    rounds: bool = False
    """Whether training rounds float32 matrices to bfloat16: then these values are what generators quantize or get in
    float32, as the masters are another policy."""

    def write(
        self,
        layout: int,
        version: int,
        weights: Mapping[str, Tensor],
        targets: Iterable[tuple[WrittenBox, Tensor]],
        proof: np.ndarray,
    ) -> None:
        """Copies parts of one layout to their targets, cast or quantized.

        Adds to `proof` [2, tensors], which begins with zeros, the fingerprint and then the number of bytes of each
        part: where the numbers of all writers add up to a tensor, it is all there.

        Raises:
            NonFiniteWeights: names the parameter and the version.
        """
        specs, written = self.layouts[layout].specs, list[tuple[WrittenBox, Tensor, Share]]()
        found = {(specs[part.tensor].key, part.box): (part, target) for part, target in targets}
        for (_, box), (part, target) in found.items():
            spec = specs[part.tensor]
            if spec.part == "scales":  # written with its values
                continue
            weight, held = weights[spec.name], self.held[spec.name]
            assert weight.shape == held.shape, f"{spec.name}: {tuple(weight.shape)} is not the planned {held.shape}"
            source = weight.detach()[box.within(held)]
            if self.rounds and source.dtype == torch.float32 and spec.dtype != "bfloat16" and _is_rounded(spec):
                source = rounded(source)
            if spec.dtype not in QUANTIZED_DTYPES:
                written.append((part, target, copy_part(target, source, spec.shape, spec.starts_of(box))))
                continue
            halves = (part, target), found[f"{spec.name}.scale", box]
            try:
                quantize_rows(source, spec.dtype, out=(target, halves[1][1]))
            except NonFiniteWeights as error:
                row, name = _row_of(spec, box, error.row)
                raise NonFiniteWeights(row, error.dtype, f"{name} (version {version})") from None
            for half, made in halves:
                written += [(half, *one) for one in _matrices(specs[half.tensor], box, made)]
        for (part, target, _), share in zip(written, read([share for *_, share in written]), strict=True):
            proof[0, part.tensor] = (int(proof[0, part.tensor]) + share) % MODULUS
            proof[1, part.tensor] += target.nbytes


def _is_rounded(spec: TensorSpec) -> bool:
    """Norms, biases and routers are computed in float32."""
    return len(spec.global_shape) > 1 and not is_router(spec.name)


class Publisher(ABC):
    """A trainer rank's end.

    Where one takes `delta`, it sends what changed since a version that the reader has, if that is less. The bytes that
    are served stay the same.
    """

    RANK: ClassVar[int] = 1
    """Among transports that are about as fast, the smaller one is taken."""
    NEEDS_SAME_HOST: ClassVar[bool] = False
    TRIED_ACROSS_HOSTS: ClassVar[bool] = True
    """Whether `auto` tries it for generators on other hosts than the trainer's."""
    WITHIN_PROCESS: ClassVar[bool] = False
    """Whether `auto` tries it where trainer and generator are one process."""
    TAKES_DELTA: ClassVar[bool] = False
    IN_PLACE: ClassVar[bool] = False
    """Whether generators serve from the trainer's own weights; `auto` tries it where they sleep while it works."""
    ON_DEVICE: ClassVar[bool] = False
    """Whether what is published stays on the trainer's device, and arrives on the generator's; `auto` tries such a
    transport for GPUs."""

    def __init__(
        self,
        plan: WriterPlan,
        exchange: Exchange,
        folder: Path | None = None,
        delta: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """
        Args:
            folder: the same on all ranks, for what writes files; nothing else may lie in it.
            device: of the weights.
        """
        if delta and not self.TAKES_DELTA:
            raise ConfigError(
                f"`weight_sync.delta = true` saves nothing with {type(self).__name__}, which sends no weights; use "
                "delta = false, or transport = 'p2p' or 'file'"
            )
        self._plan, self._exchange, self._folder = plan, exchange, folder
        self._delta, self._device = delta, device

    @abstractmethod
    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        """Copies `weights` to where generators find them as `version`; it does not read them after it returns.

        Versions `in_use` stay as they are: those that a living generator serves or fetches. All ranks publish the
        same version with the same `in_use`, and any rank's address will do for all generators.

        Raises:
            NoFreeSlot: too many versions are in use.
            NonFiniteWeights: names a parameter that cannot be quantized, and the version, which nobody can fetch. The
                ranks then disagree about what lies where: before another version all of them open publishers anew.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends threads and frees memory; what readers have mapped stays with them."""


class Subscriber(ABC):
    """A generator rank's end, for one publisher."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, delta: bool = False) -> None:
        self.layout = lay_out(specs)
        self.rank = rank
        self._delta = delta
        self.fingerprint = ""
        """Fingerprint of the version last fetched, over all tensors of this rank, in hexadecimal digits."""
        self.tensors = ""
        """Fingerprints of the tensors last fetched: the last eight digits of each, in the order of `layout.specs`."""
        self.received_bytes = sum(spec.num_bytes for spec in self.layout.specs)
        """Bytes that the last fetch brought, what was sent twice included; initially the size of all tensors."""

    @abstractmethod
    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        """The tensors of a version by `TensorSpec.key`; they stay as they are while that version is in use.

        Runs in a background thread while the engine decodes.

        Raises:
            Superseded: another version took its place.
            FingerprintMismatch: a tensor is not what was published.
            TransferFailed: the publisher is gone or silent.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves tensors that were fetched alone."""

    def place_in(self, address: Address) -> str:
        """Place of this rank's tensors. Raises LayoutError: the trainer publishes none like them."""
        if self.layout.digest not in address.places:
            cause = "its tensors are none of those that the trainer publishes"
            raise LayoutError(f"generator rank {self.rank}", cause)
        return address.places[self.layout.digest]

    def prove(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        proofs: np.ndarray,
        await_tensor: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Compares what was fetched with what the writers published (their `proofs`: [writers, 2, tensors])."""
        digest, given = xxhash.xxh3_64(), [tensors[spec.key] for spec in self.layout.specs]
        on_gpu = any(tensor.device.type == "cuda" for tensor in given)
        at_once, proved = read([fingerprint(tensor) for tensor in given]) if on_gpu else None, list[int]()
        for index, tensor in enumerate(given):
            await_tensor(index)
            proved.append(self.prove_tensor(index, tensor, version, proofs, at_once[index] if at_once else None))
            digest.update(proved[-1].to_bytes(8, "little"))
        self.fingerprint, self.tensors = digest.hexdigest(), "".join(f"{one & 0xFFFFFFFF:08x}" for one in proved)

    def prove_tensor(
        self, index: int, tensor: Tensor, version: int, proofs: np.ndarray, found: int | None = None
    ) -> int:
        """The fingerprint of one tensor (None: it is not known yet), which is what the writers published."""
        spec = self.layout.specs[index]
        written, expected = proofs[:, 1, index].sum(), sum(proofs[:, 0, index].tolist()) % MODULUS
        if written != spec.num_bytes:
            cause = f"trainer ranks wrote {written} of its {spec.num_bytes} bytes"
            raise FingerprintMismatch(spec.key, version, self.rank, cause)
        found = read([fingerprint(tensor)])[0] if found is None else found
        if found != expected:
            cause = f"its fingerprint is {found:016x}, published was {expected:016x}"
            raise FingerprintMismatch(spec.key, version, self.rank, cause)
        return found


class SlotTable:
    """Which version lies in which slot. All writers decide alike, as they see the same calls."""

    def __init__(self, num_slots: int) -> None:
        self._versions: list[int | None] = [None] * num_slots
        self._newest: int | None = None

    def claim(self, version: int, in_use: Collection[int]) -> int:
        """A slot to write `version` into: the first whose own is neither in use nor the newest."""
        kept = {*in_use, self._newest}
        free = [slot for slot, held in enumerate(self._versions) if held is None or held not in kept]
        if not free:
            raise NoFreeSlot(f"no slot for version {version}: versions {self._versions} are in use")
        self._versions[free[0]] = None
        return free[0]

    def settle(self, slot: int, version: int) -> None:
        """All of `version` has been written."""
        self._versions[slot] = self._newest = version


def _matrices(spec: TensorSpec, box: Box, made: Tensor) -> Iterator[tuple[Tensor, Share]]:
    """Each matrix of a quantized part, or its scales, with its share of the tensor's fingerprint: rows are whole, so
    they lie in one piece there."""
    starts, strides = spec.starts_of(box), [math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    if len(box.shape) == 2:
        yield made, fingerprint(made, first)
        return
    for number, matrix in enumerate(made):
        yield matrix, fingerprint(matrix, first + number * strides[0])


def _row_of(spec: TensorSpec, box: Box, row: int) -> tuple[int, str]:
    """Number and matrix, for a message, of a row counted through a part."""
    if len(box.shape) == 2:
        return box.starts[0] + row, spec.name
    matrix, row = divmod(row, box.shape[1])
    return box.starts[1] + row, f"{spec.name}[{box.starts[0] + matrix}]"


def part_of(layout: Layout, tensors: Mapping[str, Tensor], part: WrittenBox) -> Tensor:
    """The view of a generator rank's tensors that a part fills."""
    spec = layout.specs[part.tensor]
    return tensors[spec.key][spec.index_of(part.box)]


def views(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """The tensors of a layout over a flat buffer of bytes."""
    return {
        spec.key: flat[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, offset in zip(layout.specs, layout.offsets_bytes, strict=True)
    }


def plan_writers(
    layouts: Sequence[Layout], held: Sequence[Sequence[TensorSpec]], ranks: Iterable[int] | None = None
) -> tuple[WriterPlan, ...]:
    """Who writes what into the layouts of a replica's ranks: every byte once, by a trainer rank that holds it.

    Args:
        held: what each trainer rank holds of each parameter.
        ranks: trainer ranks whose plans are wanted; None: all.

    Raises:
        LayoutError: a parameter is missing on one side, has another shape, or no rank holds a part of it; or it is to
            be quantized and a row of it, which needs one scale, does not come whole from one trainer rank.
    """
    source, destination = (
        assemble_layout(
            [
                {spec.name: (spec.global_shape, spec.dtype, spec.box) for spec in specs if spec.part == "values"}
                for specs in ranks
            ],
            first_device=first_device,
            host_size=1,
        )
        # On hosts of their own: then the least loaded of several holders writes, not the nearest.
        for ranks, first_device in ((held, 0), ([layout.specs for layout in layouts], len(held)))
    )
    plan = plan_reshard(source, destination)
    _require_whole_rows(plan)
    tensors = [defaultdict[str, list[int]](list) for _ in layouts]
    for found, layout in zip(tensors, layouts, strict=True):
        for index, spec in enumerate(layout.specs):
            found[spec.name].append(index)
    plans = list[WriterPlan]()
    for rank in range(len(held)) if ranks is None else ranks:
        parts = [list[WrittenBox]() for _ in layouts]
        for move in plan.moves_from(rank):
            indexes = tensors[move.receiver][move.name]
            parts[move.receiver] += [WrittenBox(tensor=index, box=move.box) for index in indexes]
        plans.append(
            WriterPlan(
                rank=rank,
                num_writers=len(held),
                held={spec.name: spec.box for spec in held[rank]},
                layouts=tuple(layouts),
                parts=tuple(tuple(sorted(one, key=lambda part: part.tensor)) for one in parts),
            )
        )
    return tuple(plans)


def _require_whole_rows(plan: ReshardPlan) -> None:
    for group in plan.groups:
        wanted = plan.destination.parameters[group.names[0]].dtype
        if group.dtype != wanted:
            cause = f"trainer ranks hold parts of its rows, and the {wanted} values of a row need one scale"
            way_out = "a generator.tensor_parallel that is a multiple of the trainer's"
            raise LayoutError(group.names[0], f"{cause}; use generator.dtype = 'bfloat16', or {way_out}")


def cuda(function: str, *arguments: int) -> None:
    """Calls a function of CUDA's runtime. Raises RuntimeError."""
    runtime: Any = torch.cuda.cudart()
    if code := int(getattr(runtime, function)(*arguments)):
        raise RuntimeError(f"{function} failed with CUDA error {code}")
