"""Layouts: what each rank of an executor holds of each parameter, from sizes and names alone.

Shape suffixes: R ranks, N dims of the parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import sharded_dim, tensor_parallel_box

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
QUANTIZED = ("int8", "float8_e4m3fn")
"""Types of which each row of a rank's own part has a float32 scale."""
SCALE_BYTES = 4
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class LayoutError(ValueError):
    """Two layouts, or ranks of one, that do not fit; `parameter` is the one in question."""

    def __init__(self, parameter: str, cause: str) -> None:
        super().__init__(f"{parameter}: {cause}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along `dim` over one mesh axis like `torch.chunk`: ceil(n / size) each, the last ones less or nothing."""

    dim: int
    strided: bool = False
    """Cut after the axes to its right, as FSDP2 does inside tensor parallelism (torch's `_StridedShard`)."""


Placement = Shard | None
"""Cut on one mesh axis; None: every rank along it holds the same."""


@dataclass(frozen=True, slots=True, eq=False)
class RankBoxes:
    """One box per rank, empty where a rank holds nothing. Parameters that are cut alike share one, so equal is same."""

    starts_R_N: np.ndarray
    """First element in each dim; a scalar counts as one row."""
    stops_R_N: np.ndarray

    @property
    def elements_R(self) -> np.ndarray:
        """Number of elements of each rank."""
        return (self.stops_R_N - self.starts_R_N).prod(axis=1)


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter in a layout."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: str
    """A key of DTYPE_BYTES: what trainer ranks publish, or what generator ranks serve."""
    boxes: RankBoxes

    def box(self, rank: int) -> Box | None:
        """The part that `rank` holds; None: nothing."""
        starts, stops = self.boxes.starts_R_N[rank].tolist(), self.boxes.stops_R_N[rank].tolist()
        return make_box(starts, stops, self.shape) if all(map(int.__lt__, starts, stops)) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """All ranks of one executor."""

    parameters: Mapping[str, Held]
    devices_R: np.ndarray
    """Number of each rank's device in the cluster; ranks of two layouts may share one."""
    host_size: int
    """Devices of a host; device d is on host d // host_size."""

    @property
    def num_ranks(self) -> int:
        return len(self.devices_R)

    @property
    def hosts_R(self) -> np.ndarray:
        """Number of each rank's host."""
        return self.devices_R // self.host_size

    def boxes(self, rank: int) -> dict[str, Box]:
        """Parts that `rank` holds, by parameter."""
        found = {name: held.box(rank) for name, held in self.parameters.items()}
        return {name: box for name, box in found.items() if box is not None}


def make_box(starts: Sequence[int], stops: Sequence[int], shape: Sequence[int]) -> Box:
    """A row of `RankBoxes` as a box."""
    return Box(tuple(starts[: len(shape)]), tuple(stops[: len(shape)]))


def chunks(starts: np.ndarray, stops: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of `num` pieces of each range, as `torch.chunk` cuts; the pieces are a new last axis."""
    size = (stops - starts)[..., None]
    edges = np.minimum(np.arange(num + 1) * -(-size // num), size) + starts[..., None]
    return edges[..., :-1], edges[..., 1:]


def mesh_boxes(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> RankBoxes:
    """The part of each rank of a mesh, ranks counted with the last axis fastest: what DTensor holds there."""
    cuts = [(axis, placement) for axis, placement in enumerate(placements) if placement is not None]
    ordered = [one for one in cuts if not one[1].strided] + [one for one in reversed(cuts) if one[1].strided]
    num_dims = len(sizes := tuple(shape) or (1,))
    starts = np.zeros((*[1] * len(mesh), num_dims), np.int64)
    stops = starts + np.array(sizes)
    for axis, placement in ordered:
        # The axis had length 1; the pieces take its place.
        begin, end = (
            np.moveaxis(one, -1, axis).squeeze(axis + 1)
            for one in chunks(starts[..., placement.dim], stops[..., placement.dim], mesh[axis])
        )
        starts, stops = np.repeat(starts, mesh[axis], axis), np.repeat(stops, mesh[axis], axis)
        starts[..., placement.dim], stops[..., placement.dim] = begin, end
    return RankBoxes(*(np.broadcast_to(one, (*mesh, num_dims)).reshape(-1, num_dims) for one in (starts, stops)))


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each pipeline stage: as even as can be, the first stages have one more."""
    each, more = divmod(num_layers, num_stages)
    firsts = [stage * each + min(stage, more) for stage in range(num_stages + 1)]
    return [range(*bounds) for bounds in pairwise(firsts)]


def trainer_layout(
    parameters: Mapping[str, Sequence[int]],
    *,
    fsdp: int = 1,
    tp: int = 1,
    pp: int = 1,
    replicate: int = 1,
    dtype: str = "bfloat16",
    first_device: int = 0,
    host_size: int = 8,
) -> ShardLayout:
    """Ranks of a mesh (pp, replicate, fsdp, tp): FSDP2 cuts the rows of what tensor parallelism leaves.

    The embedding is on the first pipeline stage, what follows the layers on the last, a tied embedding on both.

    Args:
        parameters: name (Hugging Face) and shape.
        dtype: what unquantized weights travel as.
    """
    mesh = (replicate, fsdp, tp)
    each = math.prod(mesh)
    num_layers = 1 + max((int(found[1]) for name in parameters if (found := _LAYER.search(name))), default=0)
    stage_of = {layer: stage for stage, layers in enumerate(stage_layers(num_layers, pp)) for layer in layers}
    is_tied = not any(name.endswith("lm_head.weight") for name in parameters)

    def stages(name: str) -> tuple[int, ...]:
        if layer := _LAYER.search(name):
            return (stage_of[int(layer[1])],)
        if "embed_tokens" in name:
            return (0, pp - 1) if is_tied and pp > 1 else (0,)
        return (pp - 1,)

    made: dict[tuple[object, ...], RankBoxes] = {}
    held: dict[str, Held] = {}
    for name, sizes in parameters.items():
        shape, dim, where = tuple(sizes), sharded_dim(name), stages(name)
        key = (shape, dim, where)
        if key not in made:
            tensor = None if dim is None else Shard(dim)
            boxes = mesh_boxes(shape, mesh, (None, Shard(0, strided=dim == 0), tensor))
            made[key] = _on_stages(boxes, where, pp)
        held[name] = Held(shape, dtype, made[key])
    return ShardLayout(parameters=held, devices_R=first_device + np.arange(pp * each), host_size=host_size)


def _on_stages(boxes: RankBoxes, where: tuple[int, ...], pp: int) -> RankBoxes:
    """The same boxes on the ranks of some pipeline stages, nothing on the others."""
    here = np.isin(np.arange(pp), where)[:, None, None]
    return RankBoxes(*((here * one).reshape(-1, one.shape[1]) for one in (boxes.starts_R_N, boxes.stops_R_N)))


def is_quantizable(name: str) -> bool:
    """A projection of a layer; embedding, head, norms and biases stay floats."""
    return name.endswith("_proj.weight")


def generator_layout(
    parameters: Mapping[str, Sequence[int]],
    *,
    num_kv_heads: int,
    tp: int = 1,
    replicas: int = 1,
    dtype: str = "bfloat16",
    first_device: int = 0,
    host_size: int = 8,
) -> ShardLayout:
    """Replicas of tensor-parallel ranks, the ranks of a replica next to each other.

    Args:
        parameters: name (Hugging Face) and shape.
        dtype: of what `is_quantizable`; if that is 8 bits wide the rest is bfloat16.

    Raises:
        ValueError: a parameter cannot be cut evenly.
    """
    made, alike = dict[tuple[object, ...], RankBoxes](), dict[tuple[object, ...], RankBoxes]()
    held: dict[str, Held] = {}
    for name, sizes in parameters.items():
        shape = tuple(sizes)
        key = (shape, *name.split(".")[-2:])
        if key not in made:
            boxes = [tensor_parallel_box(name, shape, tp, rank, num_kv_heads) for rank in range(tp)]
            made[key] = alike.setdefault((shape, *boxes), _rank_boxes(boxes * replicas, shape))
        is_float = dtype in QUANTIZED and not is_quantizable(name)
        held[name] = Held(shape, "bfloat16" if is_float else dtype, made[key])
    return ShardLayout(parameters=held, devices_R=first_device + np.arange(replicas * tp), host_size=host_size)


def assemble_layout(
    ranks: Sequence[Mapping[str, tuple[Sequence[int], str, Box]]], *, first_device: int = 0, host_size: int = 8
) -> ShardLayout:
    """The layout of ranks that say themselves what they hold: for each parameter the whole shape, the type, their part.

    Raises:
        LayoutError: two ranks name a parameter with different shapes or types, or one has a part outside of it.
    """
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    found: dict[str, list[Box | None]] = {}
    for rank, parts in enumerate(ranks):
        for name, (sizes, dtype, box) in parts.items():
            shape = tuple(sizes)
            if known.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise LayoutError(name, f"rank {rank} holds it as {dtype} {shape}, another rank as {known[name]}")
            if box.intersection(Box.whole(shape)) != box and box.num_elements:
                raise LayoutError(name, f"rank {rank} holds {box}, which is not within {shape}")
            if name not in found:
                found[name] = [None] * len(ranks)
            found[name][rank] = box
    made: dict[tuple[object, ...], RankBoxes] = {}
    held: dict[str, Held] = {}
    for name, boxes in found.items():
        shape, dtype = known[name]
        key = (shape, *boxes)
        if key not in made:
            made[key] = _rank_boxes(boxes, shape)
        held[name] = Held(shape, dtype, made[key])
    return ShardLayout(parameters=held, devices_R=first_device + np.arange(len(ranks)), host_size=host_size)


def _rank_boxes(boxes: Sequence[Box | None], shape: tuple[int, ...]) -> RankBoxes:
    nothing = (0,) * len(shape)
    bounds = np.array([(box.starts, box.stops) if box else (nothing, nothing) for box in boxes], np.int64)
    if not shape:
        held = np.array([[box is not None] for box in boxes], np.int64)
        return RankBoxes(np.zeros_like(held), held)
    return RankBoxes(bounds[:, 0], bounds[:, 1])
