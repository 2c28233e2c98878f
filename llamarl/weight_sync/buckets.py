"""The parts that one trainer rank sends to one generator rank, one behind the other, cut into buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import DTYPE_BYTES
from llamarl.weight_sync.base import WrittenBox, part_of
from llamarl.weight_sync.delta import encode, message_bytes
from llamarl.weight_sync.layout import ALIGNMENT_BYTES, Layout, TensorSpec

BUCKET_BYTES = 4 << 20
"""Small enough that a chain of relays fills soon, large enough that what each costs does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Consecutive parts in a packed buffer, sent at once."""

    start: int
    """Offset in the buffer, in bytes."""
    num_bytes: int
    parts: tuple[tuple[WrittenBox, int], ...]
    """Each with where it begins in the buffer, in bytes."""


def into_buckets(layout: Layout, parts: Sequence[WrittenBox], max_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Places for the parts of one writer, cut so that none is larger than a bucket unless one row is."""
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
    """`box`, cut along `dim`; of a stack of matrices, along the next one where one of them is too large."""
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
    """One part in a packed buffer that begins at byte 0."""
    spec = layout.specs[part.tensor]
    end = start + spec.bytes_of(part.box)
    return flat[start:end].view(getattr(torch, spec.dtype)).view(spec.shape_of(part.box))


def pieces(
    layout: Layout, tensors: Mapping[str, Tensor], bucket: Bucket, scratch: Tensor | None = None
) -> tuple[list[memoryview], list[tuple[Tensor, Tensor]]]:
    """The memory of a bucket's bytes, one behind the other: a rank's tensors and the gaps between.

    Args:
        scratch: for who fills it, memory for parts that are not one piece among the tensors. None: for who reads it.

    Returns:
        The memory, and (tensor, scratch) for each part that is to be copied there.
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
    """Its bytes; it is contiguous and in this machine's memory."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def changes(layout: Layout, flat: Tensor, base: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """(number of changes of each part, bytes of all) from one version of a packed buffer to another."""
    numbers, pieces = list[int](), list[Tensor]()
    for part, start in bucket.parts:
        number, message = encode(packed(layout, base, part, start), packed(layout, flat, part, start))
        numbers.append(number)
        pieces += message
    return torch.tensor(numbers, device=flat.device), torch.cat(pieces)


def changes_bytes(layout: Layout, bucket: Bucket, numbers: Sequence[int]) -> list[int]:
    """Bytes of each part in the message of a bucket's changes, by the numbers of these."""
    sizes = list[int]()
    for (part, _), number in zip(bucket.parts, numbers, strict=True):
        spec = layout.specs[part.tensor]
        sizes.append(message_bytes(number, math.prod(spec.shape_of(part.box)), DTYPE_BYTES[spec.dtype]))
    return sizes


def wanted(buckets: Sequence[Bucket], tensors: list[int] | None) -> list[Bucket]:
    """All buckets, or those with a part of one of `tensors`."""
    return [b for b in buckets if tensors is None or any(part.tensor in tensors for part, _ in b.parts)]
