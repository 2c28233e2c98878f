"""`chart`: draws a series as columns of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Eighths of a cell, from the bottom."""


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Returns `height` lines of at most `width` cells, from the top, with columns from the smallest to the largest
    value. A longer series is averaged. A value that is not finite leaves a gap."""
    cells = resample(values, width)
    known = [value for value in cells if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    spread = (high - low) or 1.0
    # The smallest value still shows one eighth: an empty column would look like a gap.
    eighths = [1 + round((value - low) / spread * (height * 8 - 1)) if math.isfinite(value) else 0 for value in cells]
    floors = range((height - 1) * 8, -1, -8)
    return ["".join(BLOCKS[min(max(full - floor, 0), 8)] for full in eighths) for floor in floors]


def resample(values: Sequence[float], width: int) -> list[float]:
    """Returns at most `width` means of neighboring values, ignoring values that are not finite."""
    if len(values) <= width:
        return list(values)
    if width <= 0:
        return []
    edges = [round(cell * len(values) / width) for cell in range(width + 1)]
    return [_mean(values[begin:end]) for begin, end in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
