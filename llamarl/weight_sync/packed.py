"""`PackedPublisher`: keeps what each generator rank is sent, packed, in slots; how it gets there is the transport's."""

from __future__ import annotations

import mmap
import secrets
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from llamarl.distributed.links import weights_address
from llamarl.distributed.rendezvous import RendezvousStore
from llamarl.weight_sync.base import CPU, Exchange, NoFreeSlot, Publisher, WriterPlan, cuda
from llamarl.weight_sync.buckets import BUCKET_BYTES, into_buckets, packed
from llamarl.weight_sync.layout import Address

MAX_SLOTS = 16
"""Two are used while generators keep up."""
POLL_S = 0.2
"""Idle threads look this often whether the publisher was closed."""


@dataclass(slots=True)
class Slot:
    """Memory for one version of what a trainer rank sends."""

    flats: list[Tensor]
    """Packed parts for each layout."""
    proofs: list[np.ndarray]
    """[2, tensors] for each layout."""


class PackedPublisher(Publisher):
    """A trainer rank. It listens at one address; generator ranks come there, and prove that they know the secret."""

    TRANSPORT: ClassVar[str]
    """Its name."""
    BUCKET_BYTES: ClassVar[int] = BUCKET_BYTES
    """Size of what is sent at once, in bytes; both ends cut alike."""

    def __init__(
        self,
        plan: WriterPlan,
        exchange: Exchange,
        folder: Path | None = None,
        *,
        host: str = "",
        **options: Any,
    ) -> None:
        """
        Args:
            host: an address of this machine that generators can reach; empty: where this process listens.
        """
        super().__init__(plan, exchange, folder, **options)
        self._slots = dict[int, Slot]()
        """Slots by version."""
        self._buckets = [
            into_buckets(layout, parts, self.BUCKET_BYTES)
            for layout, parts in zip(plan.layouts, plan.parts, strict=True)
        ]
        self._numbers = {layout.digest: number for number, layout in enumerate(plan.layouts)}
        self._closed = False
        self._is_pinned = not self.ON_DEVICE and self._device.type == "cuda"
        secret = exchange(secrets.token_hex(16))[0]
        self._store = RendezvousStore(host=host or weights_address(), secret=secret, serve=self._serve)
        with ExitStack() as undo:
            undo.callback(PackedPublisher.close, self)
            able = exchange((self._store.rendezvous.address, [bool(parts) for parts in plan.parts]))
            undo.pop_all()
        self._address = Address(
            transport=self.TRANSPORT,
            publisher=secret,
            num_writers=plan.num_writers,
            places={
                layout.digest: ",".join(place if holds[number] else "" for place, holds in able)
                for number, layout in enumerate(plan.layouts)
            },
        )

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        plan, kept = self._plan, {*in_use, max(self._slots, default=version)}
        free = [self._slots.pop(old) for old in list(self._slots) if old not in kept]
        if len(self._slots) == MAX_SLOTS:
            raise NoFreeSlot(f"no slot for version {version}: versions {[*self._slots]} are in use")
        slot = free[0] if free else self._new_slot()
        for left in free[1:]:
            self._drop(left)
        for index, layout in enumerate(plan.layouts):
            slot.proofs[index][:] = 0
            places = (place for bucket in self._buckets[index] for place in bucket.parts)
            targets = ((part, packed(layout, slot.flats[index], part, start)) for part, start in places)
            plan.write(index, version, weights, targets, slot.proofs[index])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # nobody else knows this stream
        if before := self._slots.get(version):  # published again
            self._drop(before)
        self._slots[version] = slot
        return self._address

    def _new_slot(self) -> Slot:
        sizes = [sum(bucket.num_bytes for bucket in buckets) for buckets in self._buckets]
        device = self._device if self.ON_DEVICE else CPU
        return Slot(
            flats=[
                _pinned(size) if size and self._is_pinned else torch.empty(size, dtype=torch.uint8, device=device)
                for size in sizes
            ],
            proofs=[np.zeros((2, len(layout.specs)), np.uint64) for layout in self._plan.layouts],
        )

    def _drop(self, slot: Slot) -> None:
        """A slot that is not needed any more."""
        for flat in filter(Tensor.numel, slot.flats if self._is_pinned else ()):
            cuda("cudaHostUnregister", flat.data_ptr())

    @abstractmethod
    def _serve(self, connection: Connection, digest: str) -> None:
        """One generator rank, in a thread, until it is gone; it connects again if it still wants something."""

    def close(self) -> None:
        self._closed = True
        self._store.close()
        if self._is_pinned:
            for slot in self._slots.values():
                self._drop(slot)
        self._slots = {}


def _pinned(num_bytes: int) -> Tensor:
    """Memory that a GPU writes into directly; torch's own would round it up to a power of two."""
    flat = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    cuda("cudaHostRegister", flat.data_ptr(), num_bytes, 0)
    return flat
