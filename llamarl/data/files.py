"""Reads rows from JSON Lines, JSON, CSV and Parquet files, by suffix. Text files may be compressed by gzip."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from llamarl.config import ConfigError, read_rows
from llamarl.config.load import MAX_ROW_BYTES, open_file, parse_json

PlacedRow = tuple[str, dict[str, Any]]
"""`file:line`, or `file:row` for files without lines, and the values by column."""
GIVEN = ".given"
"""Name of folders with rows from Python. File names there are digests."""
_FIX = "give the path of a data file"


def read_jsonl(path: Path) -> Iterator[PlacedRow]:
    """Yields an object per line. Raises ConfigError."""
    return read_rows(path, "give the path of a JSON Lines file")


def read_json(path: Path) -> Iterator[PlacedRow]:
    """Yields a list of objects, or JSON Lines in spite of the suffix. Raises ConfigError."""
    with _opened(path) as file:
        data = file.read()
    if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from read_jsonl(path)
        return
    try:
        rows = parse_json(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise _no_utf8(path) from None
        raise ConfigError(
            f"{path} is not valid JSON ({error}); give a list of objects, or one object per line"
        ) from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{path}:{number}: holds a JSON {type(row).__name__}, not an object; give a list of objects"
            )
        yield f"{path}:{number}", row


def read_csv(path: Path, delimiter: str = ",") -> Iterator[PlacedRow]:
    """Yields rows of text values. The first line names the columns. Raises ConfigError."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of the process; the default is too small for a long prompt
    with _opened(path) as raw:
        reader = csv.reader(io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{path}:1: the column {twice[0]!r} appears twice; rename one")
            for values in reader:
                if len(values) == len(names):
                    yield f"{path}:{reader.line_num}", dict(zip(names, values, strict=True))
                elif values:
                    raise ConfigError(
                        f"{path}:{reader.line_num}: has {len(values)} values for {len(names)} columns; put quotes "
                        "around values with commas or line breaks"
                    )
        except csv.Error as error:
            raise ConfigError(f"{path}:{reader.line_num}: malformed CSV ({error}); save it as CSV again") from None


def read_tsv(path: Path) -> Iterator[PlacedRow]:
    """Yields rows of CSV with tabs. Raises ConfigError."""
    return read_csv(path, "\t")


def read_parquet(path: Path) -> Iterator[PlacedRow]:
    """Yields rows with Python values of the columns' types, which may not exist in JSON. Raises ConfigError."""
    parquet = _parquet()
    try:
        with open_file(path) as file:
            table, number = parquet.ParquetFile(file), 0
            names = table.schema_arrow.names
            if twice := [name for name in names if names.count(name) > 1]:
                raise ConfigError(f"{path}: the column {twice[0]!r} appears twice; rename one")
            for batch in table.iter_batches(1024):
                for row in _rows_of(batch, path):
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, ValueError, TypeError, LookupError, NotImplementedError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"cannot read {path} as Parquet: {getattr(error, 'strerror', None) or error}; {_FIX}"
        ) from None


def _rows_of(batch: Any, path: Path) -> list[dict[str, Any]]:
    """Returns rows of a batch. Raises ConfigError for values outside of Python's range, such as the year 300,000."""
    try:
        return batch.to_pylist()
    except ArithmeticError as error:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist()
            except ArithmeticError:
                raise ConfigError(
                    f"{path}: the column {name!r} ({column.type}) holds a value out of range ({error}); correct "
                    "it, or leave the column out of the file"
                ) from None
        raise


READERS: dict[str, Callable[[Path], Iterator[PlacedRow]]] = {
    ".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".tsv": read_tsv, ".parquet": read_parquet,
}  # fmt: skip


def stem(path: str | Path) -> str:
    """Returns `train` for `data/train.jsonl.gz`."""
    return Path(Path(path).name.removesuffix(".gz")).stem


def suffix(path: str | Path) -> str:
    """Returns the suffix that decides how to read a file. Empty means that it is unknown."""
    name = Path(path).name.lower()
    found = Path(name.removesuffix(".gz")).suffix
    return found if found in READERS and not name.endswith(".parquet.gz") else ""


def read_file(path: str | Path) -> Iterator[PlacedRow]:
    """Yields the rows of a file, by its suffix.

    Raises:
        ConfigError: the suffix is unknown, the file is missing, empty or damaged, or a package is missing.
    """
    if not (found := suffix(path)):
        raise ConfigError(
            f"{path}: the file name does not tell its type; give a file whose name ends in {', '.join(READERS)}; "
            "text files may add .gz"
        )
    place = ""
    for place, row in READERS[found](Path(path)):
        yield place, row
    if not place:
        raise ConfigError(f"{path}:1: the file is empty; it needs rows")


def check_size(place: str, row: dict[str, Any]) -> None:
    """Raises ConfigError if a row is too long for a message, or contains invalid text."""
    try:
        size = len(json.dumps(row, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{place}: contains a lone surrogate such as \\ud800; remove it") from None
    if size > MAX_ROW_BYTES:
        raise ConfigError(f"{place}: is too long: a row may have {MAX_ROW_BYTES:,} bytes; shorten it")


def no_json(value: Any) -> str:
    """Returns the type of the first value that JSON cannot represent. Empty means that JSON can represent all."""
    if value is None or isinstance(value, str | int):
        return ""
    if isinstance(value, float):
        return "" if value - value == 0 else str(value)
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return next(filter(None, map(no_json, inside)), "")
    return "map" if isinstance(value, tuple) else type(value).__name__


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    try:
        with open_file(path) as raw, gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as file:
            yield file
    except UnicodeDecodeError:
        raise _no_utf8(path) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {_FIX}") from None


def _no_utf8(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not UTF-8; save it as UTF-8")


def _parquet() -> ModuleType:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ConfigError("Parquet files need the package pyarrow: pip install 'llamarl[data]'") from None
    return parquet
