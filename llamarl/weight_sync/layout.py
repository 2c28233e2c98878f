"""Layout of a published copy of the weights: the place of each tensor. No torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import DTYPE_BYTES, QUANTIZED, LayoutError

ALIGNMENT_BYTES = 64
"""Tensors begin at cache lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a generator rank: its part of one of the trainer's parameters."""

    name: str
    """Name of the trainer's parameter."""
    part: Literal["values", "scales"] = "values"
    """Part of a quantized parameter: the integer or float8 values, or the float32 scale of each row of `box`. A row
    lies along the last dim."""
    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""
    box: Box
    """This rank's part of the parameter."""
    dtype: str
    """A key of DTYPE_BYTES. The sender casts or quantizes."""

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], dtype: str) -> TensorSpec:
        """Returns the spec of a parameter that is not cut."""
        return cls(name=name, global_shape=tuple(shape), box=Box.whole(shape), dtype=dtype)

    @property
    def key(self) -> str:
        """Name of the tensor, unique among a rank's specs."""
        return self.name if self.part == "values" else f"{self.name}.scale"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor. Scales have all dims of the values but the last."""
        return self.box.shape if self.part == "values" else self.box.shape[:-1]

    @property
    def num_bytes(self) -> int:
        return self.bytes_of(self.box)

    def shape_of(self, box: Box) -> tuple[int, ...]:
        """Returns the shape in this tensor of a box of the parameter."""
        return box.shape[: len(self.shape)]

    def bytes_of(self, box: Box) -> int:
        """Returns the bytes in this tensor of a box of the parameter."""
        return math.prod(self.shape_of(box)) * DTYPE_BYTES[self.dtype]

    def starts_of(self, box: Box) -> tuple[int, ...]:
        """Returns the indices at which a box of the parameter begins in this tensor."""
        starts = tuple(a - b for a, b in zip(box.starts, self.box.starts, strict=True))
        return starts[: len(self.shape)]

    def index_of(self, box: Box) -> tuple[slice, ...]:
        """Returns the slices of this tensor that a box of the parameter fills."""
        return box.within(self.box)[: len(self.shape)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Consecutive tensors."""

    specs: tuple[TensorSpec, ...]
    offsets_bytes: tuple[int, ...]
    """Offset of each tensor."""
    num_bytes: int
    """Size of all tensors and the gaps between them."""
    digest: str
    """Equal for equal specs, in hexadecimal digits."""


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Returns the layout of `specs` in their order. Raises LayoutError for an unknown dtype, or 8 bits without
    scales."""
    offsets, end = list[int](), 0
    scales = {(spec.name, spec.box) for spec in specs if spec.part == "scales"}
    for spec in specs:
        if spec.dtype not in DTYPE_BYTES:
            raise LayoutError(spec.key, f"its type is {spec.dtype}; supported are {', '.join(DTYPE_BYTES)}")
        if spec.dtype in QUANTIZED and (len(spec.box.shape) not in (2, 3) or (spec.name, spec.box) not in scales):
            needed = "a matrix or a stack of matrices, and a tensor with float32 scales of its rows"
            raise LayoutError(spec.key, f"{spec.dtype} needs {needed}")
        offsets.append(end)
        end += -(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    digest = hashlib.sha256(repr(tuple(specs)).encode()).hexdigest()[:16]
    return Layout(specs=tuple(specs), offsets_bytes=tuple(offsets), num_bytes=end, digest=digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Address where a trainer publishes weights. It is picklable, small, and the same for all versions of a
    publisher."""

    transport: str
    """Name of the transport that reads it."""
    publisher: str
    """Random name. Another one means that the trainer was restarted."""
    num_writers: int
    """Trainer ranks. Each writes a part of every version."""
    places: Mapping[str, str]
    """Place of each layout, by its digest: a path, or `host:port` of each trainer rank, separated by commas. A rank
    that writes nothing of the layout has an empty place."""
