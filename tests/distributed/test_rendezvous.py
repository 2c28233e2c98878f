"""The store stays open, whatever happens to one connection."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing

import pytest

from llamarl.distributed.links import Note, RendezvousStore


def test_a_moment_without_descriptors_closes_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), "not now")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with closing(RendezvousStore(host="127.0.0.1")) as store, store.rendezvous.connect() as connection:
        connection.send(("set", "key", b"value"))
        assert connection.poll(240.0) and connection.recv() is None
    assert not failures


def test_a_rank_that_goes_while_it_is_told_what_was_is_gone() -> None:
    """What rank 0 said fills the way to rank 1, which leaves without reading it."""
    with closing(RendezvousStore(2, host="127.0.0.1")) as store, store.rendezvous.connect(0) as first:
        first.send(Note(0, "was", "x" * (32 << 20)))
        assert first.poll(240.0) and first.recv().rank == 0
        with store.rendezvous.connect(1) as second:
            os.read(second.fileno(), 1)  # it is being told
        assert first.poll(240.0)
        gone = first.recv()
        assert (gone.rank, gone.kind) == (1, "gone")
        first.send(None)
