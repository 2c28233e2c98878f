"""Monarch's sockets are files of this user, not names that every user of the machine can connect to.

On Linux it listens at abstract addresses, which have no owner, and whoever connects may have it start processes that
run code of his own. No setting of it changes that. So its library is given another `bind`, which makes such an address
a file in the temporary folder: only who may write to a socket's file can connect, and Monarch tells others the address
that it finds its socket has.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import secrets
import socket
import struct
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from llamarl.cluster.engine_calls import LIBC, replace

_log = logging.getLogger(__name__)
_LISTENS = 0x10000
"""Flag in /proc/net/unix."""


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
def _bind(descriptor: int, address: int, size: int) -> int:
    if size > 2 and ctypes.string_at(address, 3) == struct.pack("H", socket.AF_UNIX) + b"\0":
        path = Path(tempfile.gettempdir()) / f"m-{secrets.token_hex(8)}"
        own = struct.pack("H", socket.AF_UNIX) + bytes(path) + b"\0"
        return LIBC.bind(descriptor, own, len(own))
    return LIBC.bind(descriptor, ctypes.c_void_p(address), size)


def keep_private() -> None:
    """Makes Monarch's library, already imported, use files as sockets; without /proc it does so anyway."""
    atexit.register(replace(b"bind", _bind))


@cache
def warn_if_open() -> None:
    """Says once where that has not worked, when Monarch has begun to listen."""
    if open_to_all():
        _log.warning(
            "every user of this machine can have Monarch run code as you: its sockets are abstract; "
            "run in a container, or with cluster.kind = 'inline'"
        )


def open_to_all() -> list[str]:
    """Abstract addresses that this process listens at."""
    own = set[str]()
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):  # the descriptor of the listing itself
            own.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]] if own else []
    return [
        row[7] for row in rows if len(row) > 7 and row[6] in own and int(row[3], 16) & _LISTENS and row[7][0] == "@"
    ]
