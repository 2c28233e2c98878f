"""Where metrics go. A sink that fails loses rows and says so once; it never ends a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamarl.config.errors import ConfigError
from llamarl.observability.metrics import EvalMetrics, Row, StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkFailure:
    """Rows that a sink could not keep."""

    sink: str
    """Where they should have gone, for example the path of a file."""
    reason: str
    """What the system said, for example `No space left on device`."""
    rows_lost: int
    """Rows lost so far."""

    def __str__(self) -> str:
        rows = "1 row" if self.rows_lost == 1 else f"{self.rows_lost} rows"
        return f"metrics: {rows} lost at {self.sink} ({self.reason}); the run goes on"


class JsonlSink:
    """One JSON object per line, appended; each line reaches the system at once, one fsync at the end.

    A row that does not fit (disk full) is taken back to its first byte, so that every line of the file stays valid
    JSON; the next row is tried again.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` for appending and drop a torn last line.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._size = _size_of_whole_lines(path)
        self._file.truncate(self._size)
        self._rows_lost = 0

    def write(self, row: Row) -> SinkFailure | None:
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
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

    def drop_after(self, step: int) -> None:
        """Take back the rows of later steps.

        Raises:
            ConfigError: a line is no row.
            OSError: the file cannot be rewritten; it is as it was.
        """
        kept = self._path.with_name(f".{self._path.name}.kept")
        with self._path.open("rb") as rows, kept.open("wb") as file:
            for number, row in enumerate(rows, start=1):
                try:
                    is_kept = json.loads(row)["step"] <= step
                except (ValueError, TypeError, LookupError, RecursionError):
                    raise ConfigError(f"{self._path}:{number} is no row that a run wrote; remove this line") from None
                if is_kept:
                    file.write(row)
        self._file.close()
        os.replace(kept, self._path)
        self._file = self._path.open("a+b", buffering=0)
        self._size = self._path.stat().st_size

    def close(self) -> SinkFailure | None:
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


def _size_of_whole_lines(path: Path) -> int:
    """Bytes up to and with the last newline."""
    return path.read_bytes().rfind(b"\n") + 1


class RowLog:
    """A file of rows. `on_failure` hears once when it first fails, and once at the end; it never ends a run."""

    def __init__(self, path: Path | None, on_failure: Callable[[SinkFailure], None]) -> None:
        """None: nothing is kept. Raises OSError: the file cannot be opened."""
        self._sink = JsonlSink(path) if path else None
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
        if self._sink and (failure := self._sink.close()):
            self._on_failure(failure)


class MetricsLog(RowLog):
    """`metrics.jsonl`: a line per step and evaluation."""

    def log(self, record: StepMetrics | EvalMetrics) -> None:
        self.write(record.to_json())
