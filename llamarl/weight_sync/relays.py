"""Relays: a generator rank passes on what it receives, so a trainer rank sends each byte once, not once per host.

The readers of a version form a chain, in the order in which they ask for it: the trainer rank sends to the first one,
and every other one is told which reader before it passes the same bytes on, bucket by bucket, while they still arrive
there. Whoever does not ask is in no chain, so nobody waits for one that stands still. Where readers share a host, one
of them receives from another host and the rest from it.

Nobody has to trust a relay: what the bytes must add up to comes from the trainer rank itself, and so do the bytes when
a relay is gone, silent for `SILENT_S`, slower by more than `SLOWER` than trainer and reader have shown to be, or when
they do not prove right. One that was found so passes nothing on for a while.
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

from llamarl.distributed.links import BROKEN
from llamarl.distributed.rendezvous import Rendezvous, RendezvousStore
from llamarl.distributed.streams import TooSlow, is_farther, keep_pace, send
from llamarl.weight_sync.buckets import Bucket, pieces
from llamarl.weight_sync.layout import Layout

SILENT_S = 1.5
"""A relay that says nothing for so long is left; it tells twice a second that it still waits itself."""
SLOWER, GRACE_S = 3.0, 0.5
"""So many times the slower one's time may pass, beside so many seconds for a machine that is busy for a moment."""
IDLE_S = 60.0
"""Connections that were idle for longer are formed anew: a firewall may have forgotten them without a word."""
MAX_LINES, MAX_SERVED = 32, 256
"""Connections to relays that are kept, as readers come in another order each time, and to readers."""
TIRED_VERSIONS = 8
"""Versions for which a relay that was left serves nobody."""


def host_of(place: str) -> str:
    """Host of a place, `host:port`."""
    return place.rpartition(":")[0]


@dataclass(slots=True)
class _Chain:
    """Readers of one stream of one version."""

    asked: list[str] = field(default_factory=list)
    """Places where readers pass on, in the order in which they asked."""
    tail: str = ""
    """The last one that is on a host of its own; empty: nobody has it but the trainer."""


class Chains:
    """A trainer rank's: who receives from whom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains = dict[tuple[int, int, int], _Chain]()
        """Chains by version, layout and stream."""
        self._tired = dict[str, int]()
        """Relays that were left, with the version from which on they are used again."""
        self._paces = dict[tuple[int, int], deque[float]]()
        """Seconds per byte of what was sent to the first reader lately, by layout and stream."""

    def relay_for(self, key: tuple[int, int, int], place: str) -> str:
        """Place where the reader at `place` finds a version; empty: the trainer rank itself, as when it asks again."""
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
        """Notes a relay that does not pass on `version` and others, so many in all."""
        with self._lock:
            self._tired[place] = version + num_versions

    def forget(self, kept: Collection[int]) -> None:
        """Versions that are not kept are gone, or published anew."""
        with self._lock:
            self._chains = {key: chain for key, chain in self._chains.items() if key[0] in kept}
            newest = max(kept, default=0)
            self._tired = {place: version for place, version in self._tired.items() if version > newest}

    def sent(self, layout: int, stream: int, seconds: float, num_bytes: int) -> None:
        """A first reader has received a whole stream."""
        with self._lock:
            self._paces.setdefault((layout, stream), deque(maxlen=TIRED_VERSIONS)).append(seconds / max(1, num_bytes))

    def pace_s(self, layout: int, stream: int) -> float | None:
        """Seconds per byte; None: not known yet."""
        with self._lock:
            return min(self._paces.get((layout, stream), ()), default=None)


@dataclass(eq=False, slots=True)
class _RelayedVersion:
    """A version that a generator rank receives, or has received."""

    number: int
    version: int
    tensors: Mapping[str, Tensor]
    arrived: set[tuple[int, int]] = field(default_factory=set)
    """Trainer rank and start of each bucket."""
    is_over: bool = False
    """Whether no more of it arrives."""


class Relay:
    """A generator rank's: passes the two newest versions on to readers of the same layout."""

    def __init__(self, layout: Layout, host: str, secret: str) -> None:
        self._layout, self._secret = layout, secret
        self._changed = threading.Condition()
        self._newest = _RelayedVersion(0, -1, {}, is_over=True)
        self._lines = dict[tuple[int, int, str], tuple[Connection, float]]()
        """Connections to relays and when they were kept, by trainer rank, start of a stream, and place; newest last."""
        self._served = set[Connection]()
        self._store = RendezvousStore(host=host, secret=secret, serve=self._serve)
        self.place = self._store.rendezvous.address

    def begin(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Passes on a version that arrives in `tensors`, which stay as they are until two newer ones have come."""
        with self._changed:
            self._newest = _RelayedVersion(self._newest.number + 1, version, tensors)
            self._changed.notify_all()

    def arrived(self, rank: int, bucket: Bucket) -> None:
        """A bucket of the newest version, from a trainer rank or from a relay."""
        with self._changed:
            self._newest.arrived.add((rank, bucket.start))
            self._changed.notify_all()

    def fail(self) -> None:
        """The newest version does not come any further."""
        with self._changed:
            self._newest = _RelayedVersion(self._newest.number, -1, {}, is_over=True)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends what is passed on."""
        self._store.close()
        for line, _ in self._lines.values():
            line.close()
        with self._changed:
            self._newest = _RelayedVersion(self._newest.number + 2, -1, {}, is_over=True)
            self._changed.notify_all()

    def _serve(self, connection: Connection, digest: str) -> None:
        """One reader, in a thread; it finds the connection closed where there is no more to come."""
        self._served.add(connection)
        try:
            while digest == self._layout.digest and self._pass_on(connection, *connection.recv()):
                if len(self._served) > MAX_SERVED:
                    break
                connection.poll(None)
        finally:
            self._served.discard(connection)

    def _pass_on(self, connection: Connection, version: int, rank: int, buckets: Sequence[Bucket]) -> bool:
        """A version, as far as it is asked for; whether all of it has gone out."""
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
        """Receives from another relay what a trainer rank has for this rank, and passes it on.

        Args:
            take: receives a bucket, by a time on the monotonic clock.
            paces_s: seconds per byte that the trainer rank takes, and that this rank takes; None: not known.
            timeout_s: for a bucket, while the first of them is not known.

        Returns:
            How many buckets came, and for how many versions nobody should ask there for the others.
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
        """To a relay: that of another version, unless it has ended. Raises what is in `BROKEN`."""
        with self._changed:
            line, since_s = self._lines.pop(stream, (None, 0.0))
        if line is not None:
            is_open = time.monotonic() < since_s + IDLE_S and not line.poll()  # there is nothing to hear but its end
            if is_open and not is_farther(line):
                return line
            line.close()
        return Rendezvous(stream[-1], self._secret).connect(self._layout.digest, SILENT_S)

    def _keep(self, stream: tuple[int, int, str], line: Connection) -> None:
        with self._changed:
            self._lines[stream] = line, time.monotonic()
            while len(self._lines) > MAX_LINES:
                self._lines.pop(next(iter(self._lines)))[0].close()


class _Pace:
    """Time that a relay may take. That in which it waits for bytes itself is not its own."""

    def __init__(self, pace_s: float | None, own_s: float | None, timeout_s: float) -> None:
        self._pace_s, self._own_s, self._timeout_s = pace_s, own_s, timeout_s
        self._start_s = self._mark_s = time.monotonic()
        self._used_s = self._allowed_s = 0.0
        self._num_bytes, self._waits = 0, False

    def begin(self, num_bytes: int) -> None:
        """A bucket is next."""
        self._mark_s, self._waits = time.monotonic(), False
        self._num_bytes += num_bytes
        if self._pace_s is None:
            self._allowed_s = self._used_s + self._timeout_s
        else:
            self._allowed_s = GRACE_S + SLOWER * max(self._pace_s, self._own_s or 0.0) * self._num_bytes

    def waits(self) -> None:
        """The relay has not got it yet. Raises TooSlow: not in twice its time either, in which it may leave another."""
        self._waits = True
        if time.monotonic() - self._start_s > 2 * self._allowed_s and self._pace_s is not None:
            raise TooSlow("it waits itself")

    def has_it(self) -> float:
        """The relay does, and may take until this time."""
        if self._waits:
            self._mark_s = time.monotonic()
        self._waits = False
        return self._mark_s + self._allowed_s - self._used_s

    def end(self) -> None:
        """The bucket is here. Raises TooSlow."""
        self._used_s += time.monotonic() - self._mark_s
        if self._used_s > self._allowed_s:
            raise TooSlow("it is too slow")

    @property
    def is_to_blame(self) -> bool:
        """Unless it waited, or the one who receives is slow: who has not shown yet that it can do better."""
        return not self._waits and self._own_s is not None
