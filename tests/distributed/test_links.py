"""Who connects must know the secret: strangers, what they send, and what they have overheard."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from llamarl.distributed.links import BROKEN, accept, connect

SECRET, WAIT_S = "0123456789abcdef", 5.0


class Door:
    """Accepts one connection at a time, as all that listens here does."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self._pool = ThreadPoolExecutor(1)

    def open(self) -> Future[Connection]:
        return self._pool.submit(lambda: accept(self.listener.accept()[0], SECRET, WAIT_S))

    def close(self) -> None:
        self.listener.close()
        self._pool.shutdown()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def test_who_knows_the_secret_is_let_in(door: Door) -> None:
    inside = door.open()
    with connect(door.place, SECRET, WAIT_S) as outside, inside.result(WAIT_S) as other:
        outside.send("hello")
        assert other.recv() == "hello"


def test_what_was_overheard_opens_nothing(door: Door) -> None:
    """All that a member once sent is sent again: challenges are fresh."""
    overheard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as middle:
        inside = door.open()

        def relay() -> None:
            near, far = middle.accept()[0], socket.create_connection(("127.0.0.1", int(door.place.split(":")[1])))
            with near, far:
                back = threading.Thread(target=_pump, args=(far, near, bytearray()))
                back.start()
                _pump(near, far, overheard)
                back.join()

        relaying = threading.Thread(target=relay)
        relaying.start()
        connect(f"127.0.0.1:{middle.getsockname()[1]}", SECRET, WAIT_S).close()
        inside.result(WAIT_S).close()
        relaying.join(WAIT_S)
    assert len(overheard) > 40
    again = door.open()
    with socket.create_connection(("127.0.0.1", int(door.place.split(":")[1]))) as thief:
        thief.sendall(overheard)
        with pytest.raises(BROKEN):
            again.result(WAIT_S)


def _pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    while data := source.recv(1 << 16):
        kept += data
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def test_nonsense_is_refused_and_costs_nothing(door: Door) -> None:
    """Random bytes, lengths of 2^40 and 2^31, deep nesting: 300 connections, and memory stays."""
    random, before = __import__("random").Random(3), _resident_bytes()
    for number in range(300):
        message = random.randbytes(random.choice((1, 7, 100, 1 << 20 if number % 50 == 0 else 1000)))
        if number % 3 == 0:
            message = random.choice((b"\xff\xff\xff\xff" + (2**40).to_bytes(8, "big"), b"\x7f\xff\xff\xff")) + message
        inside = door.open()
        with socket.create_connection(("127.0.0.1", int(door.place.split(":")[1]))) as stranger:
            try:
                stranger.sendall(message)
                stranger.shutdown(socket.SHUT_WR)
            except OSError:  # it was put out before it had said all
                pass
            with pytest.raises(BROKEN):
                inside.result(WAIT_S)
    assert _resident_bytes() - before < 10 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
