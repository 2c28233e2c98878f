"""Ends the collectives that this process waits in: NCCL's by its abort, gloo's with an error.

torch 2.13 knows no abort of gloo: `abort` and `shutdown` of its groups return at once while another thread of the
process goes on waiting, and a time limit would have to pass. What does end a wait is the end of a connection, so those
that were opened with the groups are shut down.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import time
from collections.abc import Set
from contextlib import suppress

from torch.distributed.distributed_c10d import _abort_process_group

QUIET_S = 0.05
"""So long no byte has moved before connections are shut down."""
PATIENCE_S = 2.0
"""Seconds after which connections are shut down all the same."""
_SO_ATTACH_FILTER = 26
_TCP_INFO, _BYTES = 11, slice(120, 136)
"""Linux's option that tells of a connection, and where its answer has the bytes acknowledged and received."""


def open_sockets() -> dict[int, int]:
    """Inodes and descriptors of this process's sockets."""
    found = dict[int, int]()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def deafen(sockets: Set[int]) -> None:
    """Makes those of `sockets` that listen deaf: the system drops what comes for them.

    gloo goes on listening when all ranks have met, accepts whoever comes, and ends the process when it cannot.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a filter's one instruction: keep 0 bytes
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    for inode, descriptor in open_sockets().items():
        if inode in sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # closed meanwhile
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def end_collectives(sockets: Set[int]) -> None:
    """`sockets` are those of the ranks' connections, by their inodes."""
    deadline_s = time.monotonic() + PATIENCE_S
    before = None
    while (moved := _traffic(sockets)) != before and time.monotonic() < deadline_s:
        before = moved
        time.sleep(QUIET_S)
    for inode, descriptor in open_sockets().items():
        if inode in sockets:
            _shut_down(descriptor)
    _abort_process_group()


def _traffic(sockets: Set[int]) -> dict[int, bytes]:
    """Raw counters of what has gone through each socket, by inode."""
    found = dict[int, bytes]()
    for inode, descriptor in open_sockets().items():
        if inode in sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # closed meanwhile, or no TCP
                found[inode] = one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES.stop)[_BYTES]
    return found


def _shut_down(descriptor: int) -> None:
    """Both ends of a TCP connection see its end; one that listens stays, as gloo would end the process."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family != socket.AF_UNIX and one.getpeername():
            one.shutdown(socket.SHUT_RDWR)
