"""Trainer ranks in the process of the test."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import weight_processes as processes
from torch import Tensor

from llamarl.sharding.box import Box
from llamarl.weight_sync.base import Subscriber, plan_writers
from llamarl.weight_sync.layout import Address, TensorSpec, lay_out
from llamarl.weight_sync.select import publisher_class


class Trainer:
    """Trainer ranks of this process; each holds an equal share."""

    def __init__(
        self, transport: str, specs: Sequence[Sequence[TensorSpec]], num_ranks: int, folder: Path,
        part: Callable[[TensorSpec, int, int], TensorSpec] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """`part(spec, num_ranks, rank)` is what a rank holds, by default rows."""
        part = part or _rows
        self._held = [[part(spec, num_ranks, rank) for spec in _whole(specs)] for rank in range(num_ranks)]
        plans = plan_writers([lay_out(one) for one in specs], self._held)
        barrier, values = Barrier(num_ranks), [None] * num_ranks
        options |= {"folder": folder} if transport == "file" else {}

        def open_one(rank: int) -> Any:
            def exchange(value: Any) -> list[Any]:
                values[rank] = value
                barrier.wait(240)
                answer = list(values)
                barrier.wait(240)
                return answer

            return publisher_class(transport)(plans[rank], exchange, **options)

        with ThreadPoolExecutor(num_ranks) as pool:
            self.publishers = list(pool.map(open_one, range(num_ranks)))

    def publish(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        in_use: Collection[int] = (),
        between: Callable[[], Any] = lambda: None,
    ) -> Address:
        """`between` is called after each rank but the last."""
        for rank, (publisher, held) in enumerate(zip(self.publishers, self._held, strict=True)):
            if rank:
                between()
            own = {spec.name: weights[spec.name][spec.box.within(Box.whole(spec.global_shape))] for spec in held}
            address = publisher.publish(version, own, in_use)
        return address

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


def _whole(specs: Sequence[Sequence[TensorSpec]]) -> list[TensorSpec]:
    return [TensorSpec.whole(spec.name, spec.global_shape, "float32") for spec in specs[0] if spec.part == "values"]


def _rows(spec: TensorSpec, num: int, rank: int) -> TensorSpec:
    if not spec.box.shape:
        return spec
    size = -(-spec.box.shape[0] // num)
    bounds = (min(edge, spec.box.shape[0]) for edge in (rank * size, (rank + 1) * size))
    return replace(spec, box=spec.box.cut(0, *bounds))


def faults(subscriber: Subscriber, version: int, address: Address, weights: Mapping[str, Tensor]) -> list[str]:
    """Tensors that do not arrive bit for bit."""
    served, expected = subscriber.fetch(version, address), processes.cut(weights, subscriber.layout.specs)
    return [key for key in expected if processes.bits(served[key]) != processes.bits(expected[key])]
