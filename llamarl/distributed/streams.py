"""Many bytes through a connection that has proved the secret, in few system calls; other threads run meanwhile."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

MAX_PIECES = 512
"""Most pieces of one system call; Linux takes 1,024."""


FAR_US, LOSSY = 5_000, 0.01
"""A long way, in microseconds there and back, and a bad one, as a share of what is sent twice."""
FARTHER = 4
"""A way has become long where there and back takes so many times the least that the connection has seen."""
_RTT, _RESENT, _SENT, _LEAST_RTT = 68, 100, 136, 148
"""Offsets of fields in `struct tcp_info` of linux/tcp.h."""


class TooSlow(TimeoutError):
    """A transfer goes on, but not fast enough."""


@contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    """Its descriptor as a socket, without another one."""
    one = socket.socket(fileno=connection.fileno())
    try:
        yield one
    finally:
        one.detach()


def keep_pace(connection: Connection) -> None:
    """Has the system send, over a way that is long or bad, at the pace that the way has shown. It would else begin
    anew after each pause, which takes many round trips, and take each loss for a way that is full. One that is long now
    and was not when the connection was formed is none of these: see `is_farther`."""
    with _socket_of(connection) as one:
        rtt_us, least_us, resent, sent = _told(one, _RTT, _LEAST_RTT, _RESENT, _SENT)
        if least_us > FAR_US or (resent > LOSSY * sent and not _has_become_long(rtt_us, least_us)):
            with suppress(OSError):  # not every kernel has it
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def is_farther(connection: Connection) -> bool:
    """Whether the way was near when the connection was formed, and is long now: it should be formed anew. The system
    remembers the least time there and back for minutes, and does not send more at once than such a way holds."""
    with _socket_of(connection) as one:
        return _has_become_long(*_told(one, _RTT, _LEAST_RTT))


def _has_become_long(rtt_us: int, least_us: int) -> bool:
    return rtt_us > max(FAR_US, FARTHER * least_us)


def _told(one: socket.socket, *fields: int) -> list[int]:
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return [int.from_bytes(info[at : at + 4], sys.byteorder) for at in fields]


def send(connection: Connection, pieces: Iterable[memoryview]) -> None:
    """All bytes of some pieces of memory. Raises what is in `links.BROKEN`."""
    _move(connection, pieces, lambda one, left: one.sendmsg(left))


def receive(connection: Connection, pieces: Iterable[memoryview], deadline_s: float | None = None) -> None:
    """Fills some pieces of memory, by a time on the monotonic clock. Raises what is in `links.BROKEN`."""
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
