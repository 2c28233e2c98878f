"""Where each tensor lies in a published copy. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
ALIGNMENT_BYTES = 64
"""Tensors begin at cache lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor as the generators hold it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """`float32` or `bfloat16`; the trainer casts while it copies."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Tensors one behind the other."""

    specs: tuple[TensorSpec, ...]
    offsets_bytes: tuple[int, ...]
    """Start of each tensor."""
    num_bytes: int
    """Of all tensors and the gaps between them."""


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Offsets for `specs` in their order."""
    offsets, end = list[int](), 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Layout(specs=tuple(specs), offsets_bytes=tuple(offsets), num_bytes=end)


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentAddress:
    """How a process on the same host finds the segment. Picklable."""

    pid: int
    fd: int
    specs: tuple[TensorSpec, ...]
