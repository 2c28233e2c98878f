"""Monarch's sockets are files of this user, not names that every user of the machine can connect to.

On Linux it listens at abstract addresses, which have no owner, and whoever connects may have it start processes that
run code of his own. No setting of it changes that. So its library is given another `bind`, which makes such an address
a file in the temporary folder: only who may write to a socket's file can connect, and Monarch tells others the address
that it finds its socket has.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)
_DYNAMIC = 2
_STRTAB, _SYMTAB, _RELA, _RELASZ, _PLTRELSZ, _JMPREL, _RELACOUNT = 5, 6, 7, 8, 2, 23, 0x6FFFFFF9
_SLOTS = (6, 7, 1025, 1026)
"""Kinds of relocations that hold a function's address: x86-64's, then aarch64's. All numbers are of ELF."""
_READ, _READ_WRITE = 1, 3
_libc = ctypes.CDLL(None, use_errno=True)
_LISTENS = 0x10000
"""Flag in /proc/net/unix."""


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
def _bind(descriptor: int, address: int, size: int) -> int:
    if size > 2 and ctypes.string_at(address, 3) == struct.pack("H", socket.AF_UNIX) + b"\0":
        path = Path(tempfile.gettempdir()) / f"m-{secrets.token_hex(8)}"
        own = struct.pack("H", socket.AF_UNIX) + bytes(path) + b"\0"
        return _libc.bind(descriptor, own, len(own))
    return _libc.bind(descriptor, ctypes.c_void_p(address), size)


def keep_private() -> None:
    """Of Monarch's library, which has been imported; where there is no /proc, its sockets are files."""
    library = str(sys.modules["monarch._rust_bindings"].__file__)
    with suppress(FileNotFoundError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        base = min(int(line.split("-")[0], 16) for line in lines if line.endswith(library))
        page, ours = os.sysconf("SC_PAGE_SIZE"), ctypes.cast(_bind, ctypes.c_void_p).value
        for slot in _slots(base, b"bind"):
            start = slot // page * page
            _libc.mprotect(ctypes.c_void_p(start), page, _READ_WRITE)
            ctypes.c_void_p.from_address(slot).value = ours
            _libc.mprotect(ctypes.c_void_p(start), page, _READ)


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


def _slots(base: int, function: bytes) -> Iterator[int]:
    """Where a library, loaded at `base`, keeps the address of a function of another one."""
    header, size, count = _unpack("Q", base + 32)[0], *_unpack("HH", base + 54)
    programs = [_unpack("IIQQQQ", base + header + number * size) for number in range(count)]
    place, length = next((one[3], one[5]) for one in programs if one[0] == _DYNAMIC)
    found = dict[int, int]()
    for entry in range(base + place, base + place + length, 16):
        tag, found[tag] = _unpack("QQ", entry)
    tables = {tag: value if value > base else base + value for tag, value in found.items()}
    skipped = found.get(_RELACOUNT, 0) * 24  # those need no symbol
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
