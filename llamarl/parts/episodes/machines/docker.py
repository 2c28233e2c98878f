"""Machines by Docker or podman: a container for each, by the client library `docker`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field

from llamarl.config import ConfigError
from llamarl.parts.episodes.machines._base import WORK, Machine, MachineBackend, MachineLimits, MachineLost, pack_folder
from llamarl.parts.episodes.machines._connection import AgentMachine, agent_program, process_limits

START_S, CALL_S = 30.0, 60.0
"""Maximum seconds until a machine is ready, and of a call of the daemon."""
OWNER, HOST = "llamarl.owner", "llamarl.host"
"""Labels: the process that started a machine, and the host and process namespace in which it runs."""
PARTS = {WORK: 8, "/tmp": 3, "/dev/shm": 2, "/run/shell": 2, "/var/tmp": 1}
"""The places that a machine writes. Each has its own file system with this many sixteenths of the limits."""
_USER = "60000:60000"
_PAGE_BYTES = 4096
_CONNECTIONS = 64
_HEAD_BYTES = 8
_READ_BACK = """(
first() {
    for path; do
        [ -r "/sys/fs/cgroup/$path" ] && read -r value rest <"/sys/fs/cgroup/$path" && echo "$value" && return
    done
    echo none
}
echo "limits.memory_bytes $(first memory.max memory/memory.limit_in_bytes)"
echo "limits.processes $(first pids.max pids/pids.max)"
echo "backend.cpus $(first cpu.max cpu/cpu.cfs_quota_us)"
while read -r _ place kind _; do
    case $kind in proc | sysfs | mqueue | devpts | cgroup*) continue ;; esac
    if [ -d "$place" ] && [ -w "$place" ]; then echo "$place $(stat -f -c '%S %b %c' "$place")"; fi
done </proc/mounts
)"""
_PERIOD_US = 100_000


@dataclass
class Docker(MachineBackend):
    """Starts a container of `image` for each machine. The container has no capabilities and a read-only image. Limits
    are read back inside, and a limit that the daemon ignores is an error."""

    image: str = "python:3.12-slim"
    """Image with bash, coreutils and Python 3.9 or later. It is never pulled."""
    url: str = ""
    """Socket of the daemon, for example `unix:///run/podman/podman.sock`. Empty means `DOCKER_HOST`, or Docker's own
    socket."""
    network: str = "bridge"
    """Network of machines with `limits.network`. Others have none."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPUs that a machine uses at the same time. None means all."""
    memory_bounds_files: bool = False
    """Accepts that `limits.memory_bytes` bounds the number of files instead of `limits.files`, for versions of podman
    that know no `nr_inodes`."""

    def problem(self) -> str:
        try:
            self.start(None, MachineLimits()).close()
        except (OSError, ConfigError) as error:
            return str(error)
        return ""

    def start(self, folder: str | None, limits: MachineLimits) -> Machine:
        if folder and not os.path.isdir(folder):
            raise ConfigError(f"{folder} is not a folder that a machine can be given")
        with _errors():
            machine = self._started(limits)
        try:
            self._check(machine, limits)
            if folder:
                machine.put(pack_folder(folder))
        except OSError as error:
            machine.close()
            raise ConfigError(f"{folder} does not fit into a machine: {error}; set limits.disk_bytes") from None
        except BaseException:
            machine.close()
            raise
        return machine

    def _started(self, limits: MachineLimits) -> AgentMachine:
        api = self._client.api
        made = api.create_container_from_config(self.container(limits))["Id"]
        try:
            stream = _AttachedStream(api.attach_socket(made, params={"stdin": 1, "stdout": 1, "stream": 1}))
            machine = AgentMachine(stream, lambda: self._remove(made))
            api.start(made)
            machine.wait_until_ready(START_S)
        except BaseException:
            self._remove(made)
            raise
        return machine

    def container(self, limits: MachineLimits) -> dict[str, Any]:
        """Returns the configuration of a container, in the form of Docker's API. Its process 1 is the agent, which ends
        when the stream to its input does."""
        places = {"/run": f"size={16 * _PAGE_BYTES},mode=755"}  # podman would make one without a bound
        for place, part in PARTS.items():
            inodes = "" if self.memory_bounds_files else f",nr_inodes={limits.files * part // 16}"
            num_bytes = limits.disk_bytes * part // 16 // _PAGE_BYTES * _PAGE_BYTES
            places[place] = f"size={num_bytes},mode=1777{inodes}"
        own = process_limits(limits) | {"MACHINE_CPU_S": limits.cpu_s}
        del own["RLIMIT_NPROC"]  # it counts the processes of all machines, and the daemon's limit those of one
        return {
            "Image": self.image, "Entrypoint": [], "User": _USER, "WorkingDir": WORK, "Hostname": "machine",
            "Cmd": ["python3", "-I", "-S", "-c", agent_program(), "0", "1", json.dumps(own)],
            "Env": [f"HOME={WORK}", "LANG=C.UTF-8", "TERM=dumb", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1",
                    "PYTHONDONTWRITEBYTECODE=1", "PYTHONHASHSEED=0"],
            "OpenStdin": True, "StdinOnce": True, "AttachStdin": True, "AttachStdout": True, "AttachStderr": False,
            "Labels": {OWNER: str(os.getpid()), HOST: _host()},
            "HostConfig": {
                "NetworkMode": self.network if limits.network else "none", "AutoRemove": True, "ReadonlyRootfs": True,
                "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"], "LogConfig": {"Type": "none"},
                "IpcMode": "none", "Tmpfs": places, "Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes,
                "PidsLimit": limits.processes + 1, "NanoCpus": int((self.cpus or 0) * 1e9),
            },
        }  # fmt: skip

    def _check(self, machine: Machine, limits: MachineLimits) -> None:
        """Raises ConfigError if the machine does not have its limits."""
        try:
            done = machine.run(_READ_BACK, START_S, 1 << 14)
        except MachineLost as lost:
            raise ConfigError(f"the image {self.image} does not run the agent of machines: {lost}") from None
        if done.code:
            raise ConfigError(
                f"the image {self.image} needs bash and coreutils: {done.output.decode(errors='replace')}"
            )
        read = done.output.decode()
        if closed := PARTS.keys() - {line.split()[0] for line in read.splitlines()}:
            raise ConfigError(f"user {_USER} of a machine cannot write {', '.join(sorted(closed))}; change the image")
        if ignored := self.ignored(limits, read):
            raise ConfigError(
                f"the daemon ignores {ignored}; rootless podman needs cgroups v2 with delegated controllers"
            )

    def ignored(self, limits: MachineLimits, read: str) -> str:
        """Returns which limit a machine does not have, and what it has instead, from what was read inside."""
        have = {name: value for name, *value in (line.split() for line in read.splitlines())}
        wanted: dict[str, float] = {
            "limits.memory_bytes": limits.memory_bytes,
            "limits.processes": limits.processes + 1,
        }
        if self.cpus is not None:
            wanted["backend.cpus"] = self.cpus * _PERIOD_US
        for name, most in wanted.items():
            value = have.get(name, ["none"])[0]
            if not (value.isdigit() and 0 < int(value) <= most):
                return f"{name} = {most:g} (the machine has {value})"
        places = {name: list(map(int, value)) for name, value in have.items() if name.startswith("/")}
        if unbounded := places.keys() - PARTS:
            return f"limits.disk_bytes, as the machine also writes {', '.join(sorted(unbounded))}"
        if (found := sum(size * blocks for size, blocks, _ in places.values())) > limits.disk_bytes:
            return f"limits.disk_bytes = {limits.disk_bytes} (the machine has {found})"
        found = sum(inodes for _, _, inodes in places.values())
        if found > limits.files and not self.memory_bounds_files:
            return f"limits.files = {limits.files} (the machine has {found})"
        return ""

    @cached_property
    def _client(self) -> Any:
        """The client of this process. The first one removes what killed processes of this host have left."""
        docker = _package()
        client = docker.DockerClient(
            base_url=self.url or os.environ.get("DOCKER_HOST"), timeout=CALL_S, max_pool_size=_CONNECTIONS
        )
        remove_leftovers(client.api)
        return client

    def _remove(self, container: str) -> None:
        """Kills and removes a container. If the daemon is gone, a later process does it."""
        with suppress(OSError, ConfigError), _errors():
            self._client.api.remove_container(container, force=True, v=True)


def remove_leftovers(api: Any) -> None:
    """Removes the containers of processes of this host that have ended."""
    for container in api.containers(all=True, filters={"label": OWNER}):
        if _is_left(container.get("Labels") or {}):
            with suppress(_package().errors.APIError):  # another process does the same
                api.remove_container(container["Id"], force=True, v=True)


def _is_left(labels: Mapping[str, str]) -> bool:
    if labels.get(HOST) != _host() or not labels.get(OWNER, "").isdigit():
        return False
    try:
        os.kill(int(labels[OWNER]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _host() -> str:
    """Returns the name of this host, with its namespace of process ids."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _package() -> Any:
    try:
        return import_module("docker")
    except ImportError:
        raise ConfigError("the package docker is missing: pip install 'llamarl[docker]'") from None


@contextmanager
def _errors() -> Iterator[None]:
    """Raises errors of the client as ConfigError or OSError."""
    docker = _package()
    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise ConfigError(f"the image is missing, pull it: {error.explanation}") from None
    except docker.errors.DockerException as error:
        said = str(getattr(error, "explanation", None) or error)
        if "nr_inodes" in said:
            raise ConfigError(
                "the daemon cannot bound limits.files; set backend.memory_bounds_files = true to accept that "
                "limits.memory_bytes bounds them"
            ) from None
        raise OSError(f"the daemon of containers: {said}") from None


class _AttachedStream:
    """The stream to a container. What comes from it is in frames, each with a head of 8 bytes."""

    def __init__(self, attached: Any) -> None:
        self._attached, self._socket = attached, getattr(attached, "_sock", attached)
        self._head, self._left = bytearray(), 0

    def settimeout(self, s: float) -> None:
        self._socket.settimeout(s)

    def sendall(self, data: bytes) -> None:
        self._socket.sendall(data)

    def recv(self, most: int) -> bytes:
        while not self._left:
            if not (data := self._socket.recv(_HEAD_BYTES - len(self._head))):
                return b""
            self._head += data
            if len(self._head) == _HEAD_BYTES:
                self._left = int.from_bytes(self._head[4:], "big")
                self._head.clear()
        data = self._socket.recv(min(most, self._left))
        self._left -= len(data)
        return data

    def recvmsg(self, most: int, _: int) -> tuple[bytes, list[Any], int, None]:
        return self.recv(most), [], 0, None

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()
        self._attached.close()
