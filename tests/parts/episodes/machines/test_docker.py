"""Machines by Docker and podman: by day what is asked of a daemon and what is refused, at night podman itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarl.parts.episodes.machines import MachineLimits, MachineLost, docker
from llamarl.parts.episodes.machines._base import WORK, pack, unpack
from llamarl.parts.episodes.machines.docker import Docker
from llamarl.types import Outcome
from tests.nightly import NIGHTLY
from tests.parts.episodes.environments.test_machine import BY_CALLS, RIGHT, row, sh, talk
from tests.parts.episodes.machines import podman
from tests.parts.episodes.machines.here import said
from tests.sandbox.test_pool import until

LIMITS = MachineLimits()
READ = f"""limits.memory_bytes {LIMITS.memory_bytes}
limits.processes {LIMITS.processes + 1}
backend.cpus max
/work 4096 8192 2048
/tmp 4096 3072 768
/dev/shm 4096 2048 512
/run/shell 4096 2048 512
/var/tmp 4096 1024 256
"""


def test_a_container_has_no_rights_and_all_limits() -> None:
    made = Docker(image="i").container(LIMITS)
    host = made["HostConfig"]
    assert (host["NetworkMode"], host["CapDrop"], host["ReadonlyRootfs"]) == ("none", ["ALL"], True)
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (1 << 29, 1 << 29, LIMITS.processes + 1)
    parts = [
        dict(one.split("=") for one in options.split(","))
        for place, options in host["Tmpfs"].items()
        if place != "/run"
    ]
    assert sum(int(one["size"]) for one in parts) == LIMITS.disk_bytes
    assert sum(int(one["nr_inodes"]) for one in parts) == LIMITS.files
    assert made["User"] == "60000:60000" and made["StdinOnce"]
    host = Docker(network="n", cpus=1.5, memory_bounds_files=True).container(MachineLimits(network=True))["HostConfig"]
    assert host["NetworkMode"] == "n" and host["NanoCpus"] == 1_500_000_000
    assert not any("nr_inodes" in options for options in host["Tmpfs"].values())


@pytest.mark.parametrize(
    ("before", "after", "options", "name"),
    [
        ("", "", {}, ""),
        (str(LIMITS.memory_bytes), "max", {}, "limits.memory_bytes"),
        (str(LIMITS.memory_bytes), "none", {}, "limits.memory_bytes"),
        (str(LIMITS.memory_bytes), "9223372036854771712", {}, "limits.memory_bytes"),
        (f"processes {LIMITS.processes + 1}", "processes 4096", {}, "limits.processes"),
        ("", "", {"cpus": 1.0}, "backend.cpus"),
        ("cpus max", "cpus -1", {"cpus": 1.0}, "backend.cpus"),
        ("cpus max", "cpus 100000", {"cpus": 1.0}, ""),
        ("8192 2048", "16384 2048", {}, "limits.disk_bytes"),
        ("/var/tmp", "/data 4096 1 1\n/var/tmp", {}, "/data"),
        ("8192 2048", "8192 999999", {}, "limits.files"),
        ("8192 2048", "8192 999999", {"memory_bounds_files": True}, ""),
    ],
)
def test_an_ignored_limit_is_named(before: str, after: str, options: dict[str, Any], name: str) -> None:
    found = Docker(**options).ignored(LIMITS, READ.replace(before, after, 1) if before else READ)
    assert name in found and bool(found) == bool(name)


def test_containers_of_ended_processes_of_this_host_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    host, removed = docker._host(), list[str]()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    found = {
        "left": {docker.OWNER: str(ended.pid), docker.HOST: host},
        "mine": {docker.OWNER: str(os.getpid()), docker.HOST: host},
        "init": {docker.OWNER: "1", docker.HOST: host},
        "elsewhere": {docker.OWNER: str(ended.pid), docker.HOST: "elsewhere"},
        "nonsense": {docker.OWNER: "x", docker.HOST: host},
    }
    api = SimpleNamespace(
        containers=lambda **_: [{"Id": name, "Labels": labels} for name, labels in found.items()],
        remove_container=lambda name, **_: removed.append(name),
    )
    package = SimpleNamespace(errors=SimpleNamespace(APIError=KeyError))
    monkeypatch.setattr(docker, "_package", lambda: package)
    docker.remove_leftovers(api)
    assert removed == ["left"]


def test_frames_are_joined() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = docker._AttachedStream(ours)
        stream.settimeout(10.0)
        for data in (b"\1\0\0\0", b"\0\0\0\3ab", b"c\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\2", b"de"):
            theirs.sendall(data)
        assert [stream.recv(2), stream.recv(9), stream.recv(9)] == [b"ab", b"c", b"de"]
        theirs.shutdown(socket.SHUT_WR)
        assert stream.recv(9) == b""


def test_without_the_package_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    assert "llamarl[docker]" in Docker().problem()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not NIGHTLY:
        pytest.skip("`make test-all` does it: containers by podman")
    if reason := podman.problem():
        pytest.skip(reason)
    with podman.service(tmp_path_factory.mktemp("podman")) as url:
        yield url


@pytest.fixture
def backend(url: str) -> Docker:
    return Docker(image=podman.IMAGE, url=url, memory_bounds_files=True)


def test_a_container_has_a_shell_and_files(backend: Docker, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    machine = backend.start(str(tmp_path), LIMITS)
    try:
        machine.put(pack({"sub/b": b"two"}))
        assert said(machine, "cat a sub/b; cd sub; x=5; id -u; python3 -c 'print(6)'") == "onetwo60000\n6\n"
        assert said(machine, "pwd; echo $x; echo three > c") == f"{WORK}/sub\n5\n"
        assert machine.run("sleep 100", 0.5, 10).is_late
        assert said(machine, "echo $x; ls /proc | grep -c '^[0-9]' || true; ls /sys/class/net").split()[::2] == [
            "5",
            "lo",
        ]
        names = ["sub/c", "sub/d"]
        assert unpack(machine.get(names, 100), names, 100) == {"sub/c": b"three\n"}
        assert said(machine, "grep -h -e CapEff -e NoNew /proc/self/status").split()[1::2] == ["0" * 16, "1"]
        for place in docker.PARTS:
            assert "No space" in said(machine, f"head -c 40M /dev/zero > {place}/big || true; rm {place}/big")
        for place in ("/", "/usr/bin", "/etc", "/run", "/dev", "/proc/sys/kernel"):
            assert machine.run(f"test -w {place}", 60.0, 10).code, place
    finally:
        machine.close()
    assert not backend._client.api.containers(all=True)


@pytest.mark.parametrize(
    ("limits", "command"),
    [
        ({"cpu_s": 1}, "for n in 1 2 3; do (while :; do :; done) & done; wait"),
        ({"memory_bytes": 1 << 27}, 'python3 -c \'for n in range(10**6): open(f"/tmp/{n}", "w")\'; false'),
    ],
)
def test_a_container_that_exceeds_its_limits_ends(backend: Docker, limits: dict[str, int], command: str) -> None:
    machine = backend.start(None, MachineLimits(**limits))
    try:
        assert machine.run(command, 60.0, 100).code  # the kernel may kill the program before the agent
    except MachineLost:
        pass
    finally:
        machine.close()


def test_memory_and_processes_have_bounds(backend: Docker) -> None:
    machine = backend.start(None, MachineLimits(memory_bytes=1 << 28, processes=20))
    try:
        hold = 'python3 -c \'x = b"x" * 90_000_000; import time; time.sleep(2); print("held")\''
        done = machine.run(f"for n in 1 2 3 4; do {hold} & done; wait", 60.0, 1000)
        assert done.output.count(b"held\n") < 4 and b"Killed" in done.output
        code = "import os, time; n = 0\ntry:\n    while n < 100 and (os.fork() or time.sleep(100)): n += 1\n"
        assert 10 < int(said(machine, f"python3 -c '{code}except OSError: print(n)'")) < 20
    finally:
        machine.close()


def test_close_wakes_up_a_command(backend: Docker) -> None:
    machine = backend.start(None, LIMITS)
    threading.Timer(0.3, machine.close).start()
    with pytest.raises(MachineLost):
        machine.run("sleep 100", 60.0, 100)
    until(lambda: not backend._client.api.containers(all=True), "the container is removed")


OWNER = """
import sys
from llamarl.parts.episodes.machines import MachineLimits
from llamarl.parts.episodes.machines.docker import Docker
backend = Docker(image=sys.argv[1], url=sys.argv[2], memory_bounds_files=True)
machine = backend.start(None, MachineLimits())
backend._client.api.create_container_from_config(backend.container(MachineLimits()))
print("ready", flush=True)
machine.run("sleep 1000", 1000.0, 100)
"""


def test_containers_end_with_their_owner(backend: Docker) -> None:
    """One that runs ends at once. One that did not start yet is removed by the next process that starts machines."""
    with subprocess.Popen([sys.executable, "-c", OWNER, backend.image, backend.url], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        api = backend._client.api  # before, so that it removes nothing
        assert len(api.containers(all=True)) == 2
        os.kill(owner.pid, signal.SIGKILL)
    until(lambda: len(api.containers(all=True)) == 1, "the running container ends", 30.0)
    assert Docker(image=backend.image, url=backend.url, memory_bounds_files=True).problem() == ""
    until(lambda: not api.containers(all=True), "nothing is left", 30.0)


def test_an_image_or_a_daemon_that_is_missing_is_named(backend: Docker) -> None:
    assert (
        "no-such-image" in Docker(image="localhost/no-such-image", url=backend.url, memory_bounds_files=True).problem()
    )
    assert "daemon" in Docker(url="unix:///no/such.sock").problem()


def test_episodes_in_containers(backend: Docker) -> None:
    options = {"image": backend.image, "url": backend.url, "memory_bounds_files": True}
    fixed, end = talk(row(BY_CALLS), sh(f"printf '{RIGHT}' > calc.py"), "", backend={"name": "docker"} | options)
    assert fixed == "```output\n\n```\n" and end.outcome is Outcome.SCORE
