"""Base of every transport: a publisher on each trainer rank, a subscriber on each generator rank, and the verification.

Several trainer ranks write parts of one generator rank's tensors. Each writer publishes two numbers per tensor with its
bytes: the sum of the fingerprints of its parts, and their size. A reader sees a version once all writers have published
it. The reader serves a version only after each tensor matches the sums over all writers.

`CopyingSubscriber` is the base of transports that copy bytes to the reader, whole or as changes to its last version.
`PackedPublisher` is the base of transports over connections: it packs what a generator rank needs into buckets.
"""

from __future__ import annotations

import math
import mmap
import secrets
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.distributed.links import RendezvousStore, weights_address
from llamarl.kernels.copy import MODULUS, Share, copy_part, fingerprint, read
from llamarl.kernels.half import rounded
from llamarl.models.quantize import QUANTIZED_DTYPES, NonFiniteWeights, quantize_rows
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import DTYPE_BYTES, LayoutError, assemble_layout
from llamarl.sharding.reshard import ReshardPlan, plan_reshard
from llamarl.sharding.tensor_parallel import is_router
from llamarl.weight_sync.delta import decode, encode, message_bytes
from llamarl.weight_sync.layout import ALIGNMENT_BYTES, Address, Layout, TensorSpec, lay_out

CPU = torch.device("cpu")
Exchange = Callable[[Any], list[Any]]
"""Sends a value to all trainer ranks and returns theirs in rank order, as `all_gather_object` does."""
BUCKET_BYTES = 4 << 20
"""Default size of a bucket: small enough to fill a chain of relays soon, large enough to hide the cost per bucket."""
MAX_SLOTS = 16
"""Slots of a `PackedPublisher`. Two are used while generators keep up."""
POLL_S = 0.2
"""Interval in seconds at which idle threads check whether the publisher was closed."""


class Superseded(RuntimeError):
    """The requested version is not available. A newer one is, or will be."""


class FingerprintMismatch(RuntimeError):
    """A received tensor differs from the published one."""

    def __init__(self, tensor: str, version: int, rank: int, cause: str) -> None:
        super().__init__(tensor, version, rank, cause)
        self.tensor, self.version, self.rank, self.cause = tensor, version, rank, cause

    def __str__(self) -> str:
        return f"{self.tensor} of version {self.version} on generator rank {self.rank}: {self.cause}"


class TransferFailed(RuntimeError):
    """A version could not be fetched: the other side died, hangs or cannot be reached. The next fetch reconnects."""


class NoFreeSlot(RuntimeError):
    """Generators use more versions than there are slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenBox:
    """A rectangle of a generator rank's tensor, written by one trainer rank."""

    tensor: int
    """Position among the generator rank's specs."""
    box: Box
    """Part of the parameter, in coordinates of the whole parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterPlan:
    """Parts written by one trainer rank."""

    rank: int
    num_writers: int
    held: Mapping[str, Box]
    """Part of each parameter in this rank's tensors."""
    layouts: tuple[Layout, ...]
    """Distinct layouts of the generator ranks of a replica."""
    parts: tuple[tuple[WrittenBox, ...], ...]
    """Parts that this rank writes, for each layout."""
    rounds: bool = False
    """Whether training rounds float32 matrices to bfloat16. Generators then quantize the rounded values, or receive
    them in float32, because the float32 masters are another policy."""

    def write(
        self,
        layout: int,
        version: int,
        weights: Mapping[str, Tensor],
        targets: Iterable[tuple[WrittenBox, Tensor]],
        proof: np.ndarray,
    ) -> None:
        """Copies parts of one layout to their targets, cast or quantized.

        Adds the fingerprint and the number of bytes of each part to `proof` [2, tensors], which begins with zeros. A
        tensor is complete when the sizes of all writers add up to its size.

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
    """Returns whether training rounds the parameter. Norms, biases and routers are computed in float32."""
    return len(spec.global_shape) > 1 and not is_router(spec.name)


class Publisher(ABC):
    """A trainer rank's end of a transport.

    With `delta`, a transport that supports it sends the changes since a version that the reader has, if they are
    smaller. The served bytes are the same.
    """

    RANK: ClassVar[int] = 1
    """Among about equally fast transports, `auto` chooses the lowest rank."""
    NEEDS_SAME_HOST: ClassVar[bool] = False
    TRIED_ACROSS_HOSTS: ClassVar[bool] = True
    """Whether `auto` tries it for generators on other hosts than the trainer's."""
    WITHIN_PROCESS: ClassVar[bool] = False
    """Whether `auto` tries it if trainer and generator are one process."""
    TAKES_DELTA: ClassVar[bool] = False
    IN_PLACE: ClassVar[bool] = False
    """Whether generators serve from the trainer's own weights. `auto` tries it if generators sleep while the trainer
    works."""
    ON_DEVICE: ClassVar[bool] = False
    """Whether published weights stay on the trainer's device and arrive on the generator's. `auto` tries such a
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
            folder: an empty folder for transports that write files, the same on all ranks.
            device: device of the weights.
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
        """Copies `weights` to where generators find them as `version`. It does not read them after it returns.

        Keeps the versions `in_use`, which live generators serve or fetch. All ranks publish the same version with the
        same `in_use`. The address of any rank is valid for all generators.

        Raises:
            NoFreeSlot: too many versions are in use.
            NonFiniteWeights: a parameter cannot be quantized; names it and the version, which cannot be fetched. The
                ranks' slots then differ, so all ranks must open new publishers before the next version.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends threads and frees memory. Memory that readers have mapped stays valid."""


class Subscriber(ABC):
    """A generator rank's end of a transport, for one publisher."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, delta: bool = False) -> None:
        self.layout = lay_out(specs)
        self.rank = rank
        self._delta = delta
        self.fingerprint = ""
        """Fingerprint of the last fetched version, over all tensors of this rank, in hexadecimal digits."""
        self.tensors = ""
        """The last eight digits of each tensor's fingerprint in the last fetched version, in the order of
        `layout.specs`."""
        self.received_bytes = sum(spec.num_bytes for spec in self.layout.specs)
        """Bytes received by the last fetch, including retransmissions; initially the size of all tensors."""

    @abstractmethod
    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        """Returns the tensors of a version by `TensorSpec.key`. They do not change while the version is in use.

        Runs in a background thread while the engine decodes.

        Raises:
            Superseded: a newer version has replaced it.
            FingerprintMismatch: a tensor differs from the published one.
            TransferFailed: the publisher is gone or does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes connections. Fetched tensors stay valid."""

    def place_in(self, address: Address) -> str:
        """Returns the place of this rank's tensors. Raises LayoutError if the trainer publishes no such layout."""
        if self.layout.digest not in address.places:
            cause = "the trainer publishes no such tensors"
            raise LayoutError(f"generator rank {self.rank}", cause)
        return address.places[self.layout.digest]

    def prove(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        proofs: np.ndarray,
        await_tensor: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Compares fetched tensors with the proofs of the writers, [writers, 2, tensors]. Raises
        FingerprintMismatch."""
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
        """Compares one tensor with the proofs of the writers. Returns its fingerprint. Raises FingerprintMismatch.

        Args:
            found: fingerprint of the tensor. None means that it is computed here.
        """
        spec = self.layout.specs[index]
        written, expected = proofs[:, 1, index].sum(), sum(proofs[:, 0, index].tolist()) % MODULUS
        if written != spec.num_bytes:
            cause = f"trainer ranks wrote {written} of its {spec.num_bytes} bytes"
            raise FingerprintMismatch(spec.key, version, self.rank, cause)
        found = read([fingerprint(tensor)])[0] if found is None else found
        if found != expected:
            cause = f"its fingerprint is {found:016x}, but {expected:016x} was published"
            raise FingerprintMismatch(spec.key, version, self.rank, cause)
        return found


class SlotTable:
    """Versions by slot. All writers choose the same slot, because they see the same calls."""

    def __init__(self, num_slots: int) -> None:
        self._versions: list[int | None] = [None] * num_slots
        self._newest: int | None = None

    def claim(self, version: int, in_use: Collection[int]) -> int:
        """Returns the first slot whose version is neither in use nor the newest. Raises NoFreeSlot."""
        kept = {*in_use, self._newest}
        free = [slot for slot, held in enumerate(self._versions) if held is None or held not in kept]
        if not free:
            raise NoFreeSlot(f"no slot for version {version}: versions {self._versions} are in use")
        self._versions[free[0]] = None
        return free[0]

    def mark_written(self, slot: int, version: int) -> None:
        """Notes that `version` is completely written."""
        self._versions[slot] = self._newest = version


def _matrices(spec: TensorSpec, box: Box, made: Tensor) -> Iterator[tuple[Tensor, Share]]:
    """Yields each matrix of a quantized part, or its scales, with its share of the tensor's fingerprint. Rows are
    whole, so each matrix is contiguous in the tensor."""
    starts, strides = spec.starts_of(box), [math.prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    if len(box.shape) == 2:
        yield made, fingerprint(made, first)
        return
    for number, matrix in enumerate(made):
        yield matrix, fingerprint(matrix, first + number * strides[0])


def _row_of(spec: TensorSpec, box: Box, row: int) -> tuple[int, str]:
    """Returns the number of a row within its matrix and the name of the matrix, for a message.

    Args:
        row: number of the row among all rows of the part.
    """
    if len(box.shape) == 2:
        return box.starts[0] + row, spec.name
    matrix, row = divmod(row, box.shape[1])
    return box.starts[1] + row, f"{spec.name}[{box.starts[0] + matrix}]"


def part_of(layout: Layout, tensors: Mapping[str, Tensor], part: WrittenBox) -> Tensor:
    """Returns the view of a generator rank's tensors that a part fills."""
    spec = layout.specs[part.tensor]
    return tensors[spec.key][spec.index_of(part.box)]


def views(layout: Layout, flat: Tensor) -> dict[str, Tensor]:
    """Returns views of the tensors of a layout in a flat buffer of bytes."""
    return {
        spec.key: flat[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, offset in zip(layout.specs, layout.offsets_bytes, strict=True)
    }


def plan_writers(
    layouts: Sequence[Layout], held: Sequence[Sequence[TensorSpec]], ranks: Iterable[int] | None = None
) -> tuple[WriterPlan, ...]:
    """Plans which trainer rank writes which part of the layouts of a replica's ranks. Each byte has one writer, which
    holds it.

    Args:
        held: specs of each trainer rank's parameters.
        ranks: trainer ranks whose plans are returned. None means all.

    Raises:
        LayoutError: a parameter is missing on one side, has another shape, or has a part that no rank holds. Also if a
            row that is to be quantized with one scale is split between trainer ranks.
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
        # Each rank has its own host here, so the least loaded holder of a part writes it instead of the nearest one.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Consecutive parts of a packed buffer, sent together."""

    start: int
    """Offset in the buffer, in bytes."""
    num_bytes: int
    parts: tuple[tuple[WrittenBox, int], ...]
    """Each part with its offset in the buffer, in bytes."""


def into_buckets(layout: Layout, parts: Sequence[WrittenBox], max_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Returns the packed parts of one writer as buckets. A bucket exceeds `max_bytes` only if a single row does."""
    pieces, buckets, end = list[tuple[WrittenBox, int]](), list[Bucket](), 0
    for part in parts:
        spec = layout.specs[part.tensor]
        for box in _rows(spec, part.box, max_bytes):
            num_bytes = spec.bytes_of(box)
            if pieces and end + num_bytes - pieces[0][1] > max_bytes:
                buckets.append(Bucket(start=pieces[0][1], num_bytes=end - pieces[0][1], parts=tuple(pieces)))
                pieces = []
            pieces.append((WrittenBox(tensor=part.tensor, box=box), end))
            end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if pieces:
        buckets.append(Bucket(start=pieces[0][1], num_bytes=end - pieces[0][1], parts=tuple(pieces)))
    return tuple(buckets)


def _rows(spec: TensorSpec, box: Box, max_bytes: int, dim: int = 0) -> list[Box]:
    """Cuts `box` along `dim` into pieces of at most `max_bytes`. A stack of matrices is cut along the next dim if one
    matrix is too large."""
    if not box.shape:
        return [box]
    num_rows = box.shape[dim]
    # Scales are cut like the 8-bit values that they belong to.
    row_bytes = box.num_elements // num_rows * (DTYPE_BYTES[spec.dtype] if spec.part == "values" else 1)
    step = max(1, max_bytes // max(1, row_bytes))
    boxes = [box.cut(dim, row, min(row + step, num_rows)) for row in range(0, num_rows, step)]
    if row_bytes > max_bytes and dim + 2 < len(box.shape):
        return [piece for matrix in boxes for piece in _rows(spec, matrix, max_bytes, dim + 1)]
    return boxes


def packed(layout: Layout, flat: Tensor, part: WrittenBox, start: int) -> Tensor:
    """Returns the view of one part in a packed buffer, which begins at byte `start`."""
    spec = layout.specs[part.tensor]
    end = start + spec.bytes_of(part.box)
    return flat[start:end].view(getattr(torch, spec.dtype)).view(spec.shape_of(part.box))


def pieces(
    layout: Layout, tensors: Mapping[str, Tensor], bucket: Bucket, scratch: Tensor | None = None
) -> tuple[list[memoryview], list[tuple[Tensor, Tensor]]]:
    """Returns the memory of a bucket as consecutive pieces: a rank's tensors and the gaps between them.

    Args:
        scratch: memory for parts that are not contiguous in the tensors, for a caller that fills the pieces. None means
            that the caller only reads them.

    Returns:
        The pieces, and (tensor, scratch) for each part to be copied from scratch memory.
    """
    found, elsewhere, end = list[memoryview](), list[tuple[Tensor, Tensor]](), bucket.start
    for part, start in bucket.parts:
        found.append(memoryview(bytearray(start - end)))
        piece = target = part_of(layout, tensors, part)
        if not target.is_contiguous():
            piece = target.contiguous() if scratch is None else packed(layout, scratch, part, start - bucket.start)
            elsewhere.append((target, piece))
        found.append(memory_of(piece))
        end = start + piece.nbytes
    return [*found, memoryview(bytearray(bucket.start + bucket.num_bytes - end))], elsewhere


def memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def changes(layout: Layout, flat: Tensor, base: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Encodes the changes of a bucket's parts between two versions of a packed buffer. Returns the number of changes of
    each part, and the bytes of all messages."""
    numbers, pieces = list[int](), list[Tensor]()
    for part, start in bucket.parts:
        number, message = encode(packed(layout, base, part, start), packed(layout, flat, part, start))
        numbers.append(number)
        pieces += message
    return torch.tensor(numbers, device=flat.device), torch.cat(pieces)


def changes_bytes(layout: Layout, bucket: Bucket, numbers: Sequence[int]) -> list[int]:
    """Returns the size of each part's message in bytes, given the numbers of changes."""
    sizes = list[int]()
    for (part, _), number in zip(bucket.parts, numbers, strict=True):
        spec = layout.specs[part.tensor]
        sizes.append(message_bytes(number, math.prod(spec.shape_of(part.box)), DTYPE_BYTES[spec.dtype]))
    return sizes


def wanted(buckets: Sequence[Bucket], tensors: list[int] | None) -> list[Bucket]:
    """Returns the buckets with a part of one of `tensors`. None means all."""
    return [b for b in buckets if tensors is None or any(part.tensor in tensors for part, _ in b.parts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A fetched version to which changes are applied."""

    version: int | None
    """None means that nothing has been fetched."""
    tensors: Mapping[str, Tensor]


NOTHING = Base(version=None, tensors={})


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRequest:
    """Version and tensors that a copying subscriber requests from every trainer rank."""

    version: int
    tensors: Mapping[str, Tensor]
    """Tensors to fill, by key."""
    base: Base
    only: list[int] | None = None
    """Positions of the requested tensors. None means all."""


Room = Callable[[], Mapping[str, Tensor]]
"""Returns tensors for the next version by key: views of one flat buffer with the subscriber's layout."""


class CopyingSubscriber(Subscriber):
    """Fills its own memory. A tensor whose fingerprint is wrong is requested once more, without delta."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, delta: bool = False, room: Room | None = None) -> None:
        super().__init__(specs, rank, delta)
        self._base = NOTHING
        self._room = room or self._own_room
        self._buffers = Buffers(self.layout.num_bytes)

    def _own_room(self) -> Mapping[str, Tensor]:
        return views(self.layout, self._buffers.take())

    @abstractmethod
    def receive(self, request: VersionRequest, address: Address) -> tuple[np.ndarray, int]:
        """Fills `request.tensors`.

        Returns:
            Proofs of all writers, uint64 [writers, 2, tensors], and the number of received bytes.

        Raises:
            Superseded, TransferFailed: as in `fetch`.
        """

    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        request = VersionRequest(version=version, tensors=self._room(), base=self._base)
        proofs, self.received_bytes = self.receive(request, address)
        try:
            self.prove(request.tensors, version, proofs)
        except FingerprintMismatch:
            damaged = self._damaged(request, proofs)
            proofs, again = self.receive(replace(request, base=NOTHING, only=damaged), address)
            self.prove(request.tensors, version, proofs)
            self.received_bytes += again
        if self._delta:
            self._base = Base(version=version, tensors=request.tensors)
        return dict(request.tensors)

    def _damaged(self, request: VersionRequest, proofs: np.ndarray) -> list[int]:
        found = list[int]()
        for index, spec in enumerate(self.layout.specs):
            try:
                self.prove_tensor(index, request.tensors[spec.key], request.version, proofs)
            except FingerprintMismatch:
                found.append(index)
        return found

    def put(self, request: VersionRequest, part: WrittenBox, number: int, message: Tensor) -> None:
        """Fills a part from a message of `delta.encode` with `number` changes of the base, or with all elements."""
        target, base = part_of(self.layout, request.tensors, part), request.base.tensors
        held = part_of(self.layout, base, part) if base else target
        with suppress(ValueError):  # a wrong message is ignored: the fingerprint reveals it and the part is sent again
            target.copy_(decode(held, number, message))


class Buffers:
    """Memory for versions that are copied to the reader. A buffer is reused once no tensor refers to it."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = max(num_bytes, 1)
        self._free = list[mmap.mmap]()

    def take(self) -> Tensor:
        """Returns a flat, uninitialized buffer of bytes."""
        memory = self._free.pop() if self._free else _mapped(self._num_bytes)
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.append, memory)
        return torch.from_numpy(array)


def _mapped(num_bytes: int) -> mmap.mmap:
    """Returns memory in large pages if the system has them. Writing it once per version then takes 10 % less time."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@dataclass(slots=True)
class Slot:
    """Memory for one version of a trainer rank's parts."""

    flats: list[Tensor]
    """Packed parts for each layout."""
    proofs: list[np.ndarray]
    """Proofs for each layout, [2, tensors]."""


class PackedPublisher(Publisher):
    """Packs the parts of each version into a slot. Generator ranks connect to its one address and authenticate with the
    secret."""

    TRANSPORT: ClassVar[str]
    """Name of the transport."""
    BUCKET_BYTES: ClassVar[int] = BUCKET_BYTES
    """Size of a bucket in bytes. Both ends cut alike."""

    def __init__(
        self,
        plan: WriterPlan,
        exchange: Exchange,
        folder: Path | None = None,
        *,
        host: str = "",
        **options: Any,
    ) -> None:
        """
        Args:
            host: an address of this machine that generators can reach. Empty means the address where this process
                listens.
        """
        super().__init__(plan, exchange, folder, **options)
        self._slots = dict[int, Slot]()
        """Slots by version."""
        self._buckets = [
            into_buckets(layout, parts, self.BUCKET_BYTES)
            for layout, parts in zip(plan.layouts, plan.parts, strict=True)
        ]
        self._numbers = {layout.digest: number for number, layout in enumerate(plan.layouts)}
        self._closed = False
        self._is_pinned = not self.ON_DEVICE and self._device.type == "cuda"
        secret = exchange(secrets.token_hex(16))[0]
        self._store = RendezvousStore(host=host or weights_address(), secret=secret, serve=self._serve)
        with ExitStack() as undo:
            undo.callback(PackedPublisher.close, self)
            able = exchange((self._store.rendezvous.address, [bool(parts) for parts in plan.parts]))
            undo.pop_all()
        self._address = Address(
            transport=self.TRANSPORT,
            publisher=secret,
            num_writers=plan.num_writers,
            places={
                layout.digest: ",".join(place if holds[number] else "" for place, holds in able)
                for number, layout in enumerate(plan.layouts)
            },
        )

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        kept = {*in_use, max(self._slots, default=version)}
        free = [self._slots.pop(old) for old in list(self._slots) if old not in kept]
        if len(self._slots) == MAX_SLOTS:
            raise NoFreeSlot(f"no slot for version {version}: versions {[*self._slots]} are in use")
        slot = free[0] if free else self._new_slot()
        for left in free[1:]:
            self._drop(left)
        try:
            self._fill(slot, version, weights)
        except BaseException:
            self._drop(slot)  # no version has it
            raise
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # no other thread waits for this stream
        if before := self._slots.get(version):  # published again
            self._drop(before)
        self._slots[version] = slot
        return self._address

    def _fill(self, slot: Slot, version: int, weights: Mapping[str, Tensor]) -> None:
        for index, layout in enumerate(self._plan.layouts):
            slot.proofs[index][:] = 0
            places = (place for bucket in self._buckets[index] for place in bucket.parts)
            targets = ((part, packed(layout, slot.flats[index], part, start)) for part, start in places)
            self._plan.write(index, version, weights, targets, slot.proofs[index])

    def _new_slot(self) -> Slot:
        sizes = [sum(bucket.num_bytes for bucket in buckets) for buckets in self._buckets]
        device = self._device if self.ON_DEVICE else CPU
        return Slot(
            flats=[
                _pinned(size) if size and self._is_pinned else torch.empty(size, dtype=torch.uint8, device=device)
                for size in sizes
            ],
            proofs=[np.zeros((2, len(layout.specs)), np.uint64) for layout in self._plan.layouts],
        )

    def _drop(self, slot: Slot) -> None:
        """Frees the pinned memory of a slot."""
        for flat in filter(Tensor.numel, slot.flats if self._is_pinned else ()):
            cuda("cudaHostUnregister", flat.data_ptr())

    @abstractmethod
    def _serve(self, connection: Connection, digest: str) -> None:
        """Serves one generator rank in a thread until it disconnects. A generator rank reconnects if it needs more."""

    def close(self) -> None:
        self._closed = True
        self._store.close()
        if self._is_pinned:
            for slot in self._slots.values():
                self._drop(slot)
        self._slots = {}


def _pinned(num_bytes: int) -> Tensor:
    """Returns memory that a GPU writes into directly. torch's own allocator would round its size up to a power of
    two."""
    flat = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    cuda("cudaHostRegister", flat.data_ptr(), num_bytes, 0)
    return flat
