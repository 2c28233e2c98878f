"""A child that answers, one that dies, hangs, cannot be started, and one whose parent is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamarl.child import Child
from tests.sandbox.test_pool import alive, children, until

ROOT = Path(__file__).parents[2]
ECHO = """
import os, subprocess, sys
from llamarl.child import stream_to_parent
stream = stream_to_parent()
subprocess.run(["cat"])
while data := stream.recv(99):
    sockets = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
               and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")]
    stream.send(f"{data.decode()} {len(sockets)} {os.getpid() == os.getsid(0)}".encode())
"""
BEGET = "import os, subprocess, time; os.write(0, b'%d' % subprocess.Popen(['sleep', '99']).pid); "


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    started = list[Child]()

    def begin(*arguments: str, **options: object) -> Child:
        started.append(Child(*arguments, **options))
        started[-1].stream.settimeout(240)
        return started[-1]

    yield begin
    for child in started:
        child.end()


def test_it_answers_from_any_folder_in_a_session_of_its_own(start: Callable[..., Child], tmp_path: Path) -> None:
    """What it starts reads nothing of the stream, and no other child has an end of it."""
    first, second = (start("-c", ECHO, cwd=tmp_path) for _ in range(2))
    for child in (second, first):
        child.stream.send(b"a word")
        assert child.stream.recv(99) == b"a word 1 True"


def test_environment_and_kind_of_stream(start: Callable[..., Child]) -> None:
    code = "import os; os.write(0, ascii(sorted(os.environ)).encode()); os.write(0, b'more')"
    child = start("-c", code, env={"ONE": "1", "LC_ALL": "C"}, kind=socket.SOCK_SEQPACKET)
    assert [child.stream.recv(999) for _ in range(3)] == [b"['LC_ALL', 'ONE']", b"more", b""]


@pytest.mark.parametrize("then", ["time.sleep(99)", "os.kill(os.getpid(), 9)", "os._exit(5)"])
def test_what_it_has_started_ends_with_it(start: Callable[..., Child], then: str) -> None:
    """Also where it has ended before, and nobody has waited for it."""
    child = start("-c", BEGET + then)
    grandchild = int(child.stream.recv(99))
    if then != "time.sleep(99)":
        until(lambda: not alive(child.pid), "its own end")
        assert alive(grandchild)
    child.end()
    assert child.returncode == (5 if "exit" in then else -signal.SIGKILL)
    until(lambda: not alive(grandchild), "the end of what it has started")
    assert not Path(f"/proc/{child.pid}").exists(), "no zombie"
    child.end()


@pytest.mark.parametrize("ends", ["by itself", "not"])
def test_the_end_of_its_stream_is_an_order(start: Callable[..., Child], ends: str) -> None:
    wait = "os.read(0, 9); os._exit(7)" if ends == "by itself" else "time.sleep(99)"
    child = start("-c", BEGET + wait)
    grandchild = int(child.stream.recv(99))
    child.end(240.0 if ends == "by itself" else 0.2)
    if ends == "by itself":
        assert child.returncode == 7 and alive(grandchild), "it has seen to that itself"
        os.kill(grandchild, signal.SIGKILL)
    assert child.returncode == (7 if ends == "by itself" else -signal.SIGKILL)
    until(lambda: not alive(grandchild), "the end of what it has started")


@pytest.mark.parametrize("looks", [False, True])
def test_what_a_killed_child_has_started_ends_with_it(start: Callable[..., Child], looks: bool) -> None:
    """It could not see to that itself, as it would have within its grace."""
    child = start("-c", BEGET + "time.sleep(99)")
    grandchild = int(child.stream.recv(99))
    os.kill(child.pid, signal.SIGKILL)
    if looks:
        until(child.has_ended, "its end")
    child.end(240.0)
    assert child.has_ended() and child.returncode == -signal.SIGKILL
    until(lambda: not alive(grandchild), "the end of what it has started")


def test_starts_that_fail(start: Callable[..., Child], tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        start("-c", "", cwd=tmp_path / "gone")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    child = start("-m", "llamarl.no_such_module", stderr=subprocess.DEVNULL)
    assert child.stream.recv(9) == b""
    child.end(240.0)
    assert child.returncode == 1


HOST = """
import sys, time
from llamarl.child import Child
child = Child("-c", sys.argv[1])
child.stream.send(b"a word")
child.stream.recv(99)
print(child.pid, flush=True)
time.sleep(99)
"""


def test_it_ends_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST, ECHO], cwd=ROOT, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        assert children(host.pid) == [pid] and alive(pid)
        host.kill()
    until(lambda: not alive(pid), "its end")
