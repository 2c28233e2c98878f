"""Transport across hosts: each trainer rank sends its parts directly to the generator ranks that need them, or to a
relay.

A generator rank connects to each trainer rank, several times if there are few, because one stream does not fill a fast
network. A failure ends only its stream; the next fetch opens another. Publishing copies the packed parts into a slot. A
thread per stream sends the requested buckets from the slot, so the trainer never waits for a reader. Generator ranks on
other hosts than the trainer's forward what they have (`relays.py`).

With `delta` on both sides, a generator rank sends its base, which is the version that it fetched last. If that version
is still in a slot, the trainer rank itself sends the changes since. The result is verified like all tensors; damaged
parts are sent once more, whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llamarl.distributed.links import (
    BROKEN,
    LOST_S,
    Rendezvous,
    has_slowed,
    keep_pace,
    notice_loss,
    receive,
    send,
    weights_address,
)
from llamarl.net.reasons import plain
from llamarl.weight_sync.base import (
    NOTHING,
    POLL_S,
    Bucket,
    CopyingSubscriber,
    PackedPublisher,
    Slot,
    Superseded,
    TransferFailed,
    VersionRequest,
    changes,
    changes_bytes,
    into_buckets,
    memory_of,
    pieces,
    wanted,
)
from llamarl.weight_sync.layout import Address, TensorSpec
from llamarl.weight_sync.relays import TIRED_VERSIONS, Chains, Relay, host_of

MAX_THREADS = 16
"""Streams that a generator rank receives at once."""
MAX_KEPT = 512
"""Streams that a generator rank keeps for the next version. Each takes a descriptor."""
AGAIN_S = 10.0
"""Least seconds between two reopenings of a stream whose round trip becomes long."""
NO_BYTES = torch.empty(0, dtype=torch.uint8)


def streams_from_each(num_trainers: int) -> int:
    """Returns the number of streams from each trainer rank that has parts for a generator rank. One stream does not
    fill a fast network: from one rank to one, a stream carries 3.2 GB/s of 5.9, two carry 6.2 and four no more (2
    cores, network namespaces)."""
    return 2 if 2 * num_trainers <= MAX_THREADS else 1


class WantedStream(NamedTuple):
    """Request of a generator rank to a trainer rank on one of its streams."""

    version: int
    stream: int
    num_streams: int
    """Streams from one trainer rank. Each carries every `num_streams`-th bucket."""
    only: list[int] | None = None
    """Positions of the requested tensors. None means all."""
    base: int | None = None
    """Version to which changes can be applied. None means that the whole tensors are requested."""
    first: int = 0
    """Number of the stream's buckets that came from a relay."""
    place: str = ""
    """Place where the generator rank forwards. Empty means that it does not use relays."""
    left: tuple[str, int] | None = None
    """A relay that failed, and the number of versions for which others should not use it. None means that no relay
    failed."""

    def of(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Returns the buckets to send."""
        return wanted(buckets, self.only)[self.stream :: self.num_streams][self.first :]


class Answer(NamedTuple):
    """Answer of a trainer rank, before its buckets."""

    is_there: bool
    are_changes: bool = False
    proof: np.ndarray | None = None
    """uint64 [2, tensors]. None means that the version is not available."""
    relay: str = ""
    """Place of the relay that sends the buckets. Empty means that they follow here."""
    pace_s: float | None = None
    """Seconds per byte of the trainer rank. None means unknown."""


class P2pPublisher(PackedPublisher):
    """A thread per stream sends from a slot in this machine's memory."""

    TRANSPORT, TAKES_DELTA = "p2p", True

    def __init__(self, *args: Any, **options: Any) -> None:
        self._chains = Chains()
        super().__init__(*args, **options)

    def publish(self, version: int, weights: Mapping[str, Tensor], in_use: Collection[int]) -> Address:
        address = super().publish(version, weights, in_use)
        self._chains.forget(self._slots.keys() - {version})
        return address

    def _serve(self, connection: Connection, digest: str) -> None:
        number = self._numbers[digest]
        with suppress(*BROKEN):
            connection.send(self._plan.parts[number])
            while not self._closed:
                if connection.poll(POLL_S):
                    self._send(connection, number, connection.recv())

    def _send(self, connection: Connection, number: int, asked: WantedStream) -> None:
        """Sends the answer, then buckets or the changes in them."""
        if asked.left:
            self._chains.leave(asked.left[0], asked.version, asked.left[1])
        if (slot := self._slots.get(asked.version)) is None:
            connection.send(Answer(is_there=False))
            return
        layout, base = self._plan.layouts[number], self._base_of(asked)
        relay = "" if base else self._relay_for(number, asked)
        pace_s = self._chains.pace_s(number, asked.stream)
        connection.send(Answer(True, base is not None, slot.proofs[number].copy(), relay, pace_s))
        if relay:
            return
        keep_pace(connection)
        start_s, buckets = time.monotonic(), asked.of(self._buckets[number])
        for bucket in buckets:
            if base is None:
                send(connection, [memory_of(slot.flats[number][bucket.start : bucket.start + bucket.num_bytes])])
            else:
                numbers, message = changes(layout, slot.flats[number], base.flats[number], bucket)
                connection.send(numbers.tolist())
                send(connection, [memory_of(message)])
        if base is None and asked.place:
            num_bytes = sum(bucket.num_bytes for bucket in buckets)
            self._chains.sent(number, asked.stream, time.monotonic() - start_s, num_bytes)

    def _base_of(self, asked: WantedStream) -> Slot | None:
        return self._slots.get(asked.base) if self._delta and asked.base is not None else None

    def _relay_for(self, number: int, asked: WantedStream) -> str:
        """Returns the place of a relay. Empty means none. A single bucket is never forwarded: nothing would overlap,
        and each host of a chain would only add its round trips."""
        is_single = len(asked.of(self._buckets[number])) < 2
        if is_single or not asked.place or host_of(asked.place) == host_of(self._store.rendezvous.address):
            return ""
        return self._chains.relay_for((asked.version, number, asked.stream), asked.place)


@dataclass(slots=True)
class _IncomingStream:
    """Stream from a trainer rank."""

    connection: Connection
    buckets: tuple[Bucket, ...]
    """All buckets of the trainer rank."""
    reopened_s: float
    """Time on the monotonic clock at which it was reopened for a long round trip; minus infinity means never."""
    pace_s: float | None = None
    """Least seconds per byte so far. None means unknown."""


class P2pSubscriber(CopyingSubscriber):
    """Requests its parts from every trainer rank, several at once."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        rank: int,
        delta: bool = False,
        timeout_s: float = 60.0,
        host: str = "",
    ) -> None:
        """
        Args:
            timeout_s: limit for a trainer rank to send or answer.
            host: an address of this machine that other generators can reach. Empty means the address where this process
                listens.
        """
        super().__init__(specs, rank, delta)
        self._timeout_s, self._host = timeout_s, host or weights_address()
        self._streams = dict[tuple[int, int], _IncomingStream]()
        """Streams by trainer rank and number."""
        self._scratch = list[Tensor]()
        """Memory for one bucket each, of idle streams; at most one per thread."""
        self._relay: Relay | None = None
        """None means that no other host needs this rank's parts."""
        self._used = dict[tuple[int, int], str]()
        """Last relay of each stream, by trainer rank and number."""

    def receive(self, request: VersionRequest, address: Address) -> tuple[np.ndarray, int]:
        places = self.place_in(address).split(",")
        able = {rank: Rendezvous(place, address.publisher) for rank, place in enumerate(places) if place}
        if self._relay is None and any(host_of(place.address) != self._host for place in able.values()):
            self._relay = Relay(self.layout, self._host, address.publisher)
        if self._relay and request.only is None:
            self._relay.begin(request.version, request.tensors)
        num = streams_from_each(len(able))
        # The ranks of a replica begin with different trainer ranks.
        order = sorted(able, key=lambda rank: (rank - MAX_THREADS * self.rank) % len(places))
        streams = [(rank, stream, num) for rank in order for stream in range(num)]
        with ThreadPoolExecutor(MAX_THREADS, "weight-receiver") as pool:
            jobs = [pool.submit(self._pull_from, *one, able[one[0]], request) for one in streams]
        proofs, num_bytes = np.zeros((len(places), 2, len(self.layout.specs)), np.uint64), 0
        try:
            for (rank, *_), job in zip(streams, jobs, strict=True):
                proofs[rank], size = job.result()
                num_bytes += size
        except BaseException:
            if self._relay:
                self._relay.fail()
            raise
        return proofs, num_bytes

    def _pull_from(
        self, rank: int, number: int, num_streams: int, place: Rendezvous, request: VersionRequest
    ) -> tuple[np.ndarray, int]:
        """Receives the parts of one trainer rank. Reopens streams that have broken."""
        is_used = (rank, number) in self._streams
        try:
            received = self._receive(rank, number, num_streams, place, request)
        except BROKEN as error:
            if (broken := self._streams.pop((rank, number), None)) is not None:
                broken.connection.close()
            if is_used:
                return self._pull_from(rank, number, num_streams, place, request)
            what = f"version {request.version} from trainer rank {rank} at {place.address}"
            raise TransferFailed(f"generator rank {self.rank} did not get {what}: {plain(error)}") from error
        if len(self._streams) > MAX_KEPT:
            self._streams.pop((rank, number)).connection.close()
        return received

    def _receive(
        self, rank: int, number: int, num_streams: int, place: Rendezvous, request: VersionRequest
    ) -> tuple[np.ndarray, int]:
        key = rank, number
        old, reopened_s, now_s = self._streams.get(key), -math.inf, time.monotonic()
        if old is not None and now_s - old.reopened_s > AGAIN_S and has_slowed(old.connection):
            self._streams.pop(key).connection.close()
            reopened_s = now_s
        if key not in self._streams:
            connection = place.connect(self.layout.digest, self._timeout_s, LOST_S)
            notice_loss(connection)
            cut = into_buckets(self.layout, connection.recv(), P2pPublisher.BUCKET_BYTES)
            self._streams[key] = _IncomingStream(connection, cut, reopened_s)
        stream = self._streams[key]
        connection = stream.connection
        relay = self._relay if request.only is None else None
        asked = WantedStream(request.version, number, num_streams, request.only, request.base.version)
        asked = asked._replace(place=relay.place if relay else "")
        buckets, num_passed, take = asked.of(stream.buckets), 0, partial(self._take, request, rank)
        if (used := self._used.pop(key, "")) and request.only is not None and buckets:  # its bytes are damaged
            asked = asked._replace(left=(used, TIRED_VERSIONS))
        start_s, answer = time.monotonic(), self._ask(connection, asked, rank)
        if answer.relay and relay:
            paces_s = answer.pace_s, stream.pace_s
            num_passed, num_versions = relay.fetch(
                answer.relay, request.version, rank, buckets, take, paces_s, self._timeout_s / 2
            )
            self._used[key] = answer.relay
            if num_passed < len(buckets):
                rest = asked._replace(base=None, first=num_passed, place="", left=(answer.relay, num_versions))
                self._ask(connection, rest, rank)
        take_one = partial(self._take_changes, request) if answer.are_changes else take
        sizes = [take_one(connection, bucket) for bucket in buckets[num_passed:]]
        assert answer.proof is not None
        num_bytes = sum(sizes) + sum(bucket.num_bytes for bucket in buckets[:num_passed])
        if relay and not answer.are_changes:
            pace_s = (time.monotonic() - start_s) / max(1, num_bytes)
            stream.pace_s = min(pace_s, stream.pace_s or pace_s)
        return answer.proof, num_bytes

    def _ask(self, connection: Connection, asked: WantedStream, rank: int) -> Answer:
        connection.send(asked)
        answer: Answer = connection.recv()
        if not answer.is_there:
            raise Superseded(f"version {asked.version} is no longer at trainer rank {rank}")
        return answer

    def _take(
        self,
        request: VersionRequest,
        rank: int,
        connection: Connection,
        bucket: Bucket,
        deadline_s: float | None = None,
    ) -> int:
        """Receives a bucket. Parts that are contiguous in the tensors arrive in place."""
        scratch = NO_BYTES
        with suppress(IndexError):  # all are in use
            scratch = self._scratch.pop()
        if scratch.nbytes < bucket.num_bytes:
            scratch = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        memory, elsewhere = pieces(self.layout, request.tensors, bucket, scratch)
        receive(connection, memory, deadline_s)
        for target, piece in elsewhere:
            target.copy_(piece)
        self._scratch.append(scratch)
        if self._relay and request.only is None:
            self._relay.arrived(rank, bucket)
        return bucket.num_bytes

    def _take_changes(self, request: VersionRequest, connection: Connection, bucket: Bucket) -> int:
        """Applies the received changes to copies of the base's parts."""
        numbers = connection.recv()
        sizes = changes_bytes(self.layout, bucket, numbers)
        message = torch.empty(sum(sizes), dtype=torch.uint8)
        receive(connection, [memory_of(message)])
        for (part, _), number, piece in zip(bucket.parts, numbers, message.split_with_sizes(sizes), strict=True):
            self.put(request, part, number, piece)
        return 8 * len(numbers) + message.nbytes

    def close(self) -> None:
        for stream in self._streams.values():
            stream.connection.close()
        if self._relay:
            self._relay.close()
        self._streams, self._relay, self._base = {}, None, NOTHING
