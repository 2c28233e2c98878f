"""Who connects must know the secret: strangers, what they send, and what they have overheard."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.hosts.namespaces import Namespaces, available
from llamarl.distributed.links import RankLinks, connect, open_entrance
from tests.architecture.repository import ROOT

REASON = available()
SECRET, WAIT_S = "0123456789abcdef", 240.0


class Door:
    """Whom an entrance lets in."""

    def __init__(self) -> None:
        self.inside = queue.SimpleQueue[Connection]()
        self._is_over = threading.Event()
        self.entrance, self.place = open_entrance("127.0.0.1", SECRET, self._serve, WAIT_S)

    def _serve(self, connection: Connection) -> None:
        self.inside.put(connection)
        self._is_over.wait(2 * WAIT_S)

    def knock(self) -> socket.socket:
        host, port = self.place.split(":")
        return socket.create_connection((host, int(port)), WAIT_S)

    def close(self) -> None:
        self.entrance.close()
        self._is_over.set()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


def turned_away(stranger: socket.socket) -> bool:
    """It is hung up on, within the limit."""
    with suppress(ConnectionError):
        while stranger.recv(1 << 16):
            pass
    return True


def test_who_knows_the_secret_is_let_in(door: Door) -> None:
    with connect(door.place, SECRET, WAIT_S) as outside:
        outside.send("hello")
        assert door.inside.get(timeout=WAIT_S).recv() == "hello"


def test_what_was_overheard_opens_nothing(door: Door) -> None:
    """All that a member once sent is sent again: challenges are fresh."""
    overheard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def relay() -> None:
            near, far = middle.accept()[0], door.knock()
            with near, far:
                back = threading.Thread(target=_pump, args=(far, near, bytearray()))
                back.start()
                _pump(near, far, overheard)
                back.join()

        relaying = threading.Thread(target=relay)
        relaying.start()
        connect(f"127.0.0.1:{middle.getsockname()[1]}", SECRET, WAIT_S).close()
        door.inside.get(timeout=WAIT_S).close()
        relaying.join(WAIT_S)
    assert len(overheard) > 40
    with door.knock() as thief:
        thief.sendall(overheard)
        assert turned_away(thief)
    assert door.inside.empty()


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
        with door.knock() as stranger:
            with suppress(OSError):  # it was put out before it had said all
                stranger.sendall(message)
                stranger.shutdown(socket.SHUT_WR)
            assert turned_away(stranger)
    assert door.inside.empty()
    assert _resident_bytes() - before < 10 << 20


def test_one_who_says_nothing_holds_up_nobody() -> None:
    """Rank 0 waits for the others; a stranger has come before them."""
    first, second = RankLinks(0, 2, WAIT_S), RankLinks(1, 2, WAIT_S)
    places = queue.SimpleQueue[str]()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.listen, "127.0.0.1", SECRET, places.put, WAIT_S)
        place = places.get(timeout=WAIT_S)
        with socket.create_connection(("127.0.0.1", int(place.split(":")[1]))) as stranger:
            stranger.sendall(b"\0")
            second.connect(place, SECRET)
            waits.result(WAIT_S)
    second.send(0, "here")
    assert first.receive(1, "say something") == "here"
    for links in (first, second):
        links.close()


def test_ranks_that_do_not_come_are_counted() -> None:
    with pytest.raises(TimeoutError, match="only 1 of 3 ranks"):
        RankLinks(0, 3, WAIT_S).listen("127.0.0.1", SECRET, lambda place: None, 0.05)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


ASKS = (
    "import sys; from llamarl.distributed.links import interface_of; print(*map(interface_of, sys.argv[1:]), sep=',')"
)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_every_address_of_an_interface_is_this_host_s() -> None:
    """The first of a network, one more there, one of another, one with a name of its own, and one of somebody else."""
    with Namespaces(1) as hosts:
        more = ("10.77.0.100/24", "dev", "eth0"), ("10.88.0.1/16", "dev", "eth0")
        for words in (*more, ("10.99.0.1/16", "dev", "eth0", "label", "eth0:own")):
            hosts.run("host-a", ["ip", "address", "add", *words])
        addresses = ["10.77.0.1", "10.77.0.100", "10.88.0.1", "10.99.0.1", "127.0.0.9", "10.77.0.2"]
        asked = hosts.popen(
            "host-a", [sys.executable, "-c", ASKS, *addresses], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        told, _ = asked.communicate(timeout=240)
    assert told.strip().split(",") == ["eth0", "eth0", "eth0", "eth0:own", "lo", ""]
