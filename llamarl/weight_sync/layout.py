"""Where each tensor lies in a published copy. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llamarl.distributed.box import Box

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
ALIGNMENT_BYTES = 64
"""Tensors begin at cache lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor as a generator rank holds it: its part of one of the trainer's parameters."""

    name: str
    """The trainer's parameter."""
    part: Literal["values", "scales"] = "values"
    """Of a quantized parameter: the integer or float8 values, or the float32 scale of each row of `box`."""
    global_shape: tuple[int, ...]
    """Of the whole parameter."""
    box: Box
    """This rank's part of it."""
    dtype: str
    """A key of DTYPE_BYTES; whoever sends casts or quantizes."""

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], dtype: str) -> TensorSpec:
        """A parameter that is not cut."""
        return cls(name=name, global_shape=tuple(shape), box=Box.whole(shape), dtype=dtype)

    @property
    def key(self) -> str:
        """Name of the tensor, unique among a rank's specs."""
        return self.name if self.part == "values" else f"{self.name}.scale"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor; scales have one element per row."""
        return self.box.shape if self.part == "values" else self.box.shape[:1]

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
