"""Where the ranks of an executor find each other, and hear of one that fails: a store in the process that starts them.

Who connects proves that it knows the secret, and so does the store; torch's `TCPStore` has none and listens at every
address. Ranks need nothing but the address and the secret, so they may be on other hosts. No torch.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from llamarl.distributed.links import BROKEN, accept, connect

ANSWER_S = 30.0
"""For the store to take a request, beside what the request itself waits for."""


class Rendezvous(NamedTuple):
    """What a rank must know to meet the others."""

    address: str
    """`host:port` of the store."""
    secret: str

    def connect(self, rank: int | None = None) -> Connection:
        """To the store: for requests, or to hear and tell notes as `rank`. Raises what is in `BROKEN`."""
        connection = connect(self.address, self.secret, ANSWER_S)
        connection.send(rank)
        return connection


class Note(NamedTuple):
    """What a rank, or the store, has to say of a rank when work of all has ended."""

    rank: int
    kind: Literal["failed", "gone", "waited", "was"]
    """By itself; its process has ended; for others; wherever it was when others ended."""
    text: str
    """A sentence."""
    error: str = ""
    """That of a rank that has failed."""


class RendezvousStore:
    """Values and notes of ranks that meet once. Runs in threads that sleep while nothing is asked."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """`host` is an address of this machine that the ranks can reach."""
        self._listener = socket.create_server((host, 0))
        self.rendezvous = Rendezvous(f"{host}:{self._listener.getsockname()[1]}", secrets.token_hex(16))
        self._changed = threading.Condition()
        self._values = dict[str, bytes]()
        self._notes = list[Note]()
        self._watching = dict[int, Connection]()
        threading.Thread(target=self._listen, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Nobody can come any more; those that are there are served until they leave."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
        self._listener.close()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes | None]:
        """Their values, as soon as all are set; None for those that are not in time."""
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s)
            return [self._values.get(key) for key in keys]

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(accepted,), name="rendezvous", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        with suppress(*BROKEN), accept(accepted, self.rendezvous.secret, ANSWER_S) as connection:
            if (rank := connection.recv()) is not None:
                self._watch(connection, rank)
            while rank is None and connection.poll(None):
                method, *arguments = connection.recv()
                connection.send(getattr(self, method)(*arguments))

    def _watch(self, connection: Connection, rank: int) -> None:
        """Notes from a rank, and to it, until it leaves or is gone."""
        with self._changed:
            self._watching[rank] = connection
            for note in self._notes:
                connection.send(note)
        try:
            while connection.poll(None) and (note := connection.recv()):  # nothing: it leaves
                self._tell(note)
        except BROKEN:
            self._tell(Note(rank, "gone", f"rank {rank} is gone"))
        with self._changed:
            del self._watching[rank]

    def _tell(self, note: Note) -> None:
        with self._changed:
            self._notes.append(note)
            for connection in self._watching.values():
                with suppress(*BROKEN):
                    connection.send(note)
