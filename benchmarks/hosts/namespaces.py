"""Several "hosts" on one Linux machine: network namespaces on one bridge, with addresses and names; cables can be cut.

    with Namespaces(3) as hosts:
        process = hosts.popen("host-a", ["iperf3", "-s"])
        hosts.limit("host-b", mbit=1000)
        hosts.cut("host-b")

Root needs no user namespace; others get one. Nothing of this is seen outside: the bridge lies in a namespace of its
own. Each host has its own address, host name, `/etc/hosts`, shared memory and IPC; files, users and pids are the
machine's. A guard ends every process of the hosts once the `with` block, or this process itself, has ended in whatever
way; with the last process the kernel removes namespaces, bridge and cables.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
"""Users other than root rarely have `ip` on theirs."""
COMMAND_S = 20.0
"""Deadline of each short command, and of the guard's last work."""

_KINDS = ("--net", "--mount", "--uts", "--ipc")
_HOST = """
set -e
hostname "$1"
ip link set lo up
mount --bind "$2" /etc/hosts
mount -t tmpfs -o mode=1777 shm /dev/shm
echo ready
exec cat
"""
"""First process of a host; it ends when its input does."""
_THIS_FILE = os.path.abspath(__file__)
_GUARD = [sys.executable, "-I", "-S", _THIS_FILE, "--guard"]


_ALL_PROTOCOLS, _SOL_PACKET = 3, 263
_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 15, 23
"""Of linux/if_packet.h; the first keeps checksums and segments that the kernel has left for later."""


class Forbidden(RuntimeError):
    """This machine's kernel, or what encloses this process, has not what is asked for: the message says what."""


class Namespaces:
    """Hosts `host-a` (10.77.0.1), `host-b` (10.77.0.2), ... on one bridge; a context manager."""

    def __init__(self, num_hosts: int) -> None:
        assert 1 <= num_hosts <= 200
        self.addresses = {_name(number): f"10.77.0.{number + 1}" for number in range(num_hosts)}
        """By the hosts' names."""
        self._guard: subprocess.Popen[str] | None = None
        """Also the process whose network namespace holds the bridge."""
        self._first: dict[str, subprocess.Popen[str]] = {}
        """What keeps each host's namespaces."""
        self._forwarders: dict[str, subprocess.Popen[str]] = {}
        """By the hosts whose cables delay or lose."""
        self._started: list[subprocess.Popen[Any]] = []
        self.folder = Path()
        """Where the hosts' temporary folders are; made on entering, and gone with the hosts."""

    @property
    def names(self) -> list[str]:
        """Of all hosts, in order."""
        return list(self.addresses)

    def __enter__(self) -> Namespaces:
        self.folder = Path(tempfile.mkdtemp(prefix="ns-", dir="/tmp"))  # short: Unix sockets lie below
        try:
            self._guard = _first_process([*_unshare(), *_GUARD, str(self.folder)])
            self._switch("ip", "link", "add", "switch", "type", "bridge")
            self._switch("ip", "link", "set", "switch", "up")
            self._write_names()
            for name in self.names:
                self._add(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of every host, however it was started; returns when they are gone."""
        try:
            if self._guard is not None:
                _, errors = self._guard.communicate(timeout=COMMAND_S)  # its input ends: the signal for its work
                assert self._guard.returncode == 0, f"the guard of the hosts failed: {errors}"
            for process in [*self._first.values(), *self._forwarders.values()]:
                process.communicate(timeout=COMMAND_S)
            for process in self._started:
                process.wait(COMMAND_S)
        finally:
            self._guard = None
            shutil.rmtree(self.folder, ignore_errors=True)

    def popen(self, host: str, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """A process in a host, as `subprocess.Popen` starts it: `env` is added to this process's variables.

        Its temporary folder is the host's own, which `tmp` names. The pid is the process's own.
        """
        variables = {**os.environ, "TMPDIR": str(self.tmp(host)), **(env or {})}
        command = [*_enter(self._first[host]), *argv]
        process = subprocess.Popen(command, env=variables, **{"start_new_session": True, **options})
        self._started.append(process)
        return process

    def run(self, host: str, argv: Sequence[str], timeout_s: float = COMMAND_S) -> str:
        """What a short command prints in a host. Raises CalledProcessError, TimeoutExpired."""
        command = [*_enter(self._first[host]), *argv]
        return subprocess.run(command, check=True, timeout=timeout_s, capture_output=True, text=True).stdout

    def tmp(self, host: str) -> Path:
        """Temporary folder of a host's own; it goes with the hosts."""
        return self.folder / host

    def cut(self, host: str) -> None:
        """From now on nothing that a host sends, or is sent, arrives; nobody is told, as when a switch fails."""
        self._switch("ip", "link", "set", self._plug(host), "nomaster")

    def restore(self, host: str) -> None:
        """Undoes `cut`."""
        self._switch("ip", "link", "set", self._plug(host), "master", "switch")

    def _plug(self, host: str) -> str:
        """What of a host's cable is in the switch."""
        return f"{_port(host)}-far" if host in self._forwarders else _port(host)

    def limit(self, host: str, mbit: float | None = None, delay_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Bandwidth of a host's cable, and delay and loss, each way; without arguments, none. Raises Forbidden.

        The kernel's netem is not everywhere, so a process delays and loses what the network stack hands on: up to 64 kB
        at a time, at some hundred Mbit/s.
        """
        assert self._guard is not None
        for end, process in ((_port(host), self._guard), ("eth0", self._first[host])):
            change = [*_enter(process), "tc", "qdisc"]
            remove = [*change, "del", "dev", end, "root"]
            subprocess.run(remove, check=False, capture_output=True, timeout=COMMAND_S)  # there may be none
            if mbit is not None:
                shape = ["rate", f"{mbit}mbit", "burst", str(max(65_536, int(mbit * 500))), "latency", "50ms"]
                _checked([*change, "add", "dev", end, "root", "tbf", *shape])
        if forwarder := self._forwarders.pop(host, None):
            forwarder.kill()
            forwarder.wait(COMMAND_S)
            self._switch("ip", "link", "del", f"{_port(host)}-far")
            self.restore(host)
        if delay_ms or loss_percent:
            near, far = _port(host), f"{_port(host)}-far"
            self._switch("ip", "link", "add", "name", far, "type", "veth", "peer", "name", f"{near}-mid")
            self._switch("ip", "link", "set", f"{near}-mid", "up")
            self._switch("ip", "link", "set", near, "nomaster")
            forward = [sys.executable, "-I", "-S", _THIS_FILE, "--forward", near, f"{near}-mid"]
            numbers = [str(delay_ms / 1000), str(loss_percent / 100)]
            self._forwarders[host] = _first_process([*_enter(self._guard), *forward, *numbers])
            self._switch("ip", "link", "set", far, "master", "switch", "up")

    def _add(self, host: str) -> None:
        """Starts a host and plugs it in."""
        assert self._guard is not None
        self.tmp(host).mkdir()
        shell = ["sh", "-c", _HOST, "sh", host, str(self.folder / "names")]
        first = self._first[host] = _first_process([*_enter(self._guard), "unshare", *_KINDS, *shell])
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{first.pid}\n")
        self._guard.stdin.flush()
        cable = [*("name", _port(host)), *("type", "veth", "peer", "name", "eth0", "netns", str(first.pid))]
        self._switch("ip", "link", "add", *cable)
        self._switch("ip", "link", "set", _port(host), "master", "switch", "up")
        self.run(host, ["ip", "address", "add", f"{self.addresses[host]}/24", "dev", "eth0"])
        self.run(host, ["ip", "link", "set", "eth0", "up"])

    def _switch(self, *argv: str) -> str:
        assert self._guard is not None
        return _checked([*_enter(self._guard), *argv])

    def _write_names(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        (self.folder / "names").write_text("\n".join(lines) + "\n")


def available() -> str:
    """Why hosts cannot be had here; empty where they can."""
    if sys.platform != "linux":
        return f"{sys.platform} has no network namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f"programs are missing: {', '.join(missing)} (packages iproute2, util-linux)"
    try:
        with Namespaces(1):
            return ""
    except Forbidden as error:
        return str(error)


def _name(number: int) -> str:
    """`host-a` to `host-z`, then `host-26` ..."""
    return f"host-{chr(ord('a') + number) if number < 26 else number}"


def _port(host: str) -> str:
    """The switch's end of a host's cable."""
    return f"to-{host.removeprefix('host-')}"


def _unshare() -> list[str]:
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *_KINDS]


def _enter(first: subprocess.Popen[str]) -> list[str]:
    """Goes in front of a command: where `first` is."""
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    nsenter = shutil.which("nsenter", path=PATH) or "nsenter"
    return [nsenter, f"--target={first.pid}", *user, *_KINDS, "--wd=.", "--"]


def _first_process(argv: list[str]) -> subprocess.Popen[str]:
    """A process that keeps namespaces; it is ready when it says so. Raises Forbidden."""
    pipe = subprocess.PIPE
    argv = [shutil.which(argv[0], path=PATH) or argv[0], *argv[1:]]
    process = subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "PATH": PATH}, start_new_session=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise Forbidden(f"namespaces are refused here: {process.communicate()[1].strip() or 'no reason given'}")
    return process


def _checked(argv: list[str]) -> str:
    """What a short command prints. Raises Forbidden with what it says when it fails."""
    variables = {**os.environ, "PATH": PATH}
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=COMMAND_S, env=variables)
    if done.returncode:
        raise Forbidden(f"`{' '.join(argv[argv.index('--') + 1 :])}` failed: {done.stderr.strip()}")
    return done.stdout


def _guard(folder: str) -> int:
    """Reads the hosts' first pids; once its input ends, kills what runs in their networks, and removes their folder."""
    print("ready", flush=True)
    networks = set[str]()
    own_pid = os.getpid()
    for line in sys.stdin:
        networks.add(os.readlink(f"/proc/{line.strip()}/ns/net"))
    networks.add(os.readlink("/proc/self/ns/net"))  # forwarders are in the switch's
    deadline_s = time.monotonic() + COMMAND_S / 2
    while running := [pid for pid in _pids() if pid != own_pid and _network(pid) in networks]:
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline_s:
            print(f"still running: {running}", file=sys.stderr)
            return 1
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _forward(names: list[str], delay_s: float, loss: float) -> None:
    """Hands on what comes in at one interface to the other, both ways, later or not at all."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) for _ in names]
    for end, name in zip(ends, names, strict=True):
        for option in (_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING):
            end.setsockopt(_SOL_PACKET, option, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        end.bind((name, 0))
    print("ready", flush=True)
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting = deque[tuple[float, socket.socket, bytes]]()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], timeout_s)[0]:
            frame = end.recv(1 << 17)
            if random.random() >= loss:
                waiting.append((time.monotonic() + delay_s, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            with suppress(OSError):  # a cable that is being unplugged, a full queue: lost, as on any network
                end.send(frame)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _network(pid: int) -> str:
    """Empty for what has ended (and waits for its parent), or is none of ours to see."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


if __name__ == "__main__" and sys.argv[1:2] == ["--guard"]:
    sys.exit(_guard(sys.argv[2]))
if __name__ == "__main__" and sys.argv[1:2] == ["--forward"]:
    _forward(sys.argv[2:4], float(sys.argv[4]), float(sys.argv[5]))
