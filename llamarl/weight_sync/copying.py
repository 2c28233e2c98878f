"""`CopyingSubscriber`: for transports that bring bytes to the reader, whole or as changes to what it has."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import torch
from torch import Tensor

from llamarl.weight_sync.base import FingerprintMismatch, Subscriber, WrittenBox, part_of, views
from llamarl.weight_sync.delta import decode
from llamarl.weight_sync.layout import Address, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A fetched version to which changes are applied."""

    version: int | None
    """None: there is none."""
    tensors: Mapping[str, Tensor]


NOTHING = Base(version=None, tensors={})


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRequest:
    """Version and tensors that a copying subscriber wants of every trainer rank."""

    version: int
    tensors: Mapping[str, Tensor]
    """Tensors to be filled, by key."""
    base: Base
    only: list[int] | None = None
    """Positions of the tensors that are wanted; None: all."""


Room = Callable[[], Mapping[str, Tensor]]
"""Tensors to fill with the next version, by key: views of one flat buffer that is laid out as the subscriber's."""


class CopyingSubscriber(Subscriber):
    """One that fills memory of its own. What does not prove right is asked for once more, whole."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, delta: bool = False, room: Room | None = None) -> None:
        super().__init__(specs, rank, delta)
        self._base = NOTHING
        self._room = room or self._own_room
        self._buffers = Buffers(self.layout.num_bytes)

    def _own_room(self) -> Mapping[str, Tensor]:
        return views(self.layout, self._buffers.take())

    @abstractmethod
    def receive(self, request: VersionRequest, address: Address) -> tuple[np.ndarray, int]:
        """Fills `request.tensors`.

        Returns:
            The proofs of all writers, uint64 [writers, 2, tensors], and how many bytes came.

        Raises:
            Superseded, TransferFailed: as `fetch` does.
        """

    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        request = VersionRequest(version=version, tensors=self._room(), base=self._base)
        proofs, self.received_bytes = self.receive(request, address)
        try:
            self.prove(request.tensors, version, proofs)
        except FingerprintMismatch:
            damaged = self._damaged(request, proofs)
            proofs, again = self.receive(replace(request, base=NOTHING, only=damaged), address)
            self.prove(request.tensors, version, proofs)
            self.received_bytes += again
        if self._delta:
            self._base = Base(version=version, tensors=request.tensors)
        return dict(request.tensors)

    def _damaged(self, request: VersionRequest, proofs: np.ndarray) -> list[int]:
        found = list[int]()
        for index, spec in enumerate(self.layout.specs):
            try:
                self.prove_tensor(index, request.tensors[spec.key], request.version, proofs)
            except FingerprintMismatch:
                found.append(index)
        return found

    def put(self, request: VersionRequest, part: WrittenBox, number: int, message: Tensor) -> None:
        """Fills a part from a message of `delta.encode`: `number` changes of the base, or all elements."""
        target, base = part_of(self.layout, request.tensors, part), request.base.tensors
        held = part_of(self.layout, base, part) if base else target
        with suppress(ValueError):  # what does not fit is left out; the fingerprint tells, and it is sent again
            target.copy_(decode(held, number, message))


class Buffers:
    """Memory for versions that are copied to the reader. A buffer is used again once no tensor over it is left."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = max(num_bytes, 1)
        self._free = list[mmap]()

    def take(self) -> Tensor:
        """A flat buffer of bytes, with any content."""
        memory = self._free.pop() if self._free else _mapped(self._num_bytes)
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.append, memory)
        return torch.from_numpy(array)


def _mapped(num_bytes: int) -> mmap:
    """Memory in large pages where the system has them: what is written once per version costs a tenth less."""
    memory = mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    return memory
