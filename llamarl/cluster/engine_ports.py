"""Strangers at Monarch's ports, as at ours (`net/entrance.py`).

Monarch accepts whoever connects and waits for his certificate without end, until the process has no descriptor left
for anything else. No setting of it bounds that. So its library is given another `listen`, which leaves those who say
nothing to the system, and another `accept4`, which puts out the oldest of those who have not shown a certificate.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field

from llamarl.cluster.engine_calls import LIBC, replace
from llamarl.net.entrance import BACKLOG, ignore_silent, num_unproved

YOUNG_S = 1.0
"""Nobody is put out before, unless there are twice as many as there is room for."""
PROOF_BYTES = 512
"""Who has sent more, and had an answer, has come further than a client's first message, and if Monarch has not hung up
on him, he has a certificate."""
LEAVE_S, PAUSE_S = 0.05, 0.001
"""Seconds for connections that were put out to be closed, before another is let in, and between two looks at them."""
_TCP_INFO, _BYTES = 11, slice(120, 136)
"""Linux's option that tells of a connection, and the place in it of the bytes that were acknowledged and received."""


_LOOK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_Known = tuple[int, float]
"""A connection's inode, and the second at which it came."""


@dataclass(slots=True)
class _Port:
    """Connections by their descriptors, the oldest first."""

    unproved: dict[int, _Known] = field(default_factory=dict)
    leaving: dict[int, _Known] = field(default_factory=dict)
    """Connections that were put out and may not be closed yet."""


_ports = dict[int, _Port]()
"""Ports by the descriptor that listens."""


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, use_errno=True)
def _listen(descriptor: int, backlog: int) -> int:
    _ports.pop(descriptor, None)
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            ignore_silent(one)
            _ports[descriptor] = _Port()
            backlog = BACKLOG
    return LIBC.listen(descriptor, backlog)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, use_errno=True)
def _accept4(descriptor: int, address: int, size: int, flags: int) -> int:
    while True:
        accepted = LIBC.accept4(descriptor, ctypes.c_void_p(address), ctypes.c_void_p(size), flags)
        if descriptor not in _ports:
            return accepted
        if accepted < 0:
            if ctypes.get_errno() != errno.EAGAIN:
                time.sleep(PAUSE_S)  # Monarch tries again at once
            return accepted
        if LIBC.recv(accepted, ctypes.create_string_buffer(1), 1, _LOOK):
            with suppress(OSError, MemoryError, struct.error):  # there is nothing left to look with
                _let_in(_ports[descriptor], accepted)
            return accepted
        LIBC.close(accepted)  # he has left without a word, as many do at once who were silent


def bound_strangers() -> None:
    """At the ports of Monarch's library, which has been imported."""
    for name, function in ((b"listen", _listen), (b"accept4", _accept4)):
        atexit.register(replace(name, function))


def _let_in(port: _Port, accepted: int) -> None:
    """Raises OSError: no descriptor is left to put anybody out by."""
    room, now_s = num_unproved(), time.monotonic()
    port.unproved.pop(accepted, None)  # of one that has gone
    port.unproved[accepted] = os.fstat(accepted).st_ino, now_s
    while len(port.unproved) > room:
        oldest, (inode, came_s) = next(iter(port.unproved.items()))
        if _is_unproved(oldest, inode):
            if now_s - came_s < YOUNG_S and len(port.unproved) <= 2 * room:
                break
            with socket.socket(fileno=os.dup(oldest)) as one:
                if os.fstat(one.fileno()).st_ino == inode:
                    with suppress(OSError):  # it has gone by itself
                        one.shutdown(socket.SHUT_RDWR)
            port.leaving[oldest] = inode, now_s
        del port.unproved[oldest]
    while len(port.leaving) > room and time.monotonic() < now_s + LEAVE_S:
        time.sleep(PAUSE_S)
        port.leaving = {one: known for one, known in port.leaving.items() if _is_unproved(one, known[0])}


def _is_unproved(descriptor: int, inode: int) -> bool:
    """It is still there, and has not shown a certificate."""
    with suppress(OSError):  # closed
        one = socket.socket(fileno=descriptor)
        try:
            acknowledged, received = struct.unpack("=QQ", one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 136)[_BYTES])
            return os.fstat(descriptor).st_ino == inode and (received <= PROOF_BYTES or acknowledged < 2)
        finally:
            one.detach()
    return False
