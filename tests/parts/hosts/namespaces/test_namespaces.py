"""The laboratory of several hosts: they reach each other, a cut is a cut, and nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.hosts.namespaces import Namespaces, available
from tests.nightly import nightly

REASON = available()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
WAIT_S = 240.0
ROOT = Path(__file__).parents[4]

SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
while True:
    connection = listener.accept()[0]
    size = int.from_bytes(connection.recv(8))
    while size > 0 and (piece := connection.recv(1 << 20)):
        size -= len(piece)
    connection.sendall(socket.gethostname().encode())
    connection.close()
"""
CLIENT = """
import socket, sys, time
start = time.perf_counter()
connection = socket.create_connection((sys.argv[1], 7000), float(sys.argv[3]))
connection.settimeout(240.0)
connection.sendall(int(sys.argv[2]).to_bytes(8) + bytes(int(sys.argv[2])))
print(connection.recv(100).decode(), time.perf_counter() - start)
"""
STREAM = """
import sys, time
from llamarl.distributed.links import Rendezvous, RendezvousStore
from llamarl.distributed.links import has_slowed, keep_pace, receive, send
SIZE = 2_500_000

def serve(connection, _):
    while connection.recv():
        keep_pace(connection)
        send(connection, [memoryview(bytes(SIZE))])

def fetch(connection):
    start_s = time.monotonic()
    connection.send(True)
    receive(connection, [memoryview(bytearray(SIZE))])
    return time.monotonic() - start_s

if len(sys.argv) == 1:
    store = RendezvousStore(host="10.77.0.3", secret="own", serve=serve)
    print(store.rendezvous.address, flush=True)
    time.sleep(600)
streams = []
for _ in range(2):
    streams.append(Rendezvous(sys.argv[1], "own").connect("bytes", 20))
    times = [fetch(streams[-1]) for _ in range(6)]
    print(has_slowed(streams[-1]), flush=True)
    input()
    fetch(streams[-1])
    print(has_slowed(streams[-1]), times[-1], flush=True)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Namespaces]:
    with Namespaces(3) as hosts:
        for host in hosts.names:
            server = hosts.popen(host, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
            assert server.stdout.readline() == "up\n"
        yield hosts
    assert _processes_of(hosts.folder) == []


def _call(
    hosts: Namespaces, source: str, target: str, num_bytes: int = 0, connects_in_s: float = 5.0
) -> tuple[str, float]:
    """Who answered `source`, and how long that took."""
    name, took_s = hosts.run(source, [sys.executable, "-c", CLIENT, target, str(num_bytes), str(connects_in_s)]).split()
    return name, float(took_s)


def _processes_of(folder: Path) -> list[str]:
    """Command lines of what still runs with one of the hosts' folders as its own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_hosts_have_names_and_addresses(hosts: Namespaces) -> None:
    assert hosts.addresses == {"host-a": "10.77.0.1", "host-b": "10.77.0.2", "host-c": "10.77.0.3"}
    assert _call(hosts, "host-a", "10.77.0.2")[0] == "host-b"
    assert _call(hosts, "host-b", "host-c")[0] == "host-c"
    assert "eth0" in hosts.run("host-a", ["ip", "link"])
    assert socket.gethostname() not in hosts.names  # outside nothing has changed
    listed = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert "switch" not in listed and "to-a" not in listed


def test_memory_and_temporary_folder_are_the_hosts_own(hosts: Namespaces, tmp_path: Path) -> None:
    for host in hosts.names:
        where = hosts.popen(
            host, ["sh", "-c", "ls -A /dev/shm; echo $TMPDIR; pwd"], stdout=subprocess.PIPE, cwd=tmp_path
        )
        assert where.communicate(timeout=WAIT_S)[0].decode().split() == [str(hosts.tmp(host)), str(tmp_path)]
        hosts.run(host, ["touch", f"/dev/shm/of-{host}", str(tmp_path / host)])
    assert sorted(path.name for path in tmp_path.iterdir()) == hosts.names  # files are shared


@nightly("cables in real time; test_hosts.py loses hosts by day")
def test_a_cut_host_is_silent_and_comes_back(hosts: Namespaces) -> None:
    hosts.cut("host-b")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        _call(hosts, "host-a", "10.77.0.2")
    assert "timed out" in failed.value.stderr
    assert _call(hosts, "host-a", "10.77.0.3")[0] == "host-c"  # the others do not notice
    hosts.restore("host-b")
    assert _call(hosts, "host-a", "10.77.0.2")[0] == "host-b"


@nightly("cables in real time; test_hosts.py loses hosts by day")
def test_a_limited_cable_is_slow_both_ways(hosts: Namespaces) -> None:
    num_bytes = 6_000_000
    hosts.limit("host-c", mbit=20)  # 2.4 s for these bytes
    for source, target in (("host-a", "host-c"), ("host-c", "host-a")):
        assert _call(hosts, source, target, num_bytes)[1] > 1.8
    hosts.limit("host-c")
    assert _call(hosts, "host-a", "host-c", num_bytes)[1] < 1.8


@nightly("cables in real time; test_hosts.py loses hosts by day")
def test_a_cable_delays_and_loses(hosts: Namespaces) -> None:
    hosts.limit("host-c", delay_ms=400)
    for source, target in (("host-a", "host-c"), ("host-c", "host-a")):
        assert _call(hosts, source, target)[1] > 1.4  # two ways there and back
    hosts.limit("host-c", mbit=100, delay_ms=20, loss_percent=5)
    took_s = _call(hosts, "host-a", "host-c", 1_000_000, connects_in_s=60.0)[1]
    assert took_s > 0.15  # all of it arrives in spite of that
    hosts.cut("host-c")
    with pytest.raises(subprocess.CalledProcessError):
        _call(hosts, "host-a", "host-c")
    hosts.limit("host-c")
    assert _call(hosts, "host-a", "host-c")[1] < 1.4
    hosts.limit("host-c", loss_percent=100)
    with pytest.raises(subprocess.CalledProcessError):
        _call(hosts, "host-a", "host-c")
    hosts.limit("host-c")


@nightly("cables in real time; test_hosts.py loses hosts by day")
def test_a_stream_is_known_to_be_of_a_way_that_was_shorter(hosts: Namespaces) -> None:
    """One that is formed anew is not."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    server = hosts.popen("host-c", [sys.executable, "-c", STREAM], **pipes)
    reader = hosts.popen("host-a", [sys.executable, "-c", STREAM, server.stdout.readline().strip()], **pipes)
    assert reader.stdout.readline() == "False\n"
    hosts.limit("host-c", delay_ms=50)
    for has_slowed in ("True", "False"):
        reader.stdin.write("\n")
        reader.stdin.flush()
        found, took_s = reader.stdout.readline().split()
        assert found == has_slowed
        if has_slowed == "True":
            assert reader.stdout.readline() == "False\n"
    assert float(took_s) > 0.1
    hosts.limit("host-c")
    server.kill()


def test_processes_can_be_stopped_and_end_with_the_hosts() -> None:
    detach = "import os, time; os.fork() or os.setsid(); os.write(1, b'up\\n'); time.sleep(600)"
    with Namespaces(1) as hosts:
        process = hosts.popen("host-a", [sys.executable, "-c", detach], stdout=subprocess.PIPE, text=True)
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        os.kill(process.pid, signal.SIGSTOP)
        _until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        assert len(_processes_of(hosts.folder)) == 2
    assert process.returncode == -signal.SIGKILL and _processes_of(hosts.folder) == []
    assert not hosts.folder.exists()


WITH_HOSTS = """
import sys, time
from benchmarks.hosts.namespaces import Namespaces
with Namespaces(2) as hosts:
    hosts.popen("host-b", ["sleep", "600"])
    print(hosts.tmp("host-b"), hosts.run("host-a", ["hostname"]), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("as_nobody", [False, True])
def test_killed_owner_leaves_nothing(as_nobody: bool) -> None:
    """As another user too, who needs no rights."""
    if as_nobody and os.geteuid() != 0:
        pytest.skip("only root can become nobody; the other case ran without rights already")
    command = [sys.executable, "-c", WITH_HOSTS]
    if as_nobody:
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        pythons = [
            python for python in (sys.executable, "/usr/bin/python3") if _runs([*become, "env", python, "-c", ""])
        ]
        if not pythons:
            pytest.skip("nobody may run a Python here")
        command = [*become, pythons[0], "-c", WITH_HOSTS]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None and owner.stderr is not None
    line = owner.stdout.readline().split()
    owner.kill()
    errors = owner.stderr.read() if not line else ""
    if "namespaces are refused here" in errors:
        pytest.skip(errors.strip().splitlines()[-1])
    assert line[1:] == ["host-a"], errors
    folder = Path(line[0]).parent
    _until(lambda: not _processes_of(folder) and not folder.exists())
    owner.communicate()


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=WAIT_S).returncode == 0
    except FileNotFoundError:
        return False
