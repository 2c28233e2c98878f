"""`MirrorKeeper`: keeps states of ranks on other hosts in this host's memory, in case those hosts are lost. No torch.

Each request uses its own connection to a keeper's address, authenticated by its secret. A state is a file of tensors
and a text, and is valid once both are complete.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llamarl.distributed.links import connect, keep_pace, open_entrance, receive, send

KEPT = 2
"""Number of kept states. After a failure, the step of the newest one may have to be repeated."""
SILENT_S = 5.0
"""Longest wait for the other end to receive or send some bytes."""
BLOCK_BYTES = 1 << 23
_NAME = re.compile(r"(?:[\w-]+/)*\d+-of-\d+/step-\d{8}")

Place = tuple[str, str]
"""Address, `host:port`, and secret of a keeper."""


class MirrorPlace(NamedTuple):
    """Folder where an executor's ranks keep their states in memory, and the keepers of other hosts."""

    run: str
    """A name that no other run has."""
    keepers: Sequence[Place] = ()


class NotKept(OSError):
    """A keeper refuses a state. The message says why."""


class MirrorKeeper:
    """The keeper of one host."""

    def __init__(self, folder: Path, host: str) -> None:
        """
        Args:
            folder: a folder in memory. The ranks of this host keep their own states there, too.
            host: an address of this host that the others can reach.
        """
        self._folder, secret = folder, secrets.token_hex(16)
        self._entrance, address = open_entrance(host, secret, self._serve, SILENT_S)
        self.place: Place = address, secret

    def close(self) -> None:
        self._entrance.close()

    def _serve(self, connection: Connection) -> None:
        what, *asked = connection.recv()
        {"free": self._free, "held": self._held, "give": self._give, "keep": self._keep}[what](connection, *asked)

    def _free(self, connection: Connection) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        connection.send(shutil.disk_usage(self._folder).free)

    def _held(self, connection: Connection, name: str) -> None:
        connection.send(held(self._folder / name) if ".." not in name else {})

    def _give(self, connection: Connection, name: str) -> None:
        path = self._path(name)
        with path.with_suffix(".tensors").open("rb") as file:
            size = file.seek(0, 2)
            connection.send((size, path.read_text()))
            file.seek(0)
            _put(connection, file)

    def _keep(self, connection: Connection, name: str, num_bytes: int, about: str) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        connection.send(f"{num_bytes} bytes are needed there, and {free} are free" if num_bytes > free else "")
        if num_bytes <= free:
            _take(connection, path, num_bytes, about)
            connection.send("")

    def _path(self, name: str) -> Path:
        """Returns the path of a state. Raises NotKept if the name is not valid."""
        if not _NAME.fullmatch(name):
            raise NotKept(f"{name!r} is not the name of a state")
        return self._folder / name


def held(folder: Path) -> dict[str, list[int]]:
    """Returns the steps of the complete states of each part, `RANK-of-NUMBER`, of an executor."""
    return {part.name: steps_of(part) for part in folder.glob("*-of-*")}


def steps_of(part: Path) -> list[int]:
    """Returns the steps of the complete states of one rank."""
    return sorted(int(path.name[5:]) for path in part.glob("step-" + "[0-9]" * 8))


def complete(path: Path, about: str) -> None:
    """Makes a state valid whose tensors are written. Removes states beyond KEPT, and those of ranks in another
    layout."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(about)
    unfinished.rename(path)
    oldest, (_, _, number) = steps_of(path.parent)[-KEPT:][0], path.parent.name.partition("-of-")
    for part in path.parent.parent.glob("*-of-*"):
        if part == path.parent or not part.name.endswith(f"-of-{number}"):
            for left in part.glob("step-*"):
                if int(left.name[5:13]) < oldest:
                    left.unlink(missing_ok=True)


def ask(keeper: Place, *request: Any) -> Any:
    """Sends a request to a keeper and returns its short answer. Raises the errors in `links.BROKEN`."""
    with connect(*keeper, SILENT_S) as connection:
        connection.send(request)
        return connection.recv()


def send_state(keeper: Place, path: Path) -> None:
    """Sends a state of this host to a keeper, which keeps it under the same name. Raises the errors in
    `links.BROKEN`."""
    tensors = path.with_suffix(".tensors")
    with connect(*keeper, SILENT_S) as connection, tensors.open("rb") as file:
        connection.send(("keep", name_of(path), tensors.stat().st_size, path.read_text()))
        if refused := connection.recv():
            raise NotKept(refused)
        _put(connection, file)
        connection.recv()


def fetch(keeper: Place, path: Path) -> None:
    """Copies a state from a keeper to this host, under the same name. Raises the errors in `links.BROKEN`."""
    with connect(*keeper, SILENT_S) as connection:
        connection.send(("give", name_of(path)))
        size, about = connection.recv()
        path.parent.mkdir(parents=True, exist_ok=True)
        _take(connection, path, size, about)


def name_of(path: Path) -> str:
    """Returns run, executor, part and step."""
    return "/".join(path.parts[-4:])


def _put(connection: Connection, file: BinaryIO) -> None:
    """Sends the rest of a file, paced for a high-latency or lossy link."""
    keep_pace(connection)
    while block := file.read(BLOCK_BYTES):
        send(connection, [memoryview(block)])


def _take(connection: Connection, path: Path, num_bytes: int, about: str) -> None:
    """Receives a state. An earlier state of this name is invalid meanwhile."""
    path.unlink(missing_ok=True)
    block = bytearray(min(num_bytes, BLOCK_BYTES))
    with path.with_suffix(".tensors").open("wb") as file:
        while num_bytes:
            piece = memoryview(block)[: min(num_bytes, BLOCK_BYTES)]
            receive(connection, [piece])
            file.write(piece)
            num_bytes -= len(piece)
    complete(path, about)
