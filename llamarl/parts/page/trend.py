"""Compares the beginning and the end of a metric, with the error of the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PART = 0.2
"""Share of the steps at the beginning and at the end that are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """A metric over the first and the last steps."""

    first: float
    last: float
    error: float
    """Standard error of the difference, assuming independent steps."""
    num: int = 1
    """Number of values averaged in `first` and in `last`."""

    @property
    def change(self) -> float:
        return self.last - self.first


def ends(values: Sequence[float]) -> Ends | None:
    """Returns None for fewer than four values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 4:
        return None
    size = max(2, int(PART * len(known)))
    (first, of_first), (last, of_last) = _mean(known[:size]), _mean(known[-size:])
    return Ends(first=first, last=last, error=math.sqrt(of_first + of_last), num=size)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its variance."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
