"""The store stays open, whatever happens to one connection."""

from __future__ import annotations

import errno
import socket
from contextlib import closing

import pytest

from llamarl.distributed.rendezvous import RendezvousStore


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
