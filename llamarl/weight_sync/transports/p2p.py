"""Across hosts: each trainer rank sends its parts straight to the generator ranks that need them.

A trainer and a generator rank form a pair beside their own worlds. A failure ends only that pair; the next fetch forms
another. Publishing copies the parts, packed, into a slot; a thread per generator rank sends from it what is asked for,
in buckets, so the trainer waits for nobody.

With `delta` on both sides a generator rank says which version it fetched last, its base, and is sent what changed since
then if that version still lies in a slot. What it makes of them is proved like everything else; what fails is sent
once more, whole.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarl.distributed import links
from llamarl.distributed.pair import Pair
from llamarl.distributed.rendezvous import Rendezvous
from llamarl.weight_sync.base import Superseded, TransferFailed, part_of
from llamarl.weight_sync.buckets import Bucket, changes, changes_bytes, into_buckets, packed, wanted
from llamarl.weight_sync.copying import NOTHING, CopyingSubscriber, Request
from llamarl.weight_sync.layout import Address, TensorSpec
from llamarl.weight_sync.packed import POLL_S, PackedPublisher, Slot

MAX_THREADS = 8
"""Trainer ranks that a generator rank receives from at once."""
MAX_SENDS = 4
"""Buckets that are on their way to a generator rank at once."""
BROKEN = (*links.BROKEN, RuntimeError)
"""What a pair does when the other process dies, hangs, or is none of ours."""


class P2pPublisher(PackedPublisher):
    """A trainer rank: a thread per generator rank sends from a slot in this machine's memory."""

    TRANSPORT, TAKES_DELTA = "p2p", True

    def _serve(self, connection: Connection, digest: str) -> None:
        number, name = self._numbers[digest], secrets.token_hex(8)
        connection.send((name, self._plan.parts[number]))
        with suppress(*BROKEN):
            pair = Pair(connection, self._store.rendezvous, name, 0, self._timeout_s)
            with closing(pair):
                while not self._closed:
                    if connection.poll(POLL_S):
                        self._send(pair, number, *connection.recv())

    def _send(self, pair: Pair, number: int, version: int, tensors: list[int] | None, base: int | None) -> None:
        works = deque[Any]()
        since = self._slots.get(base) if self._delta and base is not None else None
        for piece in self._pieces(number, self._slots.get(version), tensors, since):
            works.append(pair.send(piece))
            if len(works) > MAX_SENDS:
                works.popleft().wait()
        for work in works:
            work.wait()

    def _pieces(self, number: int, slot: Slot | None, tensors: list[int] | None, base: Slot | None) -> Iterator[Tensor]:
        """The head (whether it is there, whether changes follow, proofs), then the buckets or the changes in them."""
        layout = self._plan.layouts[number]
        head = np.zeros(2 + 2 * len(layout.specs), np.int64)
        if slot is not None:
            head[0], head[1], head[2:] = 1, base is not None, slot.proofs[number].view(np.int64).reshape(-1)
        yield torch.from_numpy(head)
        if slot is None:
            return
        for bucket in wanted(self._buckets[number], tensors):
            if base is None:
                yield slot.flats[number][bucket.start : bucket.start + bucket.num_bytes]
            else:
                yield from changes(layout, slot.flats[number], base.flats[number], bucket)


class P2pSubscriber(CopyingSubscriber):
    """A generator rank: asks every trainer rank for its parts, several at once."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        rank: int,
        delta: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(specs, rank, delta)
        self._timeout_s = timeout_s
        self._writers = dict[int, tuple[Pair, tuple[Bucket, ...]]]()
        """Trainer ranks that this rank is paired with, and what each sends."""

    def receive(self, request: Request, address: Address) -> tuple[np.ndarray, int]:
        places = [Rendezvous(place, address.publisher) for place in self.place_in(address).split(",")]
        with ThreadPoolExecutor(min(MAX_THREADS, len(places)), "weight-receiver") as pool:
            jobs = [pool.submit(self._pull_from, rank, place, request) for rank, place in enumerate(places)]
        proofs, sizes = zip(*(job.result() for job in jobs), strict=True)
        return np.stack(proofs), sum(sizes)

    def _pull_from(self, rank: int, place: Rendezvous, request: Request) -> tuple[np.ndarray, int]:
        """From one trainer rank. A pair that has broken since the last time is formed anew."""
        is_used = rank in self._writers
        try:
            return self._receive(rank, place, request)
        except Superseded:
            raise
        except BROKEN as error:
            if (broken := self._writers.pop(rank, None)) is not None:
                broken[0].close()
            if is_used:
                return self._pull_from(rank, place, request)
            what = f"version {request.version} from trainer rank {rank} at {place.address}"
            raise TransferFailed(f"generator rank {self.rank} did not get {what}: {error}") from error

    def _receive(self, rank: int, place: Rendezvous, request: Request) -> tuple[np.ndarray, int]:
        if rank not in self._writers:
            self._writers[rank] = self._pair_with(place)
        pair, buckets = self._writers[rank]
        pair.connection.send((request.version, request.only, request.base.version))
        head = torch.empty(2 + 2 * len(self.layout.specs), dtype=torch.int64)
        pair.receive(head).wait()
        is_there, are_changes, *proof = head.tolist()
        if not is_there:
            raise Superseded(f"version {request.version} is no longer at trainer rank {rank}")
        receive = self._receive_changes if are_changes else self._receive_buckets
        num_bytes = receive(pair, wanted(buckets, request.only), request)
        return np.array(proof, np.int64).view(np.uint64).reshape(2, -1), num_bytes

    def _pair_with(self, rendezvous: Rendezvous) -> tuple[Pair, tuple[Bucket, ...]]:
        connection = rendezvous.connect(self.layout.digest, self._timeout_s)
        name, parts = connection.recv()
        pair = Pair(connection, rendezvous, name, 1, self._timeout_s)
        return pair, into_buckets(self.layout, parts)

    def _receive_buckets(self, pair: Pair, buckets: Sequence[Bucket], request: Request) -> int:
        """Receives one bucket while the one before is put in place."""
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        scratch = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        works = list[Any]()
        for number, bucket in enumerate((*buckets, None)):
            if bucket is not None:
                works.append(pair.receive(scratch[number % 2][: bucket.num_bytes]))
            if number:
                works[number - 1].wait()
                self._put(buckets[number - 1], scratch[(number - 1) % 2], request.tensors)
        return sum(bucket.num_bytes for bucket in buckets)

    def _receive_changes(self, pair: Pair, buckets: Sequence[Bucket], request: Request) -> int:
        """Applies what arrives to copies of the base's parts."""
        num_bytes = 0
        for bucket in buckets:
            numbers = torch.empty(len(bucket.parts), dtype=torch.int64)
            pair.receive(numbers).wait()
            sizes = changes_bytes(self.layout, bucket, numbers.tolist())
            message = torch.empty(sum(sizes), dtype=torch.uint8)
            pair.receive(message).wait()
            num_bytes += numbers.nbytes + message.nbytes
            pieces = message.split_with_sizes(sizes)
            for (part, _), number, piece in zip(bucket.parts, numbers.tolist(), pieces, strict=True):
                self.put(request, part, number, piece)
        return num_bytes

    def _put(self, bucket: Bucket, scratch: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for part, start in bucket.parts:
            part_of(self.layout, tensors, part).copy_(packed(self.layout, scratch, part, start - bucket.start))

    def close(self) -> None:
        for pair, _ in self._writers.values():
            pair.close()
        self._writers, self._base = {}, NOTHING
