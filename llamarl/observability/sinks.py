"""Sinks of metrics. One that fails loses rows and says so once; it never ends a run."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from llamarl.config import ConfigError, open_own
from llamarl.observability.files import compress, last_lines, lines, piece, pieces
from llamarl.observability.metrics import EvalMetrics, Row, StepMetrics

BLOCK_BYTES = 1 << 16
"""Evaluations end late, but never so many that their rows fill this after the row of a later step."""
LAST_PIECE_S = 60.0
"""Longest wait at the end for a piece that is being compressed; what is not, stays as it is."""
_BEGINS = re.compile(rb'\{(?:"kind": "\w+", )?"step": (\d+),')
"""Pattern of a row's beginning with its step: reading all of it would take twenty times as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkFailure:
    """Rows that a sink could not keep."""

    sink: str
    """Place where the rows should have gone, for example the path of a file."""
    reason: str
    """Reason that the system gave, for example `No space left on device`."""
    rows_lost: int
    """Rows lost so far."""

    def __str__(self) -> str:
        rows = "1 row" if self.rows_lost == 1 else f"{self.rows_lost} rows"
        return f"metrics: {rows} lost at {self.sink} ({self.reason}); the run continues"


class JsonlSink:
    """One JSON object per line, appended; each line reaches the system at once, one fsync at the end.

    A row that does not fit (disk full) is taken back to its first byte, so that every line of the file stays valid
    JSON; the next row is tried again. A file that is full becomes a piece beside it, which a thread compresses.
    """

    def __init__(self, path: Path, max_bytes: int = sys.maxsize) -> None:
        """Open `path`, of so many bytes at most, for appending and drop a torn last line.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._file = open_own(path, "a+b", buffering=0)
        self._size = _size_of_whole_lines(self._file)
        self._file.truncate(self._size)
        self._rows_lost = 0
        self._compressing = threading.Thread()
        self._compressing.start()
        self._compress()

    def write(self, row: Row) -> SinkFailure | None:
        """Appends a row. Raises ValueError: JSON has no word for a number in it."""
        line = f"{json.dumps(row, allow_nan=False)}\n".encode()
        try:
            if self._size and self._size + len(line) > self._max_bytes:
                self._rotate()
            self._write_all(line)
        except OSError as error:
            self._rows_lost += 1
            with suppress(OSError):  # a broken device refuses this too, and is reported already
                self._file.truncate(self._size)
            return self._failure(error)
        self._size += len(line)
        return None

    def _write_all(self, line: bytes) -> None:
        rest = line
        while rest:  # a nearly full disk takes a part first and refuses the rest
            rest = rest[self._file.write(rest) :]

    def _rotate(self) -> None:
        """Raises OSError: the file is as it was."""
        fresh = self._path.with_name(f".{self._path.name}.fresh")
        file = open_own(fresh, "w+b", buffering=0)
        *full, last = pieces(self._path)
        number = int(full[-1].name.split(".")[0].rpartition("-")[2]) + 1 if full else 1
        os.fsync(self._file.fileno())
        last.rename(piece(last, number))
        fresh.rename(last)
        self._file.close()
        self._file, self._size = file, 0
        self._compress()

    def _compress(self) -> None:
        """All full pieces, beside everything else."""
        before = self._compressing

        def work() -> None:
            before.join()
            for file in pieces(self._path)[:-1]:
                if file.suffix != ".gz":
                    compress(file)

        self._compressing = threading.Thread(target=work, name="compress", daemon=True)
        self._compressing.start()

    def drop_after(self, step: int) -> None:
        """Take back the rows of later steps: from the end, up to a block that has none of them.

        Raises:
            ConfigError: a line is no row; nothing has changed.
            OSError: a file cannot be rewritten; its rows up to `step` are there.
        """
        self._compressing.join()
        found = list[tuple[Path, Path, int, list[bytes]]]()
        for file in reversed(pieces(self._path)):
            plain = file.with_name(f".{file.name}.kept") if file.suffix == ".gz" else file
            if plain != file:
                with open_own(plain, "wb") as target:
                    _unpack(file, target)
            if file != self._path and not plain.stat().st_size:  # its rows were taken back before a crash
                for one in {file, plain, file.with_name(f"{file.name}.gz")}:
                    one.unlink(missing_ok=True)
                continue
            size, kept, is_enough = _tail(plain, step, file)
            if size:
                found.append((file, plain, size, kept))
            elif plain != file:
                plain.unlink()
            if is_enough:
                break
        for file, plain, size, kept in found:  # the newest first: what is cut short here is done by the next call
            is_empty = _cut(file, plain, size, kept)
            if file != self._path and is_empty:
                self._path.with_name(file.name.removesuffix(".gz")).unlink()
        self._file.close()
        self._file = open_own(self._path, "a+b", buffering=0)
        self._size = self._path.stat().st_size
        self._compress()

    def close(self) -> SinkFailure | None:
        self._compressing.join(LAST_PIECE_S)
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            return self._failure(error)
        finally:
            self._file.close()
        return self._failure(None) if self._rows_lost else None

    def _failure(self, error: OSError | None) -> SinkFailure:
        reason = error.strerror or str(error) if error else "see the first warning"
        return SinkFailure(sink=str(self._path), reason=reason, rows_lost=self._rows_lost)


def _cut(file: Path, plain: Path, size: int, kept: list[bytes]) -> bool:
    """Puts `kept` in the place of a file's last `size` bytes; whether nothing is left. `plain` is the file, or its text
    unpacked."""
    copy = file.with_name(f".{file.name}.kept")
    if kept and plain == file:  # a crash must not cost rows that stay
        copy.unlink(missing_ok=True)
        shutil.copyfile(file, plain := copy, follow_symlinks=False)
    with open_own(plain, "r+b") as opened:
        opened.seek(-size, os.SEEK_END)
        opened.truncate()
        opened.writelines(kept)
        is_empty = not opened.tell()
        if plain != file:
            os.fsync(opened.fileno())
    if file.suffix == ".gz":
        os.replace(plain, file.with_suffix(""))
        file.unlink()
    elif plain != file:
        os.replace(plain, file)
    return is_empty


def _unpack(file: Path, target: IO[bytes]) -> None:
    """Raises ConfigError: a compressed piece is damaged."""
    try:
        target.writelines(lines(file))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file} is damaged ({error}); move it away; only its rows are lost") from None


def _size_of_whole_lines(file: IO[bytes]) -> int:
    """Bytes up to and with the last newline."""
    end, found = file.seek(0, os.SEEK_END), -1
    while end and found < 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        end = start + found + 1 if found >= 0 else start
    return end


def _tail(plain: Path, step: int, file: Path) -> tuple[int, list[bytes], bool]:
    """The end of a file from the first row of a later step on: its bytes, those of its rows that stay, and whether no
    such row can be before it, in this file or the one before. Raises ConfigError: a line of `file`, which is the same
    or compressed, is no row."""
    size = looked = num_kept = 0
    kept = list[bytes]()
    for number, row in enumerate(last_lines(plain)):
        begins = _BEGINS.match(row)
        try:
            is_kept = int(begins[1] if begins and row.endswith(b"}") else json.loads(row)["step"]) <= step
        except (ValueError, TypeError, LookupError, RecursionError):
            place = f"{file}:{sum(1 for _ in lines(plain)) - number}"
            raise ConfigError(f"{place} is not a row of a run; remove this line") from None
        looked += len(row) + 1
        kept += [row + b"\n"] if is_kept else []
        if not is_kept:
            size, num_kept = looked, len(kept)
        elif looked - size > BLOCK_BYTES:
            return size, kept[:num_kept][::-1], True
    return size, kept[:num_kept][::-1], False


class RowLog:
    """A file of rows. `on_failure` hears once when it first fails, and once at the end; it never ends a run."""

    def __init__(
        self, path: Path | None, on_failure: Callable[[SinkFailure], None], max_bytes: int = sys.maxsize
    ) -> None:
        """None: nothing is kept. Raises OSError: the file cannot be opened."""
        self._sink = JsonlSink(path, max_bytes) if path else None
        self._on_failure = on_failure
        self._failed = False

    def write(self, row: Row) -> None:
        """Keeps one row."""
        failure = self._sink.write(row) if self._sink else None
        if failure and not self._failed:
            self._failed = True
            self._on_failure(failure)

    def drop_after(self, step: int) -> None:
        """Takes back the rows of later steps: a resumed run does those steps again. Raises OSError."""
        if self._sink:
            self._sink.drop_after(step)

    def close(self) -> None:
        """Rows that come later, of its own failure too, are kept by nobody."""
        sink, self._sink = self._sink, None
        if sink and (failure := sink.close()):
            self._on_failure(failure)


class Recorder(Protocol):
    """A place for rows of metrics besides `metrics.jsonl`. All calls return soon, and none raises."""

    def row(self, row: Row) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Facts about a run that a tracker is told at its start."""

    name: str
    """Name of the run."""
    folder: Path
    """Folder of the run."""
    settings: Mapping[str, Any]
    """All of them, as plain values."""
    port: int
    """`metrics.port`."""
    step: int
    """Done before; later ones of the same name are done again."""


class MetricsLog(RowLog):
    """`metrics.jsonl`: a line per step and evaluation."""

    recorder: Recorder | None = None
    """Gets the same rows."""

    def log(self, record: StepMetrics | EvalMetrics) -> None:
        row = record.to_json()
        self.write(row)
        if self.recorder:
            self.recorder.row(row)

    def close(self) -> None:
        super().close()
        if self.recorder:
            self.recorder.close()
