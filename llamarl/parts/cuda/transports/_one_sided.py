"""What transports have in common in which generator ranks read trainer ranks' memory themselves.

Where a version is, and whether it still was there when it had been read, is said by a connection whose ends have proved
that they know the secret. A transport adds how memory is described, and how it is read.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from llamarl.config.errors import ConfigError
from llamarl.distributed import links
from llamarl.distributed.links import Rendezvous
from llamarl.weight_sync.base import (
    POLL_S,
    Bucket,
    CopyingSubscriber,
    PackedPublisher,
    Room,
    Slot,
    Superseded,
    TransferFailed,
    VersionRequest,
    into_buckets,
)
from llamarl.weight_sync.layout import Address, TensorSpec

EXPANDABLE = "expandable_segments:true"


def check_allocator(transport: str) -> None:
    """Raises ConfigError if torch allocates memory on GPUs that other processes cannot open."""
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if EXPANDABLE in os.environ.get(variable, "").replace(" ", "").lower():
            raise ConfigError(
                f"weight_sync.transport = {transport!r} with {variable}=expandable_segments:True: such memory has no "
                "CUDA IPC handle; leave it out of the variable"
            )


class PublishedAt(NamedTuple):
    """Place of a version in the memory of a trainer rank."""

    memory: Any
    """What a reader must know of the packed parts' memory."""
    proof: np.ndarray
    """uint64 [2, tensors]"""


class OneSidedPublisher(PackedPublisher):
    """A trainer rank. A thread per generator rank says where versions are."""

    ON_DEVICE, BUCKET_BYTES = True, 256 << 20  # each piece costs launches and calls on both sides

    @abstractmethod
    def _memory(self, slot: Slot, number: int) -> Any:
        """Returns `PublishedAt.memory` of one layout."""

    def _reads(self, change: int) -> None:
        """Counts readers: 1 when a read begins, -1 when it ends."""

    def _serve(self, connection: Connection, digest: str) -> None:
        number = self._numbers[digest]
        make_current(self._device)
        connection.send(self._plan.parts[number])
        while not self._closed:
            if not connection.poll(POLL_S):
                continue
            version = connection.recv()
            if (slot := self._slots.get(version)) is None:
                connection.send(None)
                continue
            connection.send(PublishedAt(self._memory(slot, number), slot.proofs[number].copy()))
            self._reads(1)
            try:
                while not self._closed and not connection.poll(POLL_S):
                    pass
                connection.recv()  # it has read
            finally:
                self._reads(-1)
            connection.send(self._slots.get(version) is slot)


class Writer:
    """A trainer rank, to a generator rank."""

    def __init__(self, connection: Connection, buckets: tuple[Bucket, ...]) -> None:
        self.connection, self.buckets = connection, buckets
        self.agent = ""
        """Its name in the transport's library, once something was read from it."""


class OneSidedSubscriber(CopyingSubscriber):
    """A generator rank: reads from all trainer ranks at once."""

    PUBLISHER: ClassVar[type[OneSidedPublisher]]
    BROKEN: ClassVar[tuple[type[Exception], ...]] = links.BROKEN
    """What says that a trainer rank is gone, or a read has failed."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        rank: int,
        delta: bool = False,
        room: Room | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(specs, rank, delta, room)
        self._timeout_s = timeout_s
        self._writers = list[Writer]()

    @abstractmethod
    def _read(self, request: VersionRequest, there: Sequence[tuple[Writer, PublishedAt]]) -> int:
        """Fills the tensors. Returns the number of received bytes."""

    def _connected(self, connection: Connection) -> None:
        """Is called with each new connection."""

    def receive(self, request: VersionRequest, address: Address) -> tuple[np.ndarray, int]:
        places = [Rendezvous(place, address.publisher) for place in self.place_in(address).split(",") if place]
        is_used = bool(self._writers)
        try:
            return self._receive(request, places)
        except self.BROKEN as error:
            self._leave()
            if is_used:  # broken since the last time
                return self.receive(request, address)
            what = f"version {request.version} from the trainer ranks at {', '.join(place.address for place in places)}"
            raise TransferFailed(f"generator rank {self.rank} did not get {what}: {error}") from error

    def _receive(self, request: VersionRequest, places: Sequence[Rendezvous]) -> tuple[np.ndarray, int]:
        while len(self._writers) < len(places):
            connection = places[len(self._writers)].connect(self.layout.digest, self._timeout_s)
            self._connected(connection)
            buckets = into_buckets(self.layout, connection.recv(), self.PUBLISHER.BUCKET_BYTES)
            self._writers.append(Writer(connection, buckets))
        founds = self._ask(self._writers, request.version)
        there = [(writer, found) for writer, found in zip(self._writers, founds, strict=True) if found]
        num_bytes = self._read(request, there) if len(there) == len(founds) else 0
        still = self._ask([writer for writer, _ in there], None)
        if not all(still) or len(there) < len(founds):
            raise Superseded(f"version {request.version} is no longer at all trainer ranks")
        return np.stack([found.proof for _, found in there]), num_bytes

    def _ask(self, writers: Sequence[Writer], version: int | None) -> list[Any]:
        """Asks all where a version is; None: whether it still was when it had been read."""
        for writer in writers:
            writer.connection.send(version)
        answers, deadline_s = list[Any](), time.monotonic() + self._timeout_s
        for writer in writers:
            if not writer.connection.poll(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError(f"no answer in {self._timeout_s:g} s")
            answers.append(writer.connection.recv())
        return answers

    def _leave(self) -> None:
        for writer in self._writers:
            writer.connection.close()
        self._writers = []

    def close(self) -> None:
        self._leave()


def make_current(device: torch.device) -> None:
    """Copies run in the CUDA context of the thread that asks for them, and a thread begins without one."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.cuda.current_stream().synchronize()
