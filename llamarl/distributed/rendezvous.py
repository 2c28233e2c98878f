"""Rendezvous of processes that must find each other, and of ranks that hear of one that fails: a store in the process
that starts the ranks of an executor, or in one of two that pair up.

Who connects proves that it knows the secret, and so does the store; torch's `TCPStore` has none and listens at every
address. Others need nothing but the address and the secret, so they may be on other hosts. No torch.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

from llamarl.distributed.links import BROKEN, connect, open_entrance, own_address

ANSWER_S = 30.0
"""Seconds that the store has to take a request, beside what the request itself waits for."""


class Rendezvous(NamedTuple):
    """Address and secret that a rank must know to meet the others."""

    address: str
    """`host:port` of the store."""
    secret: str

    def connect(
        self, purpose: int | str | None = None, timeout_s: float = ANSWER_S, reach_s: float = math.inf
    ) -> Connection:
        """Connection to the store: for values, to hear and tell notes as a rank, or for what else is served there, by a
        name.

        Raises what is in `BROKEN`.
        """
        connection = connect(self.address, self.secret, timeout_s, reach_s)
        connection.send(purpose)
        return connection


class Note(NamedTuple):
    """Word of a rank, or the store, about a rank when work of all has ended."""

    rank: int
    kind: Literal["failed", "gone", "waited", "was"]
    """`failed` by itself; its process is `gone`; it `waited` for others; it `was` at something when others ended."""
    text: str
    """A sentence."""
    error: str = ""
    """Error of a rank that has failed."""


class RendezvousStore:
    """Values and notes of ranks that meet once, in threads that sleep while nothing is asked.

    It ends by itself: once all ranks have come nobody else can, and they are served until they leave.
    """

    def __init__(
        self,
        num_ranks: int | None = None,
        timeout_s: float | None = None,
        *,
        host: str = "127.0.0.1",
        secret: str = "",
        serve: Callable[[Connection, str], None] | None = None,
    ) -> None:
        """
        Args:
            num_ranks: that will come; None: any number, until `close`.
            timeout_s: it ends when nobody has come for so long.
            host: an address of this machine that the others can reach.
            secret: empty: a new one.
            serve: gets, in a thread each, connections of another purpose, which end as it returns.
        """
        secret = secret or secrets.token_hex(16)
        self._num_ranks, self._others = num_ranks, serve
        self._changed = threading.Condition()
        self._values = dict[str, bytes]()
        self._notes = list[Note]()
        self._watching = dict[int, Connection]()
        self._num_come = 0
        self._entrance, address = open_entrance(host, secret, self._serve, ANSWER_S, timeout_s)
        self.rendezvous = Rendezvous(address, secret)

    def close(self) -> None:
        """Nobody can come any more; those that are there are served until they leave."""
        self._entrance.close()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes | None]:
        """Their values, as soon as all are set; None for those that are not in time."""
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s)
            return [self._values.get(key) for key in keys]

    def _serve(self, connection: Connection) -> None:
        purpose = connection.recv()
        if isinstance(purpose, int):
            self._watch(connection, purpose)
        elif purpose is not None and self._others is not None:
            self._others(connection, purpose)
        while purpose is None and connection.poll(None):
            method, *arguments = connection.recv()
            connection.send(getattr(self, method)(*arguments))

    def _watch(self, connection: Connection, rank: int) -> None:
        """Notes from a rank, and to it, until it leaves or is gone."""
        with self._changed:
            self._num_come += 1
            is_last = self._num_come == self._num_ranks
        if is_last:
            self.close()
        try:
            with self._changed:
                self._watching[rank] = connection
                for note in self._notes:
                    connection.send(note)
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


def open_rendezvous(num_ranks: int, timeout_s: float) -> Rendezvous | None:
    """A new one, for ranks that are about to start; None: one rank has nobody to meet."""
    return RendezvousStore(num_ranks, timeout_s, host=own_address()).rendezvous if num_ranks > 1 else None
