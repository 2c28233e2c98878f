"""Gives Monarch's library other functions of the system than those that it was linked to, where no setting serves."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
_DYNAMIC = 2
_STRTAB, _SYMTAB, _RELA, _RELASZ, _PLTRELSZ, _JMPREL, _RELACOUNT = 5, 6, 7, 8, 2, 23, 0x6FFFFFF9
_SLOTS = (6, 7, 1025, 1026)
"""Kinds of relocations that hold a function's address: x86-64's, then aarch64's. All numbers are of ELF."""
_READ, _READ_WRITE = 1, 3


def replace(name: bytes, function: Any) -> Callable[[], None]:
    """In Monarch's library, which has been imported; nowhere where there is no /proc.

    Args:
        function: ctypes' own, with `use_errno`; it must not raise.

    Returns:
        What puts the system's back, as a thread of Monarch's that calls Python while that ends would end the process.
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
    """Puts an address into a slot; returns the one that was there before."""
    page, size = slot // os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PAGE_SIZE")
    (before,) = _unpack("Q", slot)
    LIBC.mprotect(ctypes.c_void_p(page), size, _READ_WRITE)
    ctypes.c_void_p.from_address(slot).value = address
    LIBC.mprotect(ctypes.c_void_p(page), size, _READ)
    return before


def _slots(base: int, function: bytes) -> Iterator[int]:
    """Addresses where a library, loaded at `base`, keeps the address of a function of another one."""
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
