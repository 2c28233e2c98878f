"""`Totals`: what a rank's microbatches add up to. Values stay on the device until all of them are read at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Logged(NamedTuple):
    """Sums and maxima, by name."""

    sums: dict[str, float]
    maxima: dict[str, float]


class Totals:
    """Scalars of the microbatches of one pass."""

    def __init__(self) -> None:
        self._sums = list[tuple[str, Tensor]]()
        self._maxima = list[tuple[str, Tensor]]()

    def add(self, sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> None:
        """Adds the scalars of one microbatch. Does not wait for the device."""
        self._sums += ((name, value.detach().double()) for name, value in sums.items())
        self._maxima += ((name, value.detach().double()) for name, value in maxima.items())

    def read(self) -> tuple[Logged, list[float]]:
        """All together, and the loss of each microbatch. Waits for the device, once."""
        values = [value for _, value in (*self._sums, *self._maxima)]
        numbers = iter(torch.stack(values).tolist() if values else ())
        sums = [Logged({name: next(numbers)}, {}) for name, _ in self._sums]
        maxima = [Logged({}, {name: next(numbers)}) for name, _ in self._maxima]
        return merged((*sums, *maxima)), [one.sums["loss"] for one in sums if "loss" in one.sums]


def merged(logged: Iterable[Logged]) -> Logged:
    """Sums added, maxima compared."""
    all_sums, all_maxima = dict[str, float](), dict[str, float]()
    for sums, maxima in logged:
        for name, value in sums.items():
            all_sums[name] = all_sums.get(name, 0.0) + value
        for name, value in maxima.items():
            all_maxima[name] = max(all_maxima.get(name, -math.inf), value)
    return Logged(all_sums, all_maxima)
