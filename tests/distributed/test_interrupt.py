"""Collectives are ended between messages, not within one: gloo forgets who waits for the rest."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from llamarl.distributed import watch


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection, where there are no groups."""
    monkeypatch.setattr(watch, "_abort_process_group", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            yield one, other


class Sender(threading.Thread):
    """Sends until it is told to stop, or is refused."""

    def __init__(self, to: socket.socket) -> None:
        super().__init__()
        self._to, self.over, self.refused = to, threading.Event(), False
        self.start()

    def run(self) -> None:
        try:
            while not self.over.wait(0.005):
                self._to.sendall(b"x")
        except ConnectionError:
            self.refused = True


def end(one: socket.socket) -> float:
    """How long it took."""
    start_s = time.monotonic()
    watch.end_collectives({inode for inode, fd in watch.open_sockets().items() if fd == one.fileno()})
    return time.monotonic() - start_s


def test_at_once_when_all_wait(pair) -> None:
    one, other = pair
    assert end(one) >= watch.QUIET_S
    assert one.recv(1) == other.recv(1) == b"", "both ends see it"


def test_not_while_bytes_move(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    monkeypatch.setattr(watch, "QUIET_S", 1.0)
    monkeypatch.setattr(watch, "PATIENCE_S", 600.0)
    sender = Sender(other)
    threading.Timer(2.0, sender.over.set).start()
    assert 2.0 < end(one) < 120
    sender.join()
    assert not sender.refused


def test_bytes_that_never_stop_end_too(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    monkeypatch.setattr(watch, "PATIENCE_S", 0.2)
    sender = Sender(other)
    assert end(one) >= 0.2
    sender.join(240)
    assert sender.refused


def test_a_deaf_port_keeps_its_connections_and_takes_no_new_ones(pair) -> None:
    one, other = pair
    before = watch.open_sockets().keys()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as known:
        accepted, _ = listener.accept()
        with accepted:
            watch.drop_incoming(watch.open_sockets().keys() - before)
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), 0.3)
            known.sendall(b"x")
            assert accepted.recv(1) == b"x"
    one.sendall(b"y")
    assert other.recv(1) == b"y"
