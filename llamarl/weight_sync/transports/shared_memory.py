"""Transport on one host in CPU memory: trainer ranks write into slots with the generator's layout, generators serve
them.

The slots of a layout are in one memfd. It has no name, so two runs cannot collide. The kernel frees it with the last
process that maps it, even after a SIGKILL. Other processes open it through the `/proc` entry of trainer rank 0. Slots
that were never written take no memory.

    header:  (pid, fd) of every writer | a version word per slot and writer | a proof per slot and writer
    slots:   the tensors of the layout, each slot at a page

A writer sets its word to `word(v, writing=True)`, copies, and sets it to `word(v)`. A version is complete when all
words of a slot say so. A slot is reused only when no generator uses its version, and never while it holds the newest
version. Readers map the memory privately: a stray write in a generator cannot change the weights of others.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from mmap import MAP_PRIVATE, MAP_SHARED, PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.weight_sync.base import (
    Exchange,
    FingerprintMismatch,
    Publisher,
    SlotTable,
    Subscriber,
    Superseded,
    TransferFailed,
    WriterPlan,
    cuda,
    part_of,
    views,
)
from llamarl.weight_sync.layout import Address, Layout, TensorSpec

NUM_SLOTS = 16
"""Slots of each layout. Two are used while generators keep up, and one more for each that hangs. Memory is allocated
when a slot is first written."""
EMPTY = 0
"""Version word of an empty slot; memory begins with zeros."""
MAP_NORESERVE = 0x4000
"""Private mappings are never written, so no memory needs to be reserved for them."""


def word(version: int, *, writing: bool = False) -> int:
    """Returns a writer's version word: the version, and in the lowest bit whether it is still being written."""
    return 2 * (version + 1) - writing


def _versions(words: np.ndarray) -> np.ndarray:
    """Returns versions that writers have begun or finished; -1 means none."""
    return (words + 1) // 2 - 1


class SlotMemory:
    """The mapped memory of one layout."""

    def __init__(self, fd: int, layout: Layout, num_writers: int, flags: int) -> None:
        num_tensors = len(layout.specs)
        words = np.cumsum([0, 2 * num_writers, NUM_SLOTS * num_writers, NUM_SLOTS * num_writers * 2 * num_tensors])
        header_bytes, slot_bytes = (-(-size // PAGESIZE) * PAGESIZE for size in (8 * int(words[-1]), layout.num_bytes))
        self.num_bytes = header_bytes + NUM_SLOTS * slot_bytes
        if flags == MAP_SHARED:
            os.ftruncate(fd, self.num_bytes)
        flat = np.frombuffer(mmap(fd, self.num_bytes, flags=flags), np.uint8)
        homes, versions, proofs = (flat[8 * start : 8 * stop].view(np.int64) for start, stop in pairwise(words))
        self.homes = homes.reshape(num_writers, 2)
        """(pid, fd) of each writer's own handle of this memory."""
        self.versions = versions.reshape(NUM_SLOTS, num_writers)
        self.proofs = proofs.view(np.uint64).reshape(NUM_SLOTS, num_writers, 2, num_tensors)
        starts = range(header_bytes, self.num_bytes, slot_bytes) if slot_bytes else [header_bytes] * NUM_SLOTS
        self.tensors = [views(layout, torch.from_numpy(flat[start : start + slot_bytes])) for start in starts]
        """Tensors of each slot, by key."""

    def slot_of(self, version: int) -> int | None:
        """Returns the slot in which a writer has begun to write `version`. None means no slot."""
        return next((slot for slot in range(NUM_SLOTS) if (_versions(self.versions[slot]) == version).any()), None)

    @property
    def newest(self) -> int:
        """Returns the newest version that a writer has begun to write."""
        return int(_versions(self.versions).max())


class SharedMemoryPublisher(Publisher):
    """Trainer rank 0 creates the memory, and the other ranks attach to it."""

    RANK, NEEDS_SAME_HOST, TRIED_ACROSS_HOSTS, WITHIN_PROCESS = 0, True, False, True

    def __init__(self, plan: WriterPlan, exchange: Exchange, folder: Path | None = None, **options: Any) -> None:
        super().__init__(plan, exchange, folder, **options)
        self._slots, self._pinned = SlotTable(NUM_SLOTS), dict[int, list[int]]()
        """Addresses of slots that a GPU writes into directly."""
        self._fds, self._segments = list[int](), list[SlotMemory]()
        with ExitStack() as undo:
            undo.callback(SharedMemoryPublisher.close, self)
            publisher, places = self._open(exchange)
            undo.pop_all()
        digests = [layout.digest for layout in plan.layouts]
        self._address = Address(
            transport="shared_memory",
            publisher=publisher,
            num_writers=plan.num_writers,
            places=dict(zip(digests, places, strict=True)),
        )

    def _open(self, exchange: Exchange) -> tuple[str, list[str]]:
        """Creates or attaches to the memory. Returns its name and the places of its layouts."""
        plan, pid = self._plan, os.getpid()
        if plan.rank == 0:
            self._fds += (os.memfd_create("llamarl-weights") for _ in plan.layouts)
        publisher, places = exchange((secrets.token_hex(8), [f"/proc/{pid}/fd/{fd}" for fd in self._fds]))[0]
        if plan.rank:
            self._fds += (os.open(place, os.O_RDWR | os.O_CLOEXEC) for place in places)
        for fd, layout in zip(self._fds, plan.layouts, strict=True):
            self._segments.append(segment := SlotMemory(fd, layout, plan.num_writers, MAP_SHARED))
            segment.homes[plan.rank] = pid, fd
            segment.versions[:, plan.rank] = EMPTY
        exchange(None)  # no version is published before every writer's words are set
        return publisher, places

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        plan, slot = self._plan, self._slots.claim(version, in_use)
        if self._device.type == "cuda" and slot not in self._pinned:
            self._pinned[slot] = self._pin(slot)
        for segment in self._segments:
            own = segment.versions[:, plan.rank]
            own[_versions(own) == version] = EMPTY  # published again: readers must find it only here
            segment.versions[slot, plan.rank] = EMPTY  # first, for readers that still verify the previous version
            segment.proofs[slot, plan.rank] = 0
            segment.versions[slot, plan.rank] = word(version, writing=True)
        for number, (segment, layout) in enumerate(zip(self._segments, plan.layouts, strict=True)):
            targets = ((part, part_of(layout, segment.tensors[slot], part)) for part in plan.parts[number])
            plan.write(number, version, weights, targets, segment.proofs[slot, plan.rank])
        for segment in self._segments:  # last, so that generator ranks with different layouts find all or nothing
            segment.versions[slot, plan.rank] = word(version)
        self._slots.mark_written(slot, version)
        return self._address

    def _pin(self, slot: int) -> list[int]:
        places = []
        for segment, layout in zip(self._segments, self._plan.layouts, strict=True):
            places.append(segment.tensors[slot][layout.specs[0].key].data_ptr())
            cuda("cudaHostRegister", places[-1], layout.num_bytes, 0)
        return places

    def close(self) -> None:
        for place in (place for places in self._pinned.values() for place in places):
            cuda("cudaHostUnregister", place)
        self._segments, self._pinned = [], {}
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class SharedMemorySubscriber(Subscriber):
    """Serves from the slot itself: `fetch` copies nothing, and only verifies."""

    def __init__(self, specs: Sequence[TensorSpec], rank: int, delta: bool = False, timeout_s: float = 60.0) -> None:
        super().__init__(specs, rank, delta)
        self._timeout_s = timeout_s
        self._segment: SlotMemory | None = None

    def fetch(self, version: int, address: Address) -> dict[str, Tensor]:
        """Verifies tensors as they arrive, and may begin while writers still write."""
        segment, deadline_s = self._open(address), time.monotonic() + self._timeout_s
        everywhere = segment.versions
        self._wait(segment, everywhere, version, deadline_s, lambda: version in _versions(everywhere), "begin")
        slot = segment.slot_of(version)
        if slot is None:
            raise Superseded(f"version {version} was overwritten before it was fetched")
        words, proofs, tensors = segment.versions[slot], segment.proofs[slot], segment.tensors[slot]

        def finished() -> bool:
            return bool((words == word(version)).all())

        def await_tensor(index: int) -> None:
            spec = self.layout.specs[index]

            def arrived() -> bool:
                begun = (_versions(words) == version).all()  # otherwise the proofs are those of an older version
                return finished() or bool(begun and proofs[:, 1, index].sum() == spec.num_bytes)

            self._wait(segment, words, version, deadline_s, arrived, f"write {spec.key}")

        try:
            self.prove(tensors, version, proofs, await_tensor)
            self._wait(segment, words, version, deadline_s, finished, "finish")
        except FingerprintMismatch:
            if finished():
                raise
        if not finished():
            raise Superseded(f"version {version} was overwritten while it was fetched")
        return dict(tensors)

    def close(self) -> None:
        self._segment = None

    def _open(self, address: Address) -> SlotMemory:
        if self._segment is None:
            place = self.place_in(address)
            try:
                fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise TransferFailed(f"the trainer's memory at {place} cannot be opened: {error.strerror}") from error
            try:
                self._segment = SlotMemory(fd, self.layout, address.num_writers, MAP_PRIVATE | MAP_NORESERVE)
            finally:
                os.close(fd)
        return self._segment

    def _wait(
        self, segment: SlotMemory, words: np.ndarray, version: int, deadline_s: float, there: Callable[[], bool],
        what: str,
    ) -> None:  # fmt: skip
        """Raises if a version can no longer come. `words` are those of the slots in which it may come."""
        pause_s = 1e-4
        while not there():
            # In this order, or the version may begin in between. The same version may be published again, into another
            # slot.
            if segment.newest >= version and version not in _versions(words):
                raise Superseded(
                    f"wanted version {version}, the trainer is at {segment.newest}, or writes that version again"
                )
            waited = f"generator rank {self.rank} waited for the trainer to {what} (version {version})"
            if dead := [pid for pid, fd in segment.homes.tolist() if not Path(f"/proc/{pid}/fd/{fd}").exists()]:
                raise TransferFailed(f"{waited}, but process {dead[0]} is gone")
            if time.monotonic() > deadline_s:
                raise TransferFailed(f"{waited} for {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
