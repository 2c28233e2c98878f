"""Layouts: the part of each parameter that each rank of an executor holds, as reported by the ranks.

Shape suffixes: R ranks, N dims of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from llamarl.sharding.box import Box

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
QUANTIZED = ("int8", "float8_e4m3fn")
"""Types with a float32 scale for each row of a rank's part."""
SCALE_BYTES = 4


class LayoutError(ValueError):
    """Two layouts, or the ranks of one layout, do not fit. `parameter` names the parameter."""

    def __init__(self, parameter: str, cause: str) -> None:
        super().__init__(f"{parameter}: {cause}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True, eq=False)
class RankBoxes:
    """One box per rank, empty if a rank holds nothing. Parameters that are cut alike share one object."""

    starts_R_N: np.ndarray
    """First element in each dim. A scalar counts as one row."""
    stops_R_N: np.ndarray


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter in a layout."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: str
    """A key of DTYPE_BYTES: the type that trainer ranks publish, or that generator ranks serve."""
    boxes: RankBoxes

    def box(self, rank: int) -> Box | None:
        """Returns the part that `rank` holds. None means that it holds nothing."""
        starts, stops = self.boxes.starts_R_N[rank].tolist(), self.boxes.stops_R_N[rank].tolist()
        return make_box(starts, stops, self.shape) if all(map(int.__lt__, starts, stops)) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """All ranks of one executor."""

    parameters: Mapping[str, Held]
    devices_R: np.ndarray
    """Number of each rank's device in the cluster. Ranks of two layouts may share one."""
    host_size: int
    """Devices per host: device d is on host d // host_size."""

    @property
    def num_ranks(self) -> int:
        return len(self.devices_R)

    @property
    def hosts_R(self) -> np.ndarray:
        """Number of each rank's host."""
        return self.devices_R // self.host_size

    def boxes(self, rank: int) -> dict[str, Box]:
        """Returns the parts that `rank` holds, by parameter."""
        found = {name: held.box(rank) for name, held in self.parameters.items()}
        return {name: box for name, box in found.items() if box is not None}


def make_box(starts: Sequence[int], stops: Sequence[int], shape: Sequence[int]) -> Box:
    """Converts a row of `RankBoxes` to a box."""
    return Box(tuple(starts[: len(shape)]), tuple(stops[: len(shape)]))


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Returns the layers of each pipeline stage, as evenly as possible. The first stages have one more."""
    each, more = divmod(num_layers, num_stages)
    firsts = [stage * each + min(stage, more) for stage in range(num_stages + 1)]
    return [range(*bounds) for bounds in pairwise(firsts)]


def assemble_layout(
    ranks: Sequence[Mapping[str, tuple[Sequence[int], str, Box]]], *, first_device: int = 0, host_size: int = 8
) -> ShardLayout:
    """Assembles the layout from the reports of the ranks: for each parameter its whole shape, its type and the rank's
    part.

    Raises:
        LayoutError: two ranks report different shapes or types of a parameter, or a part is outside of it.
    """
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    found: dict[str, list[Box | None]] = {}
    for rank, parts in enumerate(ranks):
        for name, (sizes, dtype, box) in parts.items():
            shape = tuple(sizes)
            if known.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise LayoutError(name, f"rank {rank} holds it as {dtype} {shape}, another rank as {known[name]}")
            if not _is_within(box, shape) and box.num_elements:
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
            made[key] = rank_boxes(boxes, shape)
        held[name] = Held(shape, dtype, made[key])
    return ShardLayout(parameters=held, devices_R=first_device + np.arange(len(ranks)), host_size=host_size)


def _is_within(box: Box, shape: tuple[int, ...]) -> bool:
    return min(box.starts, default=0) >= 0 and all(map(int.__le__, box.stops, shape))


def rank_boxes(boxes: Sequence[Box | None], shape: tuple[int, ...]) -> RankBoxes:
    """Converts boxes of ranks to arrays. None means that the rank holds nothing."""
    nothing = (0,) * len(shape)
    bounds = np.array([(box.starts, box.stops) if box else (nothing, nothing) for box in boxes], np.int64)
    if not shape:
        held = np.array([[box is not None] for box in boxes], np.int64)
        return RankBoxes(np.zeros_like(held), held)
    return RankBoxes(bounds[:, 0], bounds[:, 1])
