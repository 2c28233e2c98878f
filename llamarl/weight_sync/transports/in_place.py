"""Transport on one device where the generator sleeps while the trainer works: generators serve the trainer's own
weights.

At the first version, the trainer moves its weights into memory with the generator's layout, where they stay. Publishing
then copies nothing: it publishes fingerprints, and a generator that wakes verifies them. On the CPU this memory is the
first slot of `shared_memory`. On a GPU it is the trainer's, and other processes open it by a CUDA handle that comes
with the address. The transport needs one trainer rank, and tensors of the same types on both sides.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from llamarl.config.errors import ConfigError
from llamarl.kernels.copy import fingerprint, read
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import Exchange, TransferFailed, WriterPlan, views
from llamarl.weight_sync.layout import Address, TensorSpec
from llamarl.weight_sync.select import IN_PLACE
from llamarl.weight_sync.transports.shared_memory import (
    EMPTY,
    SharedMemoryPublisher,
    SharedMemorySubscriber,
    SlotMemory,
    word,
)

HOME = 0
"""The slot that is the weights' own memory."""
_own = dict[str, Tensor]()
"""Memory of this process's GPU weights by the publisher's place, since CUDA opens no handle in the process that made
it."""


def is_same_layout(specs: Sequence[TensorSpec], held: Mapping[str, TensorSpec]) -> bool:
    """Returns whether a generator rank that needs `specs` can compute with the tensors of a trainer rank."""
    return all(
        spec.name in held
        and (spec.part, spec.dtype) == ("values", held[spec.name].dtype)
        and spec.box == held[spec.name].box == Box.whole(spec.global_shape)
        for spec in specs
    )


class InPlacePublisher(SharedMemoryPublisher):
    """Moves the weights once, then publishes only the fingerprints of each version."""

    RANK: ClassVar[int] = -1
    IN_PLACE: ClassVar[bool] = True

    def __init__(self, plan: WriterPlan, exchange: Exchange, folder: Path | None = None, **options: Any) -> None:
        one_each = plan.num_writers == len(plan.layouts) == 1
        if not one_each or any(spec.part != "values" for spec in plan.layouts[0].specs):
            raise ConfigError(
                "weight_sync.transport = 'in_place' needs one trainer rank, generators of one rank and no 8-bit "
                "weights; use 'auto'"
            )
        super().__init__(plan, exchange, folder, **options)
        self._homes = dict[str, Tensor]()
        """The weights in their final memory."""

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        segment, layout = self._segments[0], self._plan.layouts[0]
        segment.versions[HOME, 0] = EMPTY
        self._move(weights)
        shares = read([fingerprint(self._homes[spec.key]) for spec in layout.specs])
        segment.proofs[HOME, 0] = [shares, [spec.num_bytes for spec in layout.specs]]
        segment.versions[HOME, 0] = word(version)
        return self._address

    @torch.no_grad()
    def _move(self, weights: Mapping[str, Tensor]) -> None:
        """Moves weights with other memory into place, which are all weights at first, and samples."""
        layout = self._plan.layouts[0]
        if not self._homes:
            self._homes = self._segments[0].tensors[HOME]
            if self._device.type == "cuda":
                flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
                self._homes, (place,) = views(layout, flat), self._address.places.values()
                _own[place] = flat
                self._address = replace(self._address, places={layout.digest: f"{place} {_handle_of(flat).hex()}"})
            self._address = replace(self._address, transport=IN_PLACE)
        for spec in layout.specs:
            weight, home = weights[spec.name], self._homes[spec.key]
            if weight.dtype != home.dtype:
                raise ConfigError(
                    f"weight_sync.transport = 'in_place': the trainer keeps {spec.name} in {weight.dtype} and "
                    f"generators want {home.dtype}; use 'auto'"
                )
            if weight.data_ptr() != home.data_ptr():
                home.copy_(weight)
                weight.data = home

    def close(self) -> None:
        for place in self._address.places.values():
            _own.pop(place.partition(" ")[0], None)
        self._homes = {}
        super().close()


class InPlaceSubscriber(SharedMemorySubscriber):
    """Verifies the trainer's weights. `fetch` copies nothing."""

    def _open(self, address: Address) -> SlotMemory:
        if self._segment is None:
            place, _, handle = self.place_in(address).partition(" ")
            segment = super()._open(replace(address, places={self.layout.digest: place}))
            if handle:
                flat = _own[place] if _is_own(place) else _opened(bytes.fromhex(handle))
                segment.tensors[HOME] = views(self.layout, flat)
        assert self._segment is not None
        return self._segment


def _is_own(place: str) -> bool:
    return place.startswith(f"/proc/{os.getpid()}/")


def _handle_of(flat: Tensor) -> bytes:
    """Returns the handle by which another process opens memory of a GPU, as text."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(flat)
    return buffer.getvalue()


def _opened(handle: bytes) -> Tensor:
    """Opens a handle. Raises TransferFailed if the driver does not allow it."""
    try:
        return ForkingPickler.loads(handle)
    except RuntimeError as error:
        raise TransferFailed(f"memory of the trainer's GPU cannot be opened: {error}") from error
