"""Connections between processes that prove to each other that they know a secret, and a star of them. No torch."""

from __future__ import annotations

import fcntl
import math
import os
import queue
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from llamarl.config.errors import RanksLost
from llamarl.config.section import ADDRESS, WEIGHTS_ADDRESS
from llamarl.net.entrance import PROOF_S, Entrance, Proved, listen

BROKEN = (OSError, EOFError, AuthenticationError)
"""Errors of a connection whose other end is gone, silent, or none of ours."""
GREETING = b"\n"
"""Who connects says it first: nobody hears of one that is silent."""
LOST_S = 4
"""Seconds after which the system ends a connection to a host that does not answer, where `notice_loss` asks for it."""
_SIOCGIFCONF, _ADDRESSES, _ENTRY_BYTES = 0x8912, struct.Struct("iP"), 40
"""Linux's question for all IPv4 addresses here: a `struct ifconf`, answered in entries of `struct ifreq`."""


def own_address() -> str:
    """Address at which this process listens: on one host the loopback."""
    return os.environ.get(ADDRESS, "127.0.0.1")


def weights_address() -> str:
    """Address at which this process sends and receives weights."""
    return os.environ.get(WEIGHTS_ADDRESS) or own_address()


def interface_of(address: str) -> str:
    """The network interface that has an address of this host, its first or any other; empty: none has."""
    if address.startswith("127."):  # all of them, of which few are listed
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
    """Connection to the process that listens at `host:port`, whose system answers within `reach_s`. Raises OSError,
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
    """The other end of `connect`, and its `host:port`.

    Args:
        serve: gets each connection whose other end knows the secret, in a thread of its own; may raise what is in
            `BROKEN`, and the connection ends as it returns.
        timeout_s: for one read or write.
        wait_s: it ends when nobody has come for so long.
    """

    def prove(accepted: socket.socket, proved: Proved) -> None:
        with suppress(*BROKEN):
            try:
                connection = _bounded(accepted, PROOF_S)
            except OSError:  # it has gone
                proved()
                accepted.close()
                return
            try:
                accepted.recv(len(GREETING))
                deliver_challenge(connection, secret.encode())
                answer_challenge(connection, secret.encode())
                _bound(accepted, timeout_s)
            finally:  # from here on the connection is the one that closes it
                proved()
                accepted.detach()
            with connection:
                serve(connection)

    def begin(*connected: Any) -> None:
        threading.Thread(target=prove, args=connected, name="entrance", daemon=True).start()

    listener = listen(host)
    return Entrance(listener, begin, wait_s), f"{host}:{listener.getsockname()[1]}"


def notice_loss(connection: Connection) -> None:
    """The connection fails when the other host is gone, whose system says nothing then. This end must send little: one
    that does not read for so long counts as gone, too."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)


def local_host(connection: Connection) -> str:
    """The address of this end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as one:
        return one.getsockname()[0]


def _bounded(made: socket.socket, timeout_s: float) -> Connection:
    """Reads and writes that take longer fail with OSError."""
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
        """`timeout_s` bounds one message or reply."""
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._links = dict[int, Connection]()

    def listen(self, host: str, secret: str, tell: Callable[[str], None], timeout_s: float) -> None:
        """Rank 0: `tell`s where it listens, until all have come. Raises OSError."""
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
            raise TimeoutError(f"only {len(self._links) + 1} of {self.size} ranks have come") from None
        finally:
            entrance.close()

    def connect(self, address: str, secret: str) -> None:
        """The others: to rank 0. Raises what is in `BROKEN`."""
        self._links[0] = connect(address, secret, self._timeout_s)
        self._links[0].send(self.rank)

    def exchange(self, value: Any) -> list[Any]:
        """Gives a small picklable value to all ranks and returns theirs in rank order. Raises RanksLost."""
        if self.rank:
            self.send(0, value)
            return self.receive(0, "collect values")
        values = [value, *(self.receive(rank, "give a value") for rank in range(1, self.size))]
        for rank in range(1, self.size):
            self.send(rank, values)
        return values

    def send(self, rank: int, message: Any) -> None:
        """Sends a message to rank 0, or from there to any other. Raises RanksLost."""
        try:
            self._link(rank).send(message)
        except BROKEN as error:
            raise RanksLost(f"rank {self.rank} cannot send to rank {rank}: {error}") from error

    def poll(self, rank: int, wait_s: float = 0.0) -> bool:
        """`rank` has sent something, or is gone."""
        return self._link(rank).poll(wait_s)

    def receive(self, rank: int, what: str) -> Any:
        """The next message from `rank`, which is to do `what`. Raises RanksLost."""
        try:
            if self._link(rank).poll(self._timeout_s):
                return self._link(rank).recv()
        except BROKEN as error:
            raise RanksLost(f"rank {self.rank} waited for rank {rank} to {what}, but it is gone") from error
        raise RanksLost(f"rank {self.rank} waited {self._timeout_s:g} s for rank {rank} to {what}")

    def close(self) -> None:
        """Ends all connections; may be called again."""
        for link in self._links.values():
            link.close()
        self._links = {}

    def _link(self, rank: int) -> Connection:
        if rank not in self._links:
            raise RanksLost(f"rank {self.rank} has no connection to rank {rank}: it is closed")
        return self._links[rank]
