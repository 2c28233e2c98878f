"""Layout of a published copy: where each tensor lies. No torch."""

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
    """One tensor as a generator rank holds it: its part of one of the trainer's parameters."""

    name: str
    """The trainer's parameter."""
    part: Literal["values", "scales"] = "values"
    """Part of a quantized parameter: the integer or float8 values, or the float32 scale of each row of `box`,
    which lies along its last dim."""
    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""
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
        """Shape of the tensor; scales have all dims of the values but the last."""
        return self.box.shape if self.part == "values" else self.box.shape[:-1]

    @property
    def num_bytes(self) -> int:
        return self.bytes_of(self.box)

    def shape_of(self, box: Box) -> tuple[int, ...]:
        """Shape of what a box of the parameter becomes in this tensor."""
        return box.shape[: len(self.shape)]

    def bytes_of(self, box: Box) -> int:
        """Bytes that a box of the parameter takes in this tensor."""
        return math.prod(self.shape_of(box)) * DTYPE_BYTES[self.dtype]

    def starts_of(self, box: Box) -> tuple[int, ...]:
        """Indices at which a box of the parameter begins in this tensor."""
        starts = tuple(a - b for a, b in zip(box.starts, self.box.starts, strict=True))
        return starts[: len(self.shape)]

    def index_of(self, box: Box) -> tuple[slice, ...]:
        """Slices that a box of the parameter fills in this tensor."""
        return box.within(self.box)[: len(self.shape)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Tensors one behind the other."""

    specs: tuple[TensorSpec, ...]
    offsets_bytes: tuple[int, ...]
    """Start of each tensor."""
    num_bytes: int
    """Size of all tensors and the gaps between them, in bytes."""
    digest: str
    """Equal for equal specs, in hexadecimal digits."""


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Offsets for `specs` in their order. Raises LayoutError for an unknown dtype, or 8 bits without scales."""
    offsets, end = list[int](), 0
    scales = {(spec.name, spec.box) for spec in specs if spec.part == "scales"}
    for spec in specs:
        if spec.dtype not in DTYPE_BYTES:
            raise LayoutError(spec.key, f"its type is {spec.dtype}; sent are {', '.join(DTYPE_BYTES)}")
        if spec.dtype in QUANTIZED and (len(spec.box.shape) not in (2, 3) or (spec.name, spec.box) not in scales):
            needed = "a matrix, or a stack of them, and float32 scales of the same rows beside it"
            raise LayoutError(spec.key, f"{spec.dtype} needs {needed}")
        offsets.append(end)
        end += -(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    digest = hashlib.sha256(repr(tuple(specs)).encode()).hexdigest()[:16]
    return Layout(specs=tuple(specs), offsets_bytes=tuple(offsets), num_bytes=end, digest=digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Address of what a trainer publishes, for generators. Picklable, small, the same for all versions of a
    publisher."""

    transport: str
    """Name of the file here that reads it."""
    publisher: str
    """Random; another one means that the trainer was started anew."""
    num_writers: int
    """Trainer ranks; each writes a part of every version."""
    places: Mapping[str, str]
    """Place of each layout, by its digest: a path, or `host:port` of each trainer rank, with commas between; empty for
    one that writes nothing of it."""
