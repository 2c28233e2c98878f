"""Relays: a generator rank forwards what it receives, so a trainer rank sends each byte once instead of once per host.

The readers of a version form a chain in the order of their requests. The trainer rank sends to the first reader. It
tells each further reader which earlier reader forwards the same bytes, bucket by bucket, while they still arrive there.
A generator rank that does not request a version is in no chain, so a stopped rank delays no other. Of the readers on
one host, one receives from another host, and the rest receive from it.

No reader has to trust a relay: the proofs come from the trainer rank itself. The reader gets the bytes from the trainer
rank, too, if a relay is gone, is silent for `SILENT_S`, delivers wrong bytes, or is more than `SLOWER` times slower
than trainer and reader have been. Such a relay then forwards nothing for a few versions.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from torch import Tensor

from llamarl.distributed.links import BROKEN, Rendezvous, RendezvousStore, TooSlow, has_slowed, keep_pace, send
from llamarl.weight_sync.base import Bucket, pieces
from llamarl.weight_sync.layout import Layout

SILENT_S = 1.5
"""A reader abandons a relay after this silence. A waiting relay reports twice a second."""
SLOWER, GRACE_S = 3.0, 0.5
"""A relay may take SLOWER times as long as the slower of trainer and reader, plus GRACE_S seconds for a busy
machine."""
IDLE_S = 60.0
"""Connections that were idle for longer are reopened, because a firewall may have dropped them silently."""
MAX_LINES, MAX_SERVED = 32, 256
"""Most kept connections to relays, whose order differs for each version, and to readers."""
TIRED_VERSIONS = 8
"""Versions for which an abandoned relay is not used."""


def host_of(place: str) -> str:
    """Returns the host of a place, which is `host:port`."""
    return place.rpartition(":")[0]


@dataclass(slots=True)
class _Chain:
    """Readers of one stream of one version."""

    asked: list[str] = field(default_factory=list)
    """Places where readers forward, in the order of their requests."""
    tail: str = ""
    """The last reader that shares its host with no earlier one. Empty means that only the trainer has the stream."""


class Chains:
    """State of a trainer rank: which reader receives from which relay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains = dict[tuple[int, int, int], _Chain]()
        """Chains by version, layout and stream."""
        self._tired = dict[str, int]()
        """Abandoned relays, with the version from which on they are used again."""
        self._paces = dict[tuple[int, int], deque[float]]()
        """Recent seconds per byte of the first reader, by layout and stream."""

    def relay_for(self, key: tuple[int, int, int], place: str) -> str:
        """Returns the place where the reader at `place` gets a version. Empty means the trainer rank, as for a second
        request."""
        with self._lock:
            chain = self._chains.setdefault(key, _Chain())
            if place in chain.asked:
                return ""
            able = [one for one in chain.asked if self._tired.get(one, 0) <= key[0]]
            near = [one for one in able if host_of(one) == host_of(place)]
            chain.asked.append(place)
            found = near[-1] if near else chain.tail if chain.tail in able else ""
            if not near and self._tired.get(place, 0) <= key[0]:
                chain.tail = place
            return found

    def leave(self, place: str, version: int, num_versions: int) -> None:
        """Notes a relay that must not be used for `num_versions` versions from `version` on."""
        with self._lock:
            self._tired[place] = version + num_versions

    def forget(self, kept: Collection[int]) -> None:
        """Forgets versions that are not kept or are published again."""
        with self._lock:
            self._chains = {key: chain for key, chain in self._chains.items() if key[0] in kept}
            newest = max(kept, default=0)
            self._tired = {place: version for place, version in self._tired.items() if version > newest}

    def sent(self, layout: int, stream: int, seconds: float, num_bytes: int) -> None:
        """Notes that a first reader has received a whole stream."""
        with self._lock:
            self._paces.setdefault((layout, stream), deque(maxlen=TIRED_VERSIONS)).append(seconds / max(1, num_bytes))

    def pace_s(self, layout: int, stream: int) -> float | None:
        """Returns the least recent seconds per byte. None means that nothing was measured."""
        with self._lock:
            return min(self._paces.get((layout, stream), ()), default=None)


@dataclass(eq=False, slots=True)
class _RelayedVersion:
    """A version that a generator rank receives or has received."""

    number: int
    version: int
    tensors: Mapping[str, Tensor]
    arrived: set[tuple[int, int]] = field(default_factory=set)
    """Trainer rank and start of each bucket."""
    is_over: bool = False
    """Whether no more of it arrives."""


class Relay:
    """A generator rank's end: forwards the two newest versions to readers with the same layout."""

    def __init__(self, layout: Layout, host: str, secret: str) -> None:
        self._layout, self._secret = layout, secret
        self._changed = threading.Condition()
        self._newest = _RelayedVersion(0, -1, {}, is_over=True)
        self._lines = dict[tuple[int, int, str], tuple[Connection, float]]()
        """Connections to relays and the time since which they are kept, by trainer rank, start of a stream and place;
        newest last."""
        self._served = set[Connection]()
        self._store = RendezvousStore(host=host, secret=secret, serve=self._serve)
        self.place = self._store.rendezvous.address

    def begin(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Begins to forward a version that arrives in `tensors`, which must not change until two newer ones have
        begun."""
        with self._changed:
            self._newest = _RelayedVersion(self._newest.number + 1, version, tensors)
            self._changed.notify_all()

    def arrived(self, rank: int, bucket: Bucket) -> None:
        """Notes the arrival of a bucket of the newest version."""
        with self._changed:
            self._newest.arrived.add((rank, bucket.start))
            self._changed.notify_all()

    def fail(self) -> None:
        """Ends the forwarding of the newest version, which was not received completely."""
        with self._changed:
            self._newest = _RelayedVersion(self._newest.number, -1, {}, is_over=True)
            self._changed.notify_all()

    def close(self) -> None:
        """Stops forwarding."""
        self._store.close()
        for line, _ in self._lines.values():
            line.close()
        with self._changed:
            self._newest = _RelayedVersion(self._newest.number + 2, -1, {}, is_over=True)
            self._changed.notify_all()

    def _serve(self, connection: Connection, digest: str) -> None:
        """Serves one reader in a thread. Closes the connection when no more will come."""
        self._served.add(connection)
        try:
            while digest == self._layout.digest and self._pass_on(connection, *connection.recv()):
                if len(self._served) > MAX_SERVED:
                    break
                connection.poll(None)
        finally:
            self._served.discard(connection)

    def _pass_on(self, connection: Connection, version: int, rank: int, buckets: Sequence[Bucket]) -> bool:
        """Sends the requested buckets of a version. Returns whether all of them were sent."""
        with self._changed:
            passing = self._newest
        if passing.version != version:
            return False
        keep_pace(connection)
        for bucket in buckets:
            wait_s = 0.0
            while not self._is_there(passing, (rank, bucket.start), wait_s):
                connection.send(False)
                if self._newest is not passing:
                    return False
                wait_s = SILENT_S / 4
            if self._newest.number - passing.number > 1:
                return False
            connection.send(True)
            send(connection, pieces(self._layout, passing.tensors, bucket)[0])
        return True

    def _is_there(self, passing: _RelayedVersion, key: tuple[int, int], wait_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: key in passing.arrived or self._newest is not passing, wait_s)
            return key in passing.arrived

    def fetch(
        self,
        place: str,
        version: int,
        rank: int,
        buckets: Sequence[Bucket],
        take: Callable[[Connection, Bucket, float], object],
        paces_s: tuple[float | None, float | None],
        timeout_s: float,
    ) -> tuple[int, int]:
        """Receives a trainer rank's buckets for this rank from another relay, and forwards them.

        Args:
            take: receives a bucket, by a time on the monotonic clock.
            paces_s: seconds per byte of the trainer rank, and of this rank. None means unknown.
            timeout_s: limit for a bucket while the trainer rank's pace is unknown.

        Returns:
            The number of received buckets, and the number of versions for which no reader should use this relay.
        """
        pace, num, stream = _Pace(*paces_s, timeout_s), 0, (rank, buckets[0].start, place)
        try:
            with self._line(stream) as connection:
                connection.send((version, rank, buckets))
                for bucket in buckets:
                    pace.begin(bucket.num_bytes)
                    while not connection.recv():
                        pace.waits()
                    take(connection, bucket, pace.has_it())
                    pace.end()
                    num += 1
                self._keep(stream, Connection(os.dup(connection.fileno())))
        except TooSlow:
            return num, TIRED_VERSIONS if pace.is_to_blame else 0
        except BROKEN as error:
            return num, TIRED_VERSIONS if isinstance(error, TimeoutError | BlockingIOError) else 1
        return num, 0

    def _line(self, stream: tuple[int, int, str]) -> Connection:
        """Returns a connection to a relay, reused from another version unless it has ended. Raises the errors in
        `BROKEN`."""
        with self._changed:
            line, since_s = self._lines.pop(stream, (None, 0.0))
        if line is not None:
            is_open = time.monotonic() < since_s + IDLE_S and not line.poll()  # readable only at its end
            if is_open and not has_slowed(line):
                return line
            line.close()
        return Rendezvous(stream[-1], self._secret).connect(self._layout.digest, SILENT_S)

    def _keep(self, stream: tuple[int, int, str], line: Connection) -> None:
        with self._changed:
            self._lines[stream] = line, time.monotonic()
            while len(self._lines) > MAX_LINES:
                self._lines.pop(next(iter(self._lines)))[0].close()


class _Pace:
    """Time that a relay may take. Time in which the relay itself waits for bytes does not count."""

    def __init__(self, pace_s: float | None, own_s: float | None, timeout_s: float) -> None:
        self._pace_s, self._own_s, self._timeout_s = pace_s, own_s, timeout_s
        self._start_s = self._mark_s = time.monotonic()
        self._used_s = self._allowed_s = 0.0
        self._num_bytes, self._waits = 0, False

    def begin(self, num_bytes: int) -> None:
        """Begins a bucket."""
        self._mark_s, self._waits = time.monotonic(), False
        self._num_bytes += num_bytes
        if self._pace_s is None:
            self._allowed_s = self._used_s + self._timeout_s
        else:
            self._allowed_s = GRACE_S + SLOWER * max(self._pace_s, self._own_s or 0.0) * self._num_bytes

    def waits(self) -> None:
        """Notes that the relay does not have the bucket yet. Raises TooSlow after twice its time, since it may be about
        to abandon its own relay."""
        self._waits = True
        if time.monotonic() - self._start_s > 2 * self._allowed_s and self._pace_s is not None:
            raise TooSlow("it waits itself")

    def has_it(self) -> float:
        """Notes that the relay has the bucket. Returns the time by which it must have sent it."""
        if self._waits:
            self._mark_s = time.monotonic()
        self._waits = False
        return self._mark_s + self._allowed_s - self._used_s

    def end(self) -> None:
        """Notes that the bucket has arrived. Raises TooSlow."""
        self._used_s += time.monotonic() - self._mark_s
        if self._used_s > self._allowed_s:
            raise TooSlow("it is too slow")

    @property
    def is_to_blame(self) -> bool:
        """Whether the relay is slow: it did not wait itself, and the receiver has shown that it can be faster."""
        return not self._waits and self._own_s is not None
