"""Strangers at a port: it stays open, and the process keeps its descriptors."""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from llamarl.net import entrance
from llamarl.net.entrance import MAX_UNPROVED, Entrance, Proved, listen

WAIT_S = 240.0
SOFT_LIMIT, NUM_SILENT = 128, 200


def echo(accepted: socket.socket, proved: Callable[[], None]) -> None:
    """Who says `open` has proved itself; everything is sent back."""

    def serve() -> None:
        with accepted:
            accepted.setblocking(True)
            try:
                while said := accepted.recv(100):
                    if said == b"open":
                        proved()
                    accepted.sendall(said)
            except OSError:  # put out
                pass
            finally:
                proved()

    threading.Thread(target=serve, daemon=True).start()


@pytest.fixture
def place() -> Iterator[tuple[str, int]]:
    listener = listen("127.0.0.1")
    entrance = Entrance(listener, echo)
    yield listener.getsockname()
    entrance.close()


def asked(place: tuple[str, int], connection: socket.socket | None = None) -> bytes:
    with connection or socket.create_connection(place, WAIT_S) as known:
        known.sendall(b"open")
        return known.recv(100)


def stranger(stack: ExitStack, place: tuple[str, int]) -> socket.socket:
    """Says what proves nothing, and has had an answer."""
    one = stack.enter_context(socket.create_connection(place, WAIT_S))
    one.sendall(b"x")
    with suppress(ConnectionError):
        one.recv(1)
    return one


def is_put_out(connection: socket.socket, wait_s: float = 0.0) -> bool:
    """The other end has hung up."""
    ready, _, _ = select.select([connection], [], [], wait_s)
    try:
        return bool(ready) and not connection.recv(1)
    except ConnectionError:
        return True


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a process may have 1,024 files."""
    monkeypatch.setattr(entrance, "max_unauthenticated", lambda: MAX_UNPROVED)


def test_there_is_room_by_the_files_that_a_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    limits = {256: 64, 1024: 64, 4096: 256, 1 << 20: 1024}
    for files, room in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert entrance.max_unauthenticated() == room


def test_many_who_come_at_once_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a large executor, or calls of one agent, each of which connects before any of them says anything."""
    monkeypatch.setattr(entrance, "YOUNG_S", WAIT_S)
    made = list[socket.socket]()

    def begin(accepted: socket.socket, proved: Proved) -> None:
        def serve() -> None:
            with accepted:
                time.sleep(0.01)
                accepted.sendall(accepted.recv(1))
                proved()

        threading.Thread(target=serve, daemon=True).start()

    listener = listen("127.0.0.1")
    opened = Entrance(listener, begin)
    with ExitStack() as stack:
        stack.callback(opened.close)
        for _ in range(3 * MAX_UNPROVED):
            made.append(stack.enter_context(socket.create_connection(listener.getsockname(), WAIT_S)))
            made[-1].sendall(b"x")
        assert all(one.recv(1) == b"x" for one in made)


def test_a_closed_one_puts_nobody_out(place: tuple[str, int]) -> None:
    listener = listen("127.0.0.1")
    closing = Entrance(listener, echo)
    with socket.create_connection(listener.getsockname(), WAIT_S) as early:
        early.sendall(b"o")
        assert early.recv(1) == b"o"
        with socket.create_connection(listener.getsockname(), WAIT_S) as silent:
            time.sleep(0.05)
            closing.close()
            assert not is_put_out(silent, 0.2)


def test_the_oldest_stranger_goes_for_the_newest(place: tuple[str, int]) -> None:
    with ExitStack() as stack:
        known = stack.enter_context(socket.create_connection(place, WAIT_S))
        known.sendall(b"open")
        assert known.recv(100) == b"open"
        began_s = time.monotonic()
        silent = [stranger(stack, place) for _ in range(MAX_UNPROVED + 3)]
        for one in silent[:3]:
            assert is_put_out(one, WAIT_S)
        assert time.monotonic() - began_s >= entrance.YOUNG_S > 0.01  # the first had its turn
        assert not any(is_put_out(one) for one in silent[3:-1])
        known.sendall(b"still here")
        assert known.recv(100) == b"still here"


@pytest.mark.skipif(sys.platform != "linux", reason="the system keeps nobody")
def test_who_says_nothing_is_not_let_in_and_is_heard_later() -> None:
    come = queue.SimpleQueue[socket.socket]()
    listener = listen("127.0.0.1")
    opened = Entrance(listener, lambda accepted, proved: come.put(accepted))
    with ExitStack() as stack:
        stack.callback(opened.close)
        silent = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(NUM_SILENT)]
        for expected in (b"new", b"old"):
            one = silent[0] if expected == b"old" else socket.create_connection(listener.getsockname())
            stack.enter_context(one).sendall(expected)
            with come.get(timeout=WAIT_S) as accepted:
                accepted.setblocking(True)
                assert accepted.recv(3) == expected
        assert come.empty(), "who says nothing costs a descriptor"


def test_who_leaves_without_a_word_troubles_nobody() -> None:
    come = queue.SimpleQueue[socket.socket]()
    listener = listen("127.0.0.1")
    opened = Entrance(listener, lambda accepted, proved: come.put(accepted))
    with ExitStack() as stack:
        stack.callback(opened.close)
        for _ in range(3):
            socket.create_connection(listener.getsockname()).close()
        stack.enter_context(socket.create_connection(listener.getsockname())).sendall(b"x")
        with come.get(timeout=WAIT_S) as accepted:
            assert accepted.recv(1) == b"x"


def test_nobody_else_is_let_in_until_those_who_were_put_out_have_gone() -> None:
    """Shut down is not closed: as long as whoever serves them is busy, each has its descriptor."""
    come = queue.SimpleQueue[tuple[socket.socket, Proved]]()
    listener = listen("127.0.0.1")
    opened = Entrance(listener, lambda *one: come.put(one))
    with ExitStack() as stack:
        stack.callback(opened.close)
        for _ in range(4 * MAX_UNPROVED):
            stack.enter_context(socket.create_connection(listener.getsockname())).sendall(b"x")
        end_s, held = time.monotonic() + WAIT_S, list[tuple[socket.socket, Proved]]()
        while len(held) < 2 * MAX_UNPROVED:
            held.append(come.get(timeout=end_s - time.monotonic()))
        with suppress(queue.Empty):
            while len(held) <= 2 * MAX_UNPROVED + 1:
                held.append(come.get(timeout=0.5))
        assert len(held) <= 2 * MAX_UNPROVED + 1
        for accepted, proved in held:
            accepted.close()
            proved()
        accepted, proved = come.get(timeout=WAIT_S)
        accepted.close()
        proved()


def test_who_has_left_makes_room(place: tuple[str, int]) -> None:
    with socket.create_connection(place) as first:
        for _ in range(2 * MAX_UNPROVED):
            with socket.create_connection(place, WAIT_S) as one:
                one.sendall(b"x")
                assert one.recv(1) == b"x"
        assert not is_put_out(first)


def test_a_closed_entrance_lets_nobody_in() -> None:
    listener = listen("127.0.0.1")
    address, opened = listener.getsockname(), Entrance(listener, echo)
    assert asked(address) == b"open"
    for _ in range(2):
        opened.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_it_ends_when_nobody_comes() -> None:
    listener = listen("127.0.0.1")
    Entrance(listener, echo, wait_s=0.01)
    ends_s = time.monotonic() + WAIT_S
    while listener.fileno() >= 0:
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def serve_poorly() -> None:
    """A process with few descriptors, all of which are taken for a while."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    listener = listen("127.0.0.1")
    Entrance(listener, echo)
    _say(json.dumps(listener.getsockname()))
    taken = list[int]()
    for line in sys.stdin:
        if line == "take all\n":
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
        else:
            while taken:
                os.close(taken.pop())
        _say("done")


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def test_no_descriptors_for_a_while_end_nothing() -> None:
    """More strangers than the process may have files, then all of its files taken by somebody else."""
    command = [sys.executable, "-c", "from tests.net.test_entrance import serve_poorly; serve_poorly()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process, ExitStack() as stack:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None
        stack.callback(process.kill)

        def tell(what: str) -> None:
            print(what, file=stdin, flush=True)
            assert stdout.readline() == "done\n"

        host, port = json.loads(stdout.readline())
        strangers = [stranger(stack, (host, port)) for _ in range(NUM_SILENT)]
        assert asked((host, port)) == b"open"
        tell("take all")
        for _ in range(2 * MAX_UNPROVED):
            stack.enter_context(socket.create_connection((host, port), WAIT_S)).sendall(b"x")
        assert is_put_out(strangers[-1], WAIT_S)
        tell("give back")
        assert asked((host, port)) == b"open"
