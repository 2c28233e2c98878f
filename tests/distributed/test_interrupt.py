"""Collectives are ended between messages, not within one: gloo forgets who waits for the rest."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from llamarl.distributed import watch
from llamarl.distributed.links import Note
from tests.nightly import nightly


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


@nightly("real time; by day an error of gloo is no rank's own, and a watch stops after collectives")
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


def watched(end: Callable[[], None]) -> tuple[watch.Watch, Connection]:
    """The watch of rank 0 of 2, and where its notes come from."""
    store, connection = Pipe()
    return watch.Watch(connection, 0, 2, end), store


GONE = Note(1, "gone", "rank 1 is gone")


def test_a_watch_stops_once_collectives_have_ended() -> None:
    """Torch must not destroy groups while another thread aborts them."""
    began, ended = threading.Event(), threading.Event()

    def end() -> None:
        began.set()
        time.sleep(2 * watch.LAST_WORDS_S)
        ended.set()

    one, store = watched(end)
    with store:
        store.send(GONE)
        assert began.wait(60) and one.stop() and ended.is_set()


def test_a_watch_that_cannot_end_collectives_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "END_S", 0.1)
    began, over = threading.Event(), threading.Event()

    def end() -> None:
        began.set()
        over.wait(60)

    one, store = watched(end)
    with store:
        store.send(GONE)
        assert began.wait(60) and not one.stop()
        over.set()


def test_a_stopped_watch_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the process may have other groups."""
    told, ended = threading.Event(), threading.Event()
    one, store = watched(ended.set)
    monkeypatch.setattr(one, "_tell", lambda *_: told.set() or one._stopped.wait(60))
    with store:
        store.send(GONE)
        assert told.wait(60) and one.stop()
        one._listener.join(60)
    assert one.fired and not ended.is_set()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:7",
            "waited",
        ),
        ("Application timeout caused pair closure", "waited"),
        ("no luck", "failed"),
    ],
)
def test_an_error_of_gloo_is_no_rank_s_own(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide the rank that the others have waited for."""
    monkeypatch.setattr(watch, "LAST_WORDS_S", 0.1)
    one, store = watched(lambda: None)
    with store:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            one.cause(error)
        assert store.recv().kind == kind
        one.stop()
