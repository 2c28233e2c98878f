"""Ends the collectives that this process waits in: NCCL's by its abort, gloo's with an error.

torch 2.13 knows no abort of gloo: `abort` and `shutdown` of its groups return at once while another thread of the
process goes on waiting, and a time limit would have to pass. What does end a wait is the end of a connection, so those
that were opened with the groups are shut down.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Set
from contextlib import suppress

from torch.distributed.distributed_c10d import _abort_process_group


def open_sockets() -> dict[int, int]:
    """Inodes and descriptors of this process's sockets."""
    found = dict[int, int]()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def end_collectives(sockets: Set[int]) -> None:
    """`sockets` are those of the ranks' connections, by their inodes."""
    for inode, descriptor in open_sockets().items():
        if inode in sockets:
            _shut_down(descriptor)
    _abort_process_group()


def _shut_down(descriptor: int) -> None:
    """Both ends of a TCP connection see its end; one that listens stays, as gloo would end the process."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family != socket.AF_UNIX and one.getpeername():
            one.shutdown(socket.SHUT_RDWR)
