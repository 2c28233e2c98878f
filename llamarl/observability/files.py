"""Atomic writes of whole files, and row files in several pieces that readers see as one file."""

from __future__ import annotations

import errno
import gzip
import io
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import xxhash

from llamarl.config import open_file, open_own, read_rows

MAX_RUN_ROW_BYTES = 1 << 30
"""Most bytes of a row: long rollouts have many tokens, with two log-probabilities each."""
_BLOCK_BYTES = 1 << 14
_PIECE_BYTES = 512
"""Bytes of a compressed file to read at a time, so that everything before a damaged part is read."""
PIECE_NAME = r"(metrics|rollouts|events)-\d{5}\.jsonl(\.gz)?"
"""Regular expression of full pieces."""


def write_atomically(path: Path, text: str | bytes | Iterable[str]) -> None:
    """Replaces `path` by `text`, or by its joined parts, once everything is on disk.

    Raises:
        OSError: the disk refuses. The old content of `path` is unchanged.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")  # several writers may write the same file
    try:
        is_binary = isinstance(text, bytes)
        with open_own(partial, "xb" if is_binary else "x") as file:
            file.writelines([text] if isinstance(text, str | bytes) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def remedy(error: OSError) -> str:
    """Returns what the user can do about a file that cannot be written."""
    name = f"{error.filename}" if error.filename else "its place"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return f"move {name}, or the file in place of its folder, away"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"allow this user to write {name}"
    return "free space on the disk"


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def piece(path: Path, number: int) -> Path:
    """Returns the path of a full piece of `path`. Compressed pieces end with `.gz`."""
    return path.with_name(f"{path.stem}-{number:05d}{path.suffix}")


def pieces(path: Path) -> list[Path]:
    """Returns the files that together have the rows of `path`, in order: full pieces, then the current file."""
    full = path.parent.glob(f"{path.stem}-{'[0-9]' * 5}{path.suffix}*")
    chosen = {file.name.removesuffix(".gz"): file for file in sorted(full, reverse=True)}  # prefers the uncompressed
    return [*(chosen[name] for name in sorted(chosen)), path]


def lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a piece. Raises OSError."""
    with open_file(path) as raw, gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as file:
        yield from file


def last_lines(path: Path) -> Iterator[bytes]:
    """Yields the complete lines of an uncompressed file, the last one first. Raises OSError."""
    with open_file(path) as file:
        end, rest, is_torn = file.seek(0, os.SEEK_END), b"", True
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            rest, *lines_after = (file.read(end - start) + rest).split(b"\n")
            yield from reversed(lines_after[:-1] if is_torn else lines_after)
            end, is_torn = start, is_torn and not lines_after
        if not is_torn:
            yield rest


def read_run_rows(path: str | Path, fix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of all pieces, as `read_rows` does. Raises ConfigError."""
    *full, last = pieces(Path(path))
    if not full or not last.exists() or last.stat().st_size:
        full.append(last)
    for file in full:
        yield from read_rows(file, fix, MAX_RUN_ROW_BYTES)


def compress(path: Path) -> None:
    """Replaces a full piece by a compressed file, after reading it back. If the disk refuses, the piece stays
    readable."""
    partial = path.with_name(f".{path.name}.gz.partial")
    with suppress(OSError, EOFError, zlib.error):
        with path.open("rb") as source, _new(partial) as raw, gzip.open(raw, "wb", compresslevel=1) as file:
            shutil.copyfileobj(source, file, 1 << 20)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        with gzip.open(partial) as written:
            while written.read(1 << 20):
                pass
        partial.rename(path.with_name(f"{path.name}.gz"))
        path.unlink()
    partial.unlink(missing_ok=True)


def _new(path: Path) -> IO[bytes]:
    """Creates a file and replaces leftovers of a killed process or another user. Raises OSError."""
    path.unlink(missing_ok=True)
    return open_own(path, "xb")


def open_or_unpack(path: Path, most: int = sys.maxsize) -> IO[bytes]:
    """Opens a file, or unpacks about `most` bytes of its compressed piece, up to any damage. Raises OSError."""
    with suppress(FileNotFoundError):
        return path.open("rb")
    data, unpacking = io.BytesIO(), zlib.decompressobj(wbits=31)  # gzip format
    with suppress(zlib.error), path.with_name(f"{path.name}.gz").open("rb") as file:
        while data.tell() < most and (piece := file.read(_PIECE_BYTES)):
            data.write(unpacking.decompress(piece))
    return data


def code_fingerprint() -> str:
    """Returns a digest of the names and contents of all Python and C++ files of this package."""
    package, digest = Path(__file__).parents[1], xxhash.xxh3_64()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
