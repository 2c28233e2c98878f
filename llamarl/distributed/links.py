"""Connections between processes that authenticate each other by a secret, and the rendezvous of ranks. No torch.

`connect` and `open_entrance` are the two ends of a connection. `RankLinks` is a star of connections around rank 0, for
small messages. `send` and `receive` transfer many bytes in few system calls, and release the GIL.

`RendezvousStore` runs in the process that starts the ranks of an executor, or in one of two processes that pair up. It
stores values, and sends notes about failed ranks to all ranks. Both ends must know the secret; torch's `TCPStore` has
no authentication and listens at every address. Processes need only the address and the secret, so they may be on other
hosts.
"""

from __future__ import annotations

import fcntl
import math
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Literal, NamedTuple

from llamarl.config.errors import RanksLost
from llamarl.config.section import ADDRESS, WEIGHTS_ADDRESS
from llamarl.net.entrance import PROOF_S, Entrance, Proved, listen

BROKEN = (OSError, EOFError, AuthenticationError)
"""Errors of a connection whose other end is gone, does not answer or does not know the secret."""
GREETING = b"\n"
"""First byte of the connecting process. The kernel does not accept a connection before it has received data."""
LOST_S = 4
"""Seconds after which the kernel closes a connection to an unreachable host, if `notice_loss` was called for it."""
_SIOCGIFCONF, _ADDRESSES, _ENTRY_BYTES = 0x8912, struct.Struct("iP"), 40
"""Linux's request for all IPv4 addresses of this host: a `struct ifconf`, answered in entries of `struct ifreq`."""
MAX_PIECES = 512
"""Most pieces of one system call; Linux allows 1,024."""
FAR_US, LOSSY = 5_000, 0.01
"""Thresholds for a high-latency link (round trip in microseconds) and a lossy link (share of retransmitted bytes)."""
FARTHER = 4
"""A link has become slow if its round trip takes FARTHER times the least that the connection has seen."""
_RTT, _RESENT, _SENT, _LEAST_RTT = 68, 100, 136, 148
"""Offsets of fields in `struct tcp_info` of linux/tcp.h."""
ANSWER_S = 30.0
"""Seconds in which the store must answer a request, in addition to the time that the request waits for."""


def own_address() -> str:
    """Returns the address at which this process listens: the loopback if all processes are on one host."""
    return os.environ.get(ADDRESS, "127.0.0.1")


def weights_address() -> str:
    """Returns the address at which this process sends and receives weights."""
    return os.environ.get(WEIGHTS_ADDRESS) or own_address()


def interface_of(address: str) -> str:
    """Returns the network interface with this address of the host. Empty means that none has it."""
    if address.startswith("127."):  # the kernel lists few of the loopback's addresses
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, suppress(OSError):
        asked = bytearray(_ADDRESSES.pack(0, 0))
        fcntl.ioctl(one, _SIOCGIFCONF, asked)
        room = array("B", bytes(_ADDRESSES.unpack(asked)[0]))
        asked[:] = _ADDRESSES.pack(len(room), room.buffer_info()[0])
        fcntl.ioctl(one, _SIOCGIFCONF, asked)
        listed = room.tobytes()[: _ADDRESSES.unpack(asked)[0]]
        for entry in (listed[start : start + _ENTRY_BYTES] for start in range(0, len(listed), _ENTRY_BYTES)):
            if socket.inet_ntoa(entry[20:24]) == address:
                return entry[:16].partition(b"\0")[0].decode()
    return ""


def connect(place: str, secret: str, timeout_s: float, reach_s: float = math.inf) -> Connection:
    """Connects to the process that listens at `host:port`, whose kernel must answer within `reach_s`. Raises OSError,
    EOFError or AuthenticationError."""
    host, port = place.rsplit(":", 1)
    made = socket.create_connection((host, int(port)), min(timeout_s, reach_s))
    made.sendall(GREETING)
    connection = _bounded(made, timeout_s)
    made.detach()
    answer_challenge(connection, secret.encode())
    deliver_challenge(connection, secret.encode())
    return connection


def open_entrance(
    host: str, secret: str, serve: Callable[[Connection], None], timeout_s: float, wait_s: float | None = None
) -> tuple[Entrance, str]:
    """Opens the other end of `connect`. Returns it and its `host:port`.

    Args:
        serve: called in a new thread with each authenticated connection, which is closed when it returns. May raise the
            errors in `BROKEN`.
        timeout_s: limit for one read or write.
        wait_s: closes the entrance after this time without a new connection. None means never.
    """

    def prove(accepted: socket.socket, proved: Proved) -> None:
        with suppress(*BROKEN):
            try:
                connection = _bounded(accepted, PROOF_S)
            except OSError:  # the other end has closed it
                proved()
                accepted.close()
                return
            try:
                accepted.recv(len(GREETING))
                deliver_challenge(connection, secret.encode())
                answer_challenge(connection, secret.encode())
                _bound(accepted, timeout_s)
            finally:  # from here on `connection` owns the descriptor
                proved()
                accepted.detach()
            with connection:
                serve(connection)

    def begin(*connected: Any) -> None:
        threading.Thread(target=prove, args=connected, name="entrance", daemon=True).start()

    listener = listen(host)
    return Entrance(listener, begin, wait_s), f"{host}:{listener.getsockname()[1]}"


def notice_loss(connection: Connection) -> None:
    """Makes the connection fail if the other host is gone, whose kernel then sends nothing. This end must send little:
    a peer that does not read for LOST_S counts as gone, too."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)


def local_host(connection: Connection) -> str:
    """Returns the address of this end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        return one.getsockname()[0]


def _bounded(made: socket.socket, timeout_s: float) -> Connection:
    """Makes a connection whose reads and writes raise OSError after `timeout_s`."""
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _bound(made, timeout_s)
    return Connection(made.fileno())


def _bound(made: socket.socket, timeout_s: float) -> None:
    seconds, microseconds = divmod(int(timeout_s * 1e6), 1_000_000)
    limit = seconds.to_bytes(8, "little") + microseconds.to_bytes(8, "little")
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class RankLinks:
    """Small messages between rank 0 and each other rank. Not thread-safe."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        """
        Args:
            timeout_s: limit for one message or reply.
        """
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._links = dict[int, Connection]()

    def listen(self, host: str, secret: str, tell: Callable[[str], None], timeout_s: float) -> None:
        """On rank 0, calls `tell` with its address and waits until all ranks have connected. Raises OSError."""
        deadline_s = time.monotonic() + timeout_s
        come = queue.SimpleQueue[tuple[int, Connection]]()

        def serve(connection: Connection) -> None:
            rank = connection.recv()
            come.put((rank, Connection(os.dup(connection.fileno()))))

        entrance, place = open_entrance(host, secret, serve, self._timeout_s)
        try:
            tell(place)
            while len(self._links) < self.size - 1:
                rank, link = come.get(timeout=max(0.0, deadline_s - time.monotonic()))
                self._links[rank] = link
        except queue.Empty:
            raise TimeoutError(f"only {len(self._links) + 1} of {self.size} ranks have connected") from None
        finally:
            entrance.close()

    def connect(self, address: str, secret: str) -> None:
        """On other ranks, connects to rank 0. Raises the errors in `BROKEN`."""
        self._links[0] = connect(address, secret, self._timeout_s)
        self._links[0].send(self.rank)

    def exchange(self, value: Any) -> list[Any]:
        """Sends a small picklable value to all ranks and returns theirs in rank order. Raises RanksLost."""
        if self.rank:
            self.send(0, value)
            return self.receive(0, "collect values")
        values = [value, *(self.receive(rank, "give a value") for rank in range(1, self.size))]
        for rank in range(1, self.size):
            self.send(rank, values)
        return values

    def send(self, rank: int, message: Any) -> None:
        """Sends a message to rank 0, or from rank 0 to another rank. Raises RanksLost."""
        try:
            self._link(rank).send(message)
        except BROKEN as error:
            raise RanksLost(f"rank {self.rank} cannot send to rank {rank}: {error}") from error

    def poll(self, rank: int, wait_s: float = 0.0) -> bool:
        """Returns whether `rank` has sent a message or is gone."""
        return self._link(rank).poll(wait_s)

    def receive(self, rank: int, what: str) -> Any:
        """Returns the next message from `rank`. Raises RanksLost.

        Args:
            what: what `rank` is to do, for the error message.
        """
        try:
            if self._link(rank).poll(self._timeout_s):
                return self._link(rank).recv()
        except BROKEN as error:
            raise RanksLost(f"rank {self.rank} waited for rank {rank} to {what}, but it is gone") from error
        raise RanksLost(f"rank {self.rank} waited {self._timeout_s:g} s for rank {rank} to {what}")

    def close(self) -> None:
        """Closes all connections. May be called again."""
        for link in self._links.values():
            link.close()
        self._links = {}

    def _link(self, rank: int) -> Connection:
        if rank not in self._links:
            raise RanksLost(f"rank {self.rank} has no connection to rank {rank}: it is closed")
        return self._links[rank]


class TooSlow(TimeoutError):
    """A transfer makes progress, but too slowly."""


@contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """Yields the connection's descriptor as a socket, without duplicating it."""
    one = socket.socket(fileno=connection.fileno())
    try:
        yield one
    finally:
        one.detach()


def keep_pace(connection: Connection) -> None:
    """Has the kernel send at the rate that a high-latency or lossy link has shown. Otherwise the kernel restarts slowly
    after each pause, which takes many round trips, and treats each loss as congestion. Does nothing for a link that
    became slow after the connection was opened: see `has_slowed`."""
    with _socket_of(connection) as one:
        rtt_us, least_us, resent, sent = _told(one, _RTT, _LEAST_RTT, _RESENT, _SENT)
        if least_us > FAR_US or (resent > LOSSY * sent and not _has_become_long(rtt_us, least_us)):
            with suppress(OSError):  # not every kernel has it
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def has_slowed(connection: Connection) -> bool:
    """Returns whether the link was near when the connection was opened and is slow now, so that it should be reopened.
    The kernel remembers the least round trip for minutes, and keeps no more data in flight than such a link holds."""
    with _socket_of(connection) as one:
        return _has_become_long(*_told(one, _RTT, _LEAST_RTT))


def _has_become_long(rtt_us: int, least_us: int) -> bool:
    return rtt_us > max(FAR_US, FARTHER * least_us)


def _told(one: socket.socket, *fields: int) -> list[int]:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return [int.from_bytes(info[at : at + 4], sys.byteorder) for at in fields]


def send(connection: Connection, pieces: Iterable[memoryview]) -> None:
    """Sends all bytes of the pieces. Raises the errors in `BROKEN`."""
    _move(connection, pieces, lambda one, left: one.sendmsg(left))


def receive(connection: Connection, pieces: Iterable[memoryview], deadline_s: float | None = None) -> None:
    """Fills the pieces, by a time on the monotonic clock. Raises the errors in `BROKEN`."""
    _move(connection, pieces, lambda one, left: one.recvmsg_into(left, 0, socket.MSG_WAITALL)[0], deadline_s)


def _move(
    connection: Connection,
    pieces: Iterable[memoryview],
    step: Callable[[socket.socket, list[memoryview]], int],
    deadline_s: float | None = None,
) -> None:
    left, first = [piece for piece in pieces if piece.nbytes], 0
    with _socket_of(connection) as one:
        while first < len(left):
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise TooSlow("it is too slow")
            try:
                moved = step(one, left[first : first + MAX_PIECES])
            except BlockingIOError as error:
                raise TimeoutError("the other end is silent") from error
            if not moved:
                raise EOFError("the other end is gone")
            while moved and moved >= left[first].nbytes:
                moved -= left[first].nbytes
                first += 1
            if moved:
                left[first] = left[first][moved:]


class Rendezvous(NamedTuple):
    """Address and secret with which a rank finds the others."""

    address: str
    """`host:port` of the store."""
    secret: str

    def connect(
        self, purpose: int | str | None = None, timeout_s: float = ANSWER_S, reach_s: float = math.inf
    ) -> Connection:
        """Connects to the store: for values, for notes as a rank, or for another service by its name.

        Raises the errors in `BROKEN`.
        """
        connection = connect(self.address, self.secret, timeout_s, reach_s)
        connection.send(purpose)
        return connection


class Note(NamedTuple):
    """Report of a rank, or of the store about a rank, after the work of all ranks was ended."""

    rank: int
    kind: Literal["failed", "gone", "waited", "was"]
    """The rank `failed` by itself, its process is `gone`, it `waited` for others, or it `was` in other code when it was
    ended."""
    text: str
    """A sentence for the message."""
    error: str = ""
    """Error of a failed rank."""


class RendezvousStore:
    """Stores values and passes on notes, in threads that sleep while there are no requests.

    It closes by itself: once all ranks have connected, it accepts no other, and serves these until they disconnect.
    """

    def __init__(
        self,
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        *,
        host: str = "127.0.0.1",
        secret: str = "",
        serve: Callable[[Connection, str], None] | None = None,
    ) -> None:
        """
        Args:
            num_ranks: ranks that will connect. None means any number, until `close`.
            timeout_s: closes the store after this time without a new connection.
            host: an address of this machine that the others can reach.
            secret: empty means a new one.
            serve: called in a new thread with each connection for another service, which is closed when it returns.
        """
        secret = secret or secrets.token_hex(16)
        self._num_ranks, self._others = num_ranks, serve
        self._changed = threading.Condition()
        self._values = dict[str, bytes]()
        self._notes = list[Note]()
        self._watching = dict[int, Connection]()
        self._num_come = 0
        self._entrance, address = open_entrance(host, secret, self._serve, ANSWER_S, timeout_s)
        self.rendezvous = Rendezvous(address, secret)

    def close(self) -> None:
        """Stops accepting. Serves open connections until they disconnect."""
        self._entrance.close()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes | None]:
        """Waits until all keys are set. Returns their values; None means that a key was not set in time."""
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s)
            return [self._values.get(key) for key in keys]

    def _serve(self, connection: Connection) -> None:
        purpose = connection.recv()
        if isinstance(purpose, int):
            self._watch(connection, purpose)
        elif purpose is not None and self._others is not None:
            self._others(connection, purpose)
        while purpose is None and connection.poll(None):
            method, *arguments = connection.recv()
            connection.send(getattr(self, method)(*arguments))

    def _watch(self, connection: Connection, rank: int) -> None:
        """Receives a rank's notes and sends it those of the others, until it disconnects."""
        with self._changed:
            self._num_come += 1
            is_last = self._num_come == self._num_ranks
        if is_last:
            self.close()
        try:
            with self._changed:
                self._watching[rank] = connection
                for note in self._notes:
                    connection.send(note)
            while connection.poll(None) and (note := connection.recv()):  # an empty note: the rank leaves
                self._tell(note)
        except BROKEN:
            self._tell(Note(rank, "gone", f"rank {rank} is gone"))
        with self._changed:
            del self._watching[rank]

    def _tell(self, note: Note) -> None:
        with self._changed:
            self._notes.append(note)
            for connection in self._watching.values():
                with suppress(*BROKEN):
                    connection.send(note)


def open_rendezvous(num_ranks: int, timeout_s: float) -> Rendezvous | None:
    """Opens a store for ranks that are about to start. Returns None for one rank."""
    return RendezvousStore(num_ranks, timeout_s, host=own_address()).rendezvous if num_ranks > 1 else None
