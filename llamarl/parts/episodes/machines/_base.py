"""`MachineBackend`, the base class of backends that start machines, and `Machine`, what they start. No torch."""

from __future__ import annotations

import functools
import io
import tarfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field

WORK = "/work"
"""Folder of a machine in which commands start and files are placed."""

STRICT = ConfigDict(extra="forbid")
"""Unknown options are errors."""

T = TypeVar("T")


def made_once(make: Callable[[], T]) -> Callable[[], T]:
    """Decorator. Threads that call the function at the same time get the same object, which `functools.cache` does not
    promise."""
    lock, cached = threading.Lock(), functools.cache(make)

    @functools.wraps(make)
    def the_one() -> T:
        with lock:
            return cached()

    return the_one


class MachineLost(Exception):
    """The machine ended, hung, or exceeded a limit of the whole machine. The policy is responsible: its episode is
    WRONG. Any other exception of a machine is a fault of the host or of the settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """MachineLimits of one machine."""

    __pydantic_config__ = STRICT

    memory_bytes: Annotated[int, Field(ge=1 << 27)] = 1 << 29
    """Memory of all processes of the machine, and address space of each."""
    disk_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 26
    """Bytes of all files that the machine writes, including temporary files and shared memory."""
    files: Annotated[int, Field(ge=64)] = 4096
    """Files and folders that the machine creates."""
    processes: Annotated[int, Field(ge=4)] = 64
    """Processes and threads at the same time."""
    cpu_s: Annotated[int, Field(ge=1)] = 120
    """CPU seconds of all processes of the machine."""
    network: bool = False
    """Whether the machine uses the network of the host, including its loopback services."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """Result of a command."""

    code: int
    """Exit code. 128 + N means signal N."""
    is_late: bool
    """Whether the command was killed at its time limit."""
    output: bytes
    """Standard output and standard error, of which at most `cap` bytes are kept: the first and the last half."""
    total: int
    """Bytes of the whole output."""


class Machine(ABC):
    """A machine. Used by one thread at a time, except `close`."""

    @abstractmethod
    def run(self, command: str, s: float, cap: int) -> CommandResult:
        """Runs a command in the shell of the machine for at most `s` seconds. Folder, variables, functions and aliases
        persist. At the time limit all processes of the machine are killed. Raises MachineLost."""

    @abstractmethod
    def ask(self, program: str, text: str, s: float, cap: int) -> CommandResult:
        """Passes a text to a Python program that lives as long as the machine, and is started by the first call. It
        reads `/run/shell/text` for each byte of descriptor 3, and writes a byte to descriptor 4 when it is done. At the
        time limit it is interrupted, and killed if it continues. Another code than 0 means that it has ended, and a new
        one starts with the next call. Raises MachineLost."""

    @abstractmethod
    def put(self, tar: bytes) -> None:
        """Unpacks files and folders below `/work`. Raises MachineLost, or OSError if they do not fit."""

    @abstractmethod
    def get(self, paths: Sequence[str], cap: int) -> bytes:
        """Kills all processes of the machine and returns the named regular files as a tar archive of at most `cap`
        bytes of content. Files that are missing, links or too large are not in it. Raises MachineLost."""

    @abstractmethod
    def close(self) -> None:
        """Ends the machine and everything in it. May be called twice, and by another thread."""


@dataclass
class MachineBackend(ABC):
    """Starts machines. Members are dataclasses whose fields are their options."""

    @abstractmethod
    def problem(self) -> str:
        """Returns why this host cannot start machines, in a few words. Empty means that it can."""

    @abstractmethod
    def start(self, folder: str | None, limits: MachineLimits) -> Machine:
        """Starts a machine with a copy of `folder` as `/work`. None means an empty folder.

        Raises:
            ConfigError: this host cannot start such a machine.
            OSError: the start failed.
        """


def pack(files: Mapping[str, bytes]) -> bytes:
    """Returns a tar archive of files by relative path."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def pack_folder(folder: str) -> bytes:
    """Returns a tar archive of the content of a folder of this host."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def unpack(tar: bytes, names: Sequence[str], cap: int) -> dict[str, bytes]:
    """Returns the regular files of an archive by name, of which only `names` are read and at most `cap` bytes in all.
    The archive may come from a hostile machine. Raises MachineLost if it is not an archive."""
    found = dict[str, bytes]()
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive:
            for entry in archive:
                if entry.name in names and entry.type == tarfile.REGTYPE and not entry.issparse():
                    cap -= entry.size
                    content = archive.extractfile(entry) if cap >= 0 else None
                    found |= {entry.name: content.read()} if content else {}
    except (tarfile.TarError, ValueError, EOFError, OSError) as error:
        raise MachineLost(f"the machine returned no archive: {error}") from None
    return found


def is_inside(path: str) -> bool:
    """Returns whether a relative path names a file below its folder."""
    parts = PurePosixPath(path).parts
    return bool(parts) and path == "/".join(parts) and path[0] != "/" and ".." not in parts and "\0" not in path


def is_owned_by(folder: str, uid: int, gid: int | None) -> bool:
    """Returns whether everything in a folder belongs to a user, and to a group. None means any group."""
    found = (path.lstat() for path in (Path(folder), *Path(folder).rglob("*")))
    return all(one.st_uid == uid and gid in (None, one.st_gid) for one in found)
