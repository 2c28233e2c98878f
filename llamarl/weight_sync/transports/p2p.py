"""Across hosts: each trainer rank sends its parts straight to the generator ranks that need them.

A trainer and a generator rank form a pair beside their own worlds. A failure ends only that pair; the next fetch forms
another. Publishing copies the parts, packed, into a slot; a thread per generator rank sends from it what is asked for,
in buckets, so the trainer waits for nobody.

With `delta` on both sides a generator rank says which version it fetched last, its base, and is sent what changed since
then if that version still lies in a slot. What it makes of them is proved like everything else; what fails is sent
once more, whole.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.distributed.links import accept, connect
from llamarl.sharding.box import Box
from llamarl.weight_sync.base import (
    CPU,
    Exchange,
    Part,
    Publisher,
    SlotTable,
    Superseded,
    TransferFailed,
    WriterPlan,
    part_of,
)
from llamarl.weight_sync.buckets import Bucket, changes, changes_bytes, into_buckets, packed, wanted
from llamarl.weight_sync.copying import NOTHING, CopyingSubscriber, Request
from llamarl.weight_sync.layout import Address, TensorSpec
from llamarl.weight_sync.pair import MAX_MESSAGE_BYTES, form_group

NUM_SLOTS = 16
MAX_THREADS = 8
"""Trainer ranks that a generator rank receives from at once."""
MAX_SENDS = 4
"""Buckets that are on their way to a generator rank at once."""
POLL_S = 0.2
"""Idle threads look this often whether the publisher was closed."""
BROKEN = (OSError, EOFError, RuntimeError, AuthenticationError)
"""What a pair does when the other process dies, hangs, or is none of ours."""


@dataclass(slots=True)
class _Slot:
    """One version of what a trainer rank sends."""

    version: int | None
    """None before the first one."""
    flats: list[Tensor]
    """Packed parts for each layout."""
    proofs: list[np.ndarray]
    """[2, tensors] for each layout."""


class P2pPublisher(Publisher):
    """A trainer rank. It and gloo listen at `host` only."""

    TAKES_DELTA = True

    def __init__(
        self,
        plan: WriterPlan,
        exchange: Exchange,
        folder: Path | None = None,
        *,
        host: str = "127.0.0.1",
        device: torch.device = CPU,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(plan, exchange, folder, **options)
        self._host, self._device, self._timeout_s = host, device, timeout_s
        self._table = SlotTable(NUM_SLOTS)
        self._slots: list[_Slot | None] = [None] * NUM_SLOTS
        self._buckets = [into_buckets(layout, parts) for layout, parts in zip(plan.layouts, plan.parts, strict=True)]
        self._numbers = {layout.digest: number for number, layout in enumerate(plan.layouts)}
        self._closed = False
        self._listener = socket.create_server((host, 0))
        ranks = exchange((secrets.token_hex(16), f"{host}:{self._listener.getsockname()[1]}"))
        places = ",".join(place for _, place in ranks)
        self._address = Address(
            transport="p2p",
            publisher=ranks[0][0],
            num_writers=plan.num_writers,
            places={layout.digest: places for layout in plan.layouts},
        )
        self._threads = [threading.Thread(target=self._listen, name="weight-listener", daemon=True)]
        self._threads[0].start()

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        plan, number = self._plan, self._table.claim(version, in_use)
        slot = self._slots[number] or self._new_slot()
        self._slots[number] = None  # not to be found while it changes
        for index, layout in enumerate(plan.layouts):
            slot.proofs[index][:] = 0
            places = (place for bucket in self._buckets[index] for place in bucket.parts)
            targets = ((part, packed(layout, slot.flats[index], part, start)) for part, start in places)
            plan.write(index, version, weights, targets, slot.proofs[index], self._power_of_two)
        slot.version = version
        self._slots[number] = slot
        self._table.settle(number, version)
        return self._address

    def _new_slot(self) -> _Slot:
        sizes = [sum(bucket.num_bytes for bucket in buckets) for buckets in self._buckets]
        return _Slot(
            version=None,
            flats=[torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes],
            proofs=[np.zeros((2, len(layout.specs)), np.uint64) for layout in self._plan.layouts],
        )

    def _listen(self) -> None:
        self._listener.settimeout(POLL_S)
        while not self._closed:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._serve, args=(accepted,), daemon=True))
            self._threads[-1].start()

    def _serve(self, accepted: socket.socket) -> None:
        """One generator rank, until it is gone."""
        try:
            with accept(accepted, self._address.publisher, self._timeout_s) as connection:
                number = self._numbers[connection.recv_bytes(MAX_MESSAGE_BYTES).decode()]
                boxes = [(part.tensor, part.box.starts, part.box.stops) for part in self._plan.parts[number]]
                connection.send_bytes(json.dumps(boxes).encode())
                group = form_group(connection, 0, self._host, self._device, self._timeout_s)
                while not self._closed:
                    if connection.poll(POLL_S):
                        self._send(group, number, *json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES)))
        except BROKEN:  # it connects again if it still wants something
            return

    def _send(self, group: Any, number: int, version: int, tensors: list[int] | None, base: int | None) -> None:
        works = deque[Any]()
        since = self._slot_of(base) if self._delta and base is not None else None
        for piece in self._pieces(number, self._slot_of(version), tensors, since):
            works.append(group.send([piece], 1, 0))
            if len(works) > MAX_SENDS:
                works.popleft().wait(timedelta(seconds=self._timeout_s))
        for work in works:
            work.wait(timedelta(seconds=self._timeout_s))

    def _slot_of(self, version: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot is not None and slot.version == version), None)

    def _pieces(
        self, number: int, slot: _Slot | None, tensors: list[int] | None, base: _Slot | None
    ) -> Iterator[Tensor]:
        """The head (whether it is there, whether changes follow, proofs), then the buckets or the changes in them."""
        layout = self._plan.layouts[number]
        head = np.zeros(2 + 2 * len(layout.specs), np.int64)
        if slot is not None:
            head[0], head[1], head[2:] = 1, base is not None, slot.proofs[number].view(np.int64).reshape(-1)
        yield torch.from_numpy(head).to(self._device)
        if slot is None:
            return
        for bucket in wanted(self._buckets[number], tensors):
            if base is None:
                yield slot.flats[number][bucket.start : bucket.start + bucket.num_bytes]
            else:
                yield from changes(layout, slot.flats[number], base.flats[number], bucket)

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join(5 * POLL_S)
        self._listener.close()
        self._slots = []


@dataclass(slots=True)
class _Writer:
    """A trainer rank that this generator rank is paired with."""

    connection: Connection
    group: Any
    buckets: tuple[Bucket, ...]


class P2pSubscriber(CopyingSubscriber):
    """A generator rank: asks every trainer rank for its parts, several at once."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        rank: int,
        delta: bool = False,
        host: str = "127.0.0.1",
        device: torch.device = CPU,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(specs, rank, delta, device)
        self._host, self._timeout_s = host, timeout_s
        self._publisher = ""
        self._writers = dict[int, _Writer]()

    def receive(self, request: Request, address: Address) -> tuple[np.ndarray, np.ndarray]:
        if self._publisher != address.publisher:
            self.close()
            self._publisher = address.publisher
        places = self.place_in(address).split(",")
        with ThreadPoolExecutor(min(MAX_THREADS, len(places)), "weight-receiver") as pool:
            jobs = [pool.submit(self._pull_from, rank, place, request) for rank, place in enumerate(places)]
        proofs, counts = zip(*(job.result() for job in jobs), strict=True)
        return np.stack(proofs), np.sum(counts, axis=0)

    def _pull_from(self, rank: int, place: str, request: Request) -> tuple[np.ndarray, tuple[int, int]]:
        """From one trainer rank. A pair that has broken since the last time is formed anew."""
        is_used = rank in self._writers
        try:
            return self._receive(rank, place, request)
        except Superseded:
            raise
        except BROKEN as error:
            if (broken := self._writers.pop(rank, None)) is not None:
                broken.connection.close()
            if is_used:
                return self._pull_from(rank, place, request)
            what = f"version {request.version} from trainer rank {rank} at {place}"
            raise TransferFailed(f"generator rank {self.rank} did not get {what}: {error}") from error

    def _receive(self, rank: int, place: str, request: Request) -> tuple[np.ndarray, tuple[int, int]]:
        if rank not in self._writers:
            self._writers[rank] = self._pair_with(place)
        writer, timeout = self._writers[rank], timedelta(seconds=self._timeout_s)
        writer.connection.send_bytes(json.dumps((request.version, request.only, request.base.version)).encode())
        head = torch.empty(2 + 2 * len(self.layout.specs), dtype=torch.int64, device=self._device)
        writer.group.recv([head], 0, 0).wait(timeout)
        is_there, are_changes, *proof = head.tolist()
        if not is_there:
            raise Superseded(f"version {request.version} is no longer at trainer rank {rank}")
        buckets = wanted(writer.buckets, request.only)
        receive = self._receive_changes if are_changes else self._receive_buckets
        counts = receive(writer.group, buckets, request, timeout)
        return np.array(proof, np.int64).view(np.uint64).reshape(2, -1), counts

    def _pair_with(self, place: str) -> _Writer:
        connection = connect(place, self._publisher, self._timeout_s)
        connection.send_bytes(self.layout.digest.encode())
        boxes = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
        parts = [Part(tensor=index, box=Box(tuple(starts), tuple(stops))) for index, starts, stops in boxes]
        group = form_group(connection, 1, self._host, self._device, self._timeout_s)
        return _Writer(connection=connection, group=group, buckets=into_buckets(self.layout, parts))

    def _receive_buckets(
        self, group: Any, buckets: Sequence[Bucket], request: Request, timeout: timedelta
    ) -> tuple[int, int]:
        """Receives one bucket while the one before is put in place."""
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        scratch = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        works = list[Any]()
        for number, bucket in enumerate((*buckets, None)):
            if bucket is not None:
                works.append(group.recv([scratch[number % 2][: bucket.num_bytes]], 0, 0))
            if number:
                works[number - 1].wait(timeout)
                self._put(buckets[number - 1], scratch[(number - 1) % 2], request.tensors)
        num_elements = sum(self._num_elements(part) for bucket in buckets for part, _ in bucket.parts)
        return sum(bucket.num_bytes for bucket in buckets), num_elements

    def _receive_changes(
        self, group: Any, buckets: Sequence[Bucket], request: Request, timeout: timedelta
    ) -> tuple[int, int]:
        """Applies what arrives to copies of the base's parts."""
        num_bytes, num_changed = 0, 0
        for bucket in buckets:
            numbers = torch.empty(len(bucket.parts), dtype=torch.int64, device=self._device)
            group.recv([numbers], 0, 0).wait(timeout)
            sizes = changes_bytes(self.layout, bucket, numbers.tolist())
            message = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            group.recv([message], 0, 0).wait(timeout)
            num_bytes += numbers.nbytes + message.nbytes
            pieces = message.split_with_sizes(sizes)
            for (part, _), number, piece in zip(bucket.parts, numbers.tolist(), pieces, strict=True):
                self.put(request, part, number, piece)
                num_changed += number
        return num_bytes, num_changed

    def _num_elements(self, part: Part) -> int:
        return math.prod(self.layout.specs[part.tensor].shape_of(part.box))

    def _put(self, bucket: Bucket, scratch: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for part, start in bucket.parts:
            part_of(self.layout, tensors, part).copy_(packed(self.layout, scratch, part, start - bucket.start))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.connection.close()
        self._writers, self._publisher, self._base = {}, "", NOTHING
