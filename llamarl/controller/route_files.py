"""Files of recorded experts beside those of the journal: `journal/00000001.routes` beside `00000001.groups`.

They are most of what a mixture's rollouts weigh, and the only part that a run can do without: where they are lost, a
router chooses for itself. So rollouts name their arrays by digest, and what cannot be found here is not known of them.

A file holds frames: the xxh3-64 digest of an array, its size, its bytes. Equal arrays, as those of a prompt that many
rollouts share, are there once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from llamarl.observability.files import open_or_unpack

_FRAME = struct.Struct("<QQ")
Arrays = dict[int, Any]
"""Arrays by their digests."""
Named = tuple[str, int, int]
"""Type of an array's rows, as numpy writes it; its digest; its number of rows."""


def named(array: np.ndarray, into: Arrays) -> Named:
    """Name of an array, which `into` gets."""
    digest = xxhash.xxh3_64_intdigest(array.data)
    into[digest] = array
    return f"({array.shape[1]},){array.dtype.str}", digest, len(array)


def frames(arrays: Mapping[int, Any]) -> Iterator[bytes]:
    """Pieces of a file."""
    for digest, array in arrays.items():
        yield _FRAME.pack(digest, array.nbytes)
        yield array.tobytes()


class RouteFile:
    """Reads one; without the file, or where it is damaged, nothing is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._places: dict[int, tuple[int, int]] | None = None
        """Offset and size of each array by its digest; None: not read yet."""

    def find(self, name: Named) -> np.ndarray | None:
        """The array; None where it is not there as it was written."""
        kind, digest, num_rows = name
        dtype = np.dtype(kind)
        if self._places is None:
            self._places = dict(self._read())
        start, size = self._places.get(digest, (0, -1))
        if self._file is None or size != num_rows * dtype.itemsize:
            return None
        self._file.seek(start)
        data = self._file.read(size)
        if xxhash.xxh3_64_intdigest(data) != digest:
            return None
        width, base = dtype.shape[0], dtype.base
        return np.frombuffer(data, base).reshape(num_rows, width).copy()  # torch takes writable ones alone

    def _read(self) -> Iterator[tuple[int, tuple[int, int]]]:
        try:
            self._file = open_or_unpack(self._path)
        except OSError:
            return
        num_bytes, start = self._file.seek(0, os.SEEK_END), 0
        while start + _FRAME.size <= num_bytes:
            self._file.seek(start)
            digest, size = _FRAME.unpack(self._file.read(_FRAME.size))
            yield digest, (start + _FRAME.size, size)
            start += _FRAME.size + size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
