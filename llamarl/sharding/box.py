"""`Box`: a rectangular part of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `starts[d] <= index < stops[d]` in each dim `d`."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of the whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def cut(self, dim: int, start: int, stop: int) -> Box:
        """Returns the elements from `start` to `stop` along `dim`, counted from this box's own start."""
        first = self.starts[dim]
        starts, stops = list(self.starts), list(self.stops)
        starts[dim], stops[dim] = first + start, first + stop
        return Box(tuple(starts), tuple(stops))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Returns the common part. None means that it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns the index of this box in a tensor that holds only `outer`."""
        return tuple(
            slice(start - first, stop - first)
            for start, stop, first in zip(self.starts, self.stops, outer.starts, strict=True)
        )
