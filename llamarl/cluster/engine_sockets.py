"""Sockets of Monarch, the engine of executors: private to their user, and safe from unknown clients.

No setting of Monarch changes either. So its library gets replacements for functions of the system.

- `bind`: on Linux, Monarch listens at abstract addresses. These have no owner, and any user who connects can have it
  run code. With the new `bind`, such an address becomes a file in the temporary folder, which only its user can connect
  to. Monarch tells others the address that it reads from its socket.
- `listen` and `accept4`: Monarch accepts any connection and waits for its certificate without a limit, until the
  process has no descriptor left. The new `listen` leaves connections without data to the kernel. The new `accept4`
  closes the oldest connection without a certificate, as `net/entrance.py` does for our own ports.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import os
import secrets
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llamarl.net.entrance import BACKLOG, defer_accept, max_unauthenticated

LIBC = ctypes.CDLL(None, use_errno=True)
_DYNAMIC = 2
_STRTAB, _SYMTAB, _RELA, _RELASZ, _PLTRELSZ, _JMPREL, _RELACOUNT = 5, 6, 7, 8, 2, 23, 0x6FFFFFF9
_SLOTS = (6, 7, 1025, 1026)
"""Kinds of relocations that hold a function's address: x86-64's, then aarch64's. All numbers are of ELF."""
_READ, _READ_WRITE = 1, 3
_log = logging.getLogger(__name__)
_LISTENS = 0x10000
"""Flag in /proc/net/unix."""
YOUNG_S = 1.0
"""No connection is closed before this age, unless there are more than twice as many as allowed."""
PROOF_BYTES = 512
"""A client that has sent more and was answered is beyond its first message. If Monarch has not closed its connection,
it has a certificate."""
LEAVE_S, PAUSE_S = 0.05, 0.001
"""Longest wait for closed connections to be gone before another is accepted, and interval between two checks."""
_TCP_INFO, _BYTES = 11, slice(120, 136)
"""Linux's option with statistics of a connection, and the place of the acknowledged and received bytes in its
answer."""


_LOOK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_Known = tuple[int, float]
"""A connection's inode, and the time at which it arrived."""


def replace(name: bytes, function: Any) -> Callable[[], None]:
    """Replaces a function that Monarch's library calls. The library must be imported. Does nothing on a system without
    /proc.

    Args:
        function: a ctypes function with `use_errno`, which must not raise.

    Returns:
        A function that restores the system's. Call it before Python ends: a thread of Monarch's that calls Python then
        would crash the process.
    """
    library = os.path.realpath(str(sys.modules["monarch._rust_bindings"].__file__))
    before = dict[int, int]()
    with suppress(FileNotFoundError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        ours = ctypes.cast(function, ctypes.c_void_p).value or 0
        if starts := [int(line.split("-")[0], 16) for line in lines if line.endswith(library)]:
            before = {slot: _put(slot, ours) for slot in _slots(min(starts), name)}

    def restore() -> None:
        for slot, address in before.items():
            _put(slot, address)

    return restore


def _put(slot: int, address: int) -> int:
    """Writes an address into a slot. Returns the previous one."""
    page, size = slot // os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PAGE_SIZE")
    (before,) = _unpack("Q", slot)
    LIBC.mprotect(ctypes.c_void_p(page), size, _READ_WRITE)
    ctypes.c_void_p.from_address(slot).value = address
    LIBC.mprotect(ctypes.c_void_p(page), size, _READ)
    return before


def _slots(base: int, function: bytes) -> Iterator[int]:
    """Yields addresses where a library, loaded at `base`, keeps the address of an imported function."""
    header, size, count = _unpack("Q", base + 32)[0], *_unpack("HH", base + 54)
    programs = [_unpack("IIQQQQ", base + header + number * size) for number in range(count)]
    place, length = next((one[3], one[5]) for one in programs if one[0] == _DYNAMIC)
    found = dict[int, int]()
    for entry in range(base + place, base + place + length, 16):
        tag, found[tag] = _unpack("QQ", entry)
    tables = {tag: value if value > base else base + value for tag, value in found.items()}
    skipped = found.get(_RELACOUNT, 0) * 24  # relative relocations have no symbol
    for begin, end in (
        (tables[_RELA] + skipped, tables[_RELA] + found[_RELASZ]),
        (tables.get(_JMPREL, 0), tables.get(_JMPREL, 0) + found.get(_PLTRELSZ, 0)),
    ):
        for entry in range(begin, end, 24):
            offset, kind, symbol = _unpack("QII", entry)
            name = tables[_STRTAB] + _unpack("I", tables[_SYMTAB] + 24 * symbol)[0]
            if kind in _SLOTS and ctypes.string_at(name) == function:
                yield base + offset


def _unpack(layout: str, address: int) -> tuple[int, ...]:
    return struct.unpack(f"={layout}", ctypes.string_at(address, struct.calcsize(f"={layout}")))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
def _bind(descriptor: int, address: int, size: int) -> int:
    if size > 2 and ctypes.string_at(address, 3) == struct.pack("H", socket.AF_UNIX) + b"\0":
        path = Path(tempfile.gettempdir()) / f"m-{secrets.token_hex(8)}"
        own = struct.pack("H", socket.AF_UNIX) + bytes(path) + b"\0"
        return LIBC.bind(descriptor, own, len(own))
    return LIBC.bind(descriptor, ctypes.c_void_p(address), size)


def keep_private() -> None:
    """Makes Monarch's library, already imported, use files as sockets. Without /proc it does so by itself."""
    atexit.register(replace(b"bind", _bind))


@cache
def warn_if_open() -> None:
    """Warns once, after Monarch has begun to listen, if its sockets are not private."""
    if open_to_all():
        _log.warning(
            "every user of this machine can have Monarch run code as you: its sockets are abstract; "
            "run in a container, or with cluster.kind = 'inline'"
        )


def open_to_all() -> list[str]:
    """Returns the abstract addresses at which this process listens."""
    own = set[str]()
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):  # the descriptor of the listing itself
            own.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]] if own else []
    return [
        row[7] for row in rows if len(row) > 7 and row[6] in own and int(row[3], 16) & _LISTENS and row[7][0] == "@"
    ]


@dataclass(slots=True)
class _Port:
    """Connections by their descriptors, the oldest first."""

    unproved: dict[int, _Known] = field(default_factory=dict)
    leaving: dict[int, _Known] = field(default_factory=dict)
    """Connections that were closed for newer ones and may still have their descriptors."""


_ports = dict[int, _Port]()
"""Ports by the descriptor that listens."""


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, use_errno=True)
def _listen(descriptor: int, backlog: int) -> int:
    _ports.pop(descriptor, None)
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            defer_accept(one)
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
            with suppress(OSError, MemoryError, struct.error):  # no memory or descriptor is left for the check
                _let_in(_ports[descriptor], accepted)
            return accepted
        LIBC.close(accepted)  # the client left without sending data, as many do at once after a long silence


def limit_unauthenticated() -> None:
    """Limits unauthenticated connections at the ports of Monarch's library, which must be imported."""
    for name, function in ((b"listen", _listen), (b"accept4", _accept4)):
        atexit.register(replace(name, function))


def _let_in(port: _Port, accepted: int) -> None:
    """Registers a connection and closes the oldest ones beyond the limit. Raises OSError if no descriptor is left for
    that."""
    room, now_s = max_unauthenticated(), time.monotonic()
    port.unproved.pop(accepted, None)  # the entry of an earlier connection
    port.unproved[accepted] = os.fstat(accepted).st_ino, now_s
    while len(port.unproved) > room:
        oldest, (inode, came_s) = next(iter(port.unproved.items()))
        if _is_unproved(oldest, inode):
            if now_s - came_s < YOUNG_S and len(port.unproved) <= 2 * room:
                break
            with socket.socket(fileno=os.dup(oldest)) as one:
                if os.fstat(one.fileno()).st_ino == inode:
                    with suppress(OSError):  # the client has disconnected
                        one.shutdown(socket.SHUT_RDWR)
            port.leaving[oldest] = inode, now_s
        del port.unproved[oldest]
    while len(port.leaving) > room and time.monotonic() < now_s + LEAVE_S:
        time.sleep(PAUSE_S)
        port.leaving = {one: known for one, known in port.leaving.items() if _is_unproved(one, known[0])}


def _is_unproved(descriptor: int, inode: int) -> bool:
    """Returns whether a connection is open and has not shown a certificate."""
    with suppress(OSError):  # closed
        one = socket.socket(fileno=descriptor)
        try:
            acknowledged, received = struct.unpack("=QQ", one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 136)[_BYTES])
            return os.fstat(descriptor).st_ino == inode and (received <= PROOF_BYTES or acknowledged < 2)
        finally:
            one.detach()
    return False
