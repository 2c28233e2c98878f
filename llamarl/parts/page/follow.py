"""`RowReader`: reads the rows of a growing file of a run, each byte once."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from llamarl.observability.files import pieces

CHUNK_ROWS = 500
"""Maximum rows per call, so that a reader stays responsive while it catches up."""


class RowOffset(NamedTuple):
    """Position of a row in a file that may be split into pieces."""

    piece: int
    """Number of the piece."""
    offset: int
    """Byte offset of the row in the decompressed piece."""


class RowReader:
    """Reads rows. Not thread-safe. Counts and skips lines that are not JSON objects. Waits for an incomplete last
    row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_damaged = 0
        self._restart()

    def _restart(self) -> None:
        self._full = pieces(self._path)[:-1]
        self._piece, self._offset, self._rest = 0, 0, b""
        self._file: IO[bytes] | gzip.GzipFile | None = None

    def was_replaced(self) -> bool:
        """Returns whether the run removed rows or started again, so that all rows are read again."""
        if self._newest_size() >= self._offset:
            return False
        full = pieces(self._path)[:-1]
        is_another = self._file is not None and self._piece == len(self._full) == len(full) and self._path.exists()
        if is_another or len(full) < len(self._full):
            self.close()
            self._restart()
            return True
        return False

    def _newest_size(self) -> int:
        """Returns the size of the open file if it is still the file being written, otherwise -1. Usually enough to
        detect news."""
        with suppress(OSError):
            if self._file is not None and os.path.samestat(now := os.stat(self._path), os.fstat(self._file.fileno())):
                return now.st_size
        return -1

    def raw(self) -> Iterator[tuple[RowOffset, bytes]]:
        """Yields at most `CHUNK_ROWS` complete new lines, and their positions."""
        num = 0
        while num < CHUNK_ROWS:
            if self._file is None and not self._open():
                return
            assert self._file is not None
            line = b""
            with suppress(EOFError, zlib.error, OSError):  # a piece that a crash truncated
                line = self._file.readline()
            if line:
                self._rest += line
                if self._rest.endswith(b"\n"):
                    place, whole = RowOffset(self._piece, self._offset), self._rest
                    self._offset, self._rest = self._offset + len(whole), b""
                    num += 1
                    yield place, whole
                continue
            if self._newest_size() >= 0:
                return  # more may come
            full, before = pieces(self._path)[:-1], self._full
            self._full = full
            if self._piece >= len(full):
                return
            if len(full) != len(before):
                continue  # the file became a piece just now, perhaps with more rows
            self.num_damaged += bool(self._rest)
            self.close()
            self._piece, self._offset, self._rest = self._piece + 1, 0, b""

    def rows(self) -> Iterator[tuple[RowOffset, dict[str, Any]]]:
        """Yields at most `CHUNK_ROWS` complete new rows, parsed, and their positions."""
        for place, line in self.raw():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield place, row
            else:
                self.num_damaged += 1

    def read(self, places: Iterable[RowOffset]) -> Iterator[dict[str, Any]]:
        """Yields earlier rows again, in the order of the file. Skips rows that no longer exist."""
        of_piece = dict[int, list[int]]()
        for piece, offset in sorted(places):
            of_piece.setdefault(piece, []).append(offset)
        for piece, offsets in of_piece.items():
            with suppress(OSError, EOFError, zlib.error, ValueError), self._opened(piece) as file:
                for offset in offsets:
                    file.seek(offset)
                    row = json.loads(file.readline())
                    if isinstance(row, dict):
                        yield row

    @property
    def is_torn(self) -> bool:
        """Returns whether the newest file ends within a row."""
        return bool(self._rest)

    def _opened(self, number: int) -> IO[bytes] | gzip.GzipFile:
        files = pieces(self._path)
        path = files[min(number, len(files) - 1)]
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")

    def _open(self) -> bool:
        try:
            self._file = self._opened(self._piece)
            self._file.seek(self._offset + len(self._rest))
        except (OSError, EOFError, zlib.error):
            return False
        return True

    def close(self) -> None:
        """Closes the open file. A later read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
