"""Layouts of trainers and generators: the part of each parameter on each rank, from sizes and names.

Shape suffixes: R ranks, N dims of the parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import QUANTIZED, Held, RankBoxes, ShardLayout, rank_boxes, stage_layers
from llamarl.sharding.tensor_parallel import (
    cuts_by_expert,
    expert_box,
    is_expert,
    is_quantizable,
    is_router,
    sharded_dim,
    tensor_parallel_box,
)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along `dim` over one mesh axis like `torch.chunk`: ceil(n / size) each, the last ones less or nothing."""

    dim: int
    strided: bool = False
    """Cut after the axes to its right, as FSDP2 does inside tensor parallelism (torch's `_StridedShard`)."""


Placement = Shard | None
"""Sharding on one mesh axis. None means replicated."""


def chunks(starts: np.ndarray, stops: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of `num` pieces of each range, as `torch.chunk` cuts them. The pieces are a new last axis."""
    size = (stops - starts)[..., None]
    edges = np.minimum(np.arange(num + 1) * -(-size // num), size) + starts[..., None]
    return edges[..., :-1], edges[..., 1:]


def mesh_boxes(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]) -> RankBoxes:
    """Returns the part of each rank of a mesh, as DTensor shards it. The last axis varies fastest."""
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


def trainer_layout(
    parameters: Mapping[str, Sequence[int]],
    *,
    fsdp: int = 1,
    tp: int = 1,
    pp: int = 1,
    replicate: int = 1,
    ep: int = 1,
    dtype: str = "bfloat16",
    first_device: int = 0,
    host_size: int = 8,
) -> ShardLayout:
    """Returns the layout on ranks of a mesh (pp, replicate, fsdp, tp). FSDP2 shards the rows that tensor parallelism
    leaves. With `ep` the experts of a mixture are distributed by number over `ep` neighbors, and FSDP2 shards the rows
    of each expert.

    The embedding is on the first pipeline stage, the final norm and head on the last, and a tied embedding on both.

    Args:
        parameters: name (Hugging Face) and shape.
        dtype: what unquantized weights travel as; routers are float32.
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
        key = (shape, dim, where, is_expert(name))
        if key not in made:
            tensor = None if dim is None else Shard(dim)
            if ep > 1 and is_expert(name):
                boxes = mesh_boxes(
                    shape, (replicate, fsdp // ep, ep, tp), (None, Shard(1, strided=dim == 1), Shard(0), tensor)
                )
            else:
                boxes = mesh_boxes(shape, mesh, (None, Shard(0, strided=dim == 0), tensor))
            made[key] = _on_stages(boxes, where, pp)
        held[name] = Held(shape, "float32" if is_router(name) else dtype, made[key])
    return ShardLayout(parameters=held, devices_R=first_device + np.arange(pp * each), host_size=host_size)


def _on_stages(boxes: RankBoxes, where: tuple[int, ...], pp: int) -> RankBoxes:
    """Returns the boxes on the ranks of some pipeline stages, and nothing on the others."""
    here = np.isin(np.arange(pp), where)[:, None, None]
    return RankBoxes(*((here * one).reshape(-1, one.shape[1]) for one in (boxes.starts_R_N, boxes.stops_R_N)))


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
    """Returns the layout of tensor-parallel replicas with consecutive ranks. Experts are distributed as in the engine.

    Args:
        parameters: name (Hugging Face) and shape.
        dtype: type of quantizable weights. If it is 8-bit, the rest is bfloat16. Routers are always float32.

    Raises:
        ValueError: a parameter cannot be divided evenly.
    """
    made, alike = dict[tuple[object, ...], RankBoxes](), dict[tuple[object, ...], RankBoxes]()
    held: dict[str, Held] = {}
    for name, sizes in parameters.items():
        shape = tuple(sizes)
        key = (shape, *name.split(".")[-2:])
        if key not in made:
            boxes = [_served_box(name, shape, tp, rank, num_kv_heads) for rank in range(tp)]
            made[key] = alike.setdefault((shape, *boxes), rank_boxes(boxes * replicas, shape))
        is_float = dtype in QUANTIZED and not is_quantizable(name)
        kind = "float32" if is_router(name) else "bfloat16" if is_float else dtype
        held[name] = Held(shape, kind, made[key])
    return ShardLayout(parameters=held, devices_R=first_device + np.arange(replicas * tp), host_size=host_size)


def _served_box(name: str, shape: tuple[int, ...], tp: int, rank: int, num_kv_heads: int) -> Box:
    """Returns the part of a generator's rank. Raises ValueError if the parameter cannot be divided evenly."""
    dim = sharded_dim(name)
    if is_expert(name) and dim is not None and cuts_by_expert(shape[0], shape[dim], tp):
        return expert_box(shape, tp, rank)
    return tensor_parallel_box(name, shape, tp, rank, num_kv_heads)
