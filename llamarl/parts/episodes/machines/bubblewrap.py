"""Machines on this host by bubblewrap: namespaces of an unprivileged user, without a daemon or an image."""

from __future__ import annotations

import functools
import json
import os
import pwd
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from llamarl.child import Child, code_path
from llamarl.config import ConfigError
from llamarl.parts.episodes.machines import _starter
from llamarl.parts.episodes.machines._base import (
    WORK,
    Machine,
    MachineBackend,
    MachineLimits,
    is_owned_by,
    made_once,
    pack_folder,
)
from llamarl.parts.episodes.machines._calls import program
from llamarl.parts.episodes.machines._connection import AgentMachine, agent_program, process_limits
from llamarl.parts.episodes.machines._starter import FILTER, STAGE, STREAM
from llamarl.parts.episodes.machines._watch import watch
from llamarl.parts.episodes.sandbox import seccomp

START_S = 30.0
"""Maximum seconds until a machine is ready."""
_STARTS = threading.BoundedSemaphore(max(4, os.cpu_count() or 4))
"""Machines that start at the same time: each computes for some milliseconds, and more of them delay each other."""
_UIDS = range(60_000, 61_000)
"""Users that a root process becomes before it starts a machine: the first one without an account."""
_INSIDE_UID = "1000"
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("alternatives", "ld.so.cache", "ssl", "nsswitch.conf")
_ETC_OF_NETWORK = ("resolv.conf", "hosts")
_PYTHON, _PACKAGES = "/opt/python", "/opt/packages"


@dataclass
class Bubblewrap(MachineBackend):
    """Starts `bwrap` as an unprivileged user. The machine sees the host's `/usr` and the Python and the packages that
    run llamarl, read-only. It writes to `/work`, `/tmp` and `/dev/shm`."""

    shows: list[str] = field(default_factory=list)
    """Further folders of the host that machines can read, at the same paths."""

    def problem(self) -> str:
        return _problem()

    def start(self, folder: str | None, limits: MachineLimits) -> Machine:
        if problem := _problem():
            raise ConfigError(f"machines cannot be started here: {problem}; use another backend or host")
        for path in (*self.shows, *([folder] if folder else [])):
            if not os.path.isdir(path):
                raise ConfigError(f"{path} is not a folder that a machine can be given")
        uid = _unprivileged_uid()
        gid = os.getgid() if os.getuid() else None  # another user's namespace knows no other group
        base = folder if folder and is_owned_by(folder, uid, gid) else None
        with _STARTS:
            machine = _started(_starter_of_this_process(), self.shows, base, limits, uid)
        if folder and base is None:  # the machine's user could not change it, so the machine gets a copy
            try:
                machine.put(pack_folder(folder))
            except OSError as error:
                machine.close()
                raise ConfigError(f"{folder} does not fit into a machine: {error}; set limits.disk_bytes") from None
        return machine


def _started(starter: _Starter, shows: list[str], base: str | None, limits: MachineLimits, uid: int) -> AgentMachine:
    """Returns a machine that is ready. Raises OSError."""
    ours, theirs = socket.socketpair()
    shown = {path: path for path in map(os.path.abspath, shows)} | _python_folders()
    agent = [_interpreter(), "-I", "-S", "/run/agent.py", str(STREAM), str(STREAM), json.dumps(process_limits(limits))]
    order = {
        "program": shutil.which("bwrap"), "command": agent, "uid": uid, "base": os.path.abspath(base) if base else None,
        "shows": list(shown), "disk_bytes": limits.disk_bytes, "files": limits.files, "texts": _texts(),
    }  # fmt: skip
    arguments = _memory_file(b"\0".join(map(os.fsencode, _arguments([*shown.values()], limits))) + b"\0")
    calls = _memory_file(program())
    try:
        handle = starter.start(order, [theirs.fileno(), arguments, calls])
    finally:
        theirs.close()
        os.close(arguments)
        os.close(calls)
    machine = AgentMachine(ours, lambda: _end(machine, handle))
    try:
        proc = machine.wait_until_ready(START_S)
    except OSError:
        machine.close()
        raise
    if proc is not None:
        watch().add(machine, limits, proc)
    return machine


def _end(machine: AgentMachine, handle: int) -> None:
    """Kills bwrap, and with it all processes of the machine."""
    watch().drop(machine)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)


def _arguments(shown: list[str], limits: MachineLimits) -> list[str]:
    """Returns the arguments of bwrap."""
    options = ["--unshare-all", "--unshare-user", *(["--share-net"] if limits.network else []), "--die-with-parent",
               "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--uid", _INSIDE_UID, "--gid", _INSIDE_UID,
               "--hostname", "machine", "--seccomp", str(FILTER), "--ro-bind", "/usr", "/usr"]  # fmt: skip
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            options += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            options += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in _ETC + (_ETC_OF_NETWORK if limits.network else ()):
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in ("passwd", "group"):
        options += ["--ro-bind", f"{STAGE}/etc/{name}", f"/etc/{name}"]
    options += ["--ro-bind", f"{STAGE}/etc/agent.py", "/run/agent.py", "--bind", f"{STAGE}/shell", "/run/shell"]
    options += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    for name, place in (("shm", "/dev/shm"), ("tmp", "/tmp"), ("work", WORK)):
        options += ["--bind", f"{STAGE}/{name}", place]
    for number, place in enumerate(shown):
        options += ["--ro-bind", f"{STAGE}/shown/{number}", place]
    for place in ("/dev", "/"):
        options += ["--remount-ro", place]
    options += ["--chdir", WORK, "--clearenv"]
    for name, value in _variables().items():
        options += ["--setenv", name, value]
    return options


def _variables() -> dict[str, str]:
    """Returns the environment variables inside."""
    path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    variables = {"HOME": WORK, "LANG": "C.UTF-8", "TERM": "dumb", "USER": "user", "OMP_NUM_THREADS": "1",
                 "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}  # fmt: skip
    if _PYTHON in (places := _python_folders().values()):
        variables |= {"LD_LIBRARY_PATH": f"{_PYTHON}/lib"} if sysconfig.get_config_var("Py_ENABLE_SHARED") else {}
        path = f"{_PYTHON}/bin:{path}"
    if packages := [place for place in places if place.startswith(_PACKAGES)]:
        variables["PYTHONPATH"] = ":".join(packages)
    return {"PATH": path} | variables


def _interpreter() -> str:
    """Returns the path inside of the Python that runs llamarl."""
    own = os.path.realpath(sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    return own if _is_in_usr(prefix) else f"{_PYTHON}/{os.path.relpath(own, prefix)}"


@functools.cache
def _python_folders() -> dict[str, str]:
    """Returns the folders of the Python that runs llamarl and of its packages, and their places inside."""
    prefix = os.path.realpath(sys.base_prefix)
    folders = {} if _is_in_usr(prefix) else {prefix: _PYTHON}
    packages = [path for path in map(os.path.realpath, site.getsitepackages()) if os.path.isdir(path)]
    for path in packages:
        if not _is_in_usr(path) and not path.startswith(f"{prefix}/"):
            folders[path] = f"{_PACKAGES}/{len(folders)}"
    return folders


def _is_in_usr(path: str) -> bool:
    return path == "/usr" or path.startswith("/usr/")


@functools.cache
def _texts() -> dict[str, str]:
    """Returns the files of the host that a machine gets under a neutral name."""
    return {
        "agent.py": agent_program(), "passwd": f"user:x:{_INSIDE_UID}:{_INSIDE_UID}::{WORK}:/bin/bash\n",
        "group": f"user:x:{_INSIDE_UID}:\n",
    }  # fmt: skip


def _memory_file(content: bytes) -> int:
    """Returns a descriptor from which these bytes can be read."""
    descriptor = os.memfd_create("llamarl", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _unprivileged_uid() -> int:
    """Returns the user that runs machines: this one, or for root the first of `_UIDS` without an account."""
    if own := os.getuid():
        return own
    for uid in _UIDS:
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return uid
    raise ConfigError(f"machines need a user id without an account among {_UIDS.start} to {_UIDS.stop - 1}")


class _Starter:
    """The process that starts the machines of this process (`_starter.py`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child = Child(
            "-P", "-s", "-m", _starter.__name__, kind=socket.SOCK_SEQPACKET, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, cwd="/", env={"PYTHONPATH": code_path()},
        )  # fmt: skip
        self._child.stream.settimeout(START_S)

    def start(self, order: Mapping[str, object], descriptors: list[int]) -> int:
        """Starts a machine. Returns a descriptor of its process. Raises OSError."""
        with self._lock:
            socket.send_fds(self._child.stream, [json.dumps(order).encode()], descriptors)
            answer, handles, _, _ = socket.recv_fds(self._child.stream, 64, 1)
        if not answer or not handles:
            raise ConnectionError("the process that starts machines has ended")
        return handles[0]

    def close(self) -> None:
        """Ends the process and all machines that it has started."""
        self._child.end(START_S)


@made_once
def _starter_of_this_process() -> _Starter:
    return _Starter()


@functools.cache
def _problem() -> str:
    """Starts a machine. Returns why that failed, in a few words."""
    if lacking := seccomp.missing():
        return lacking
    if shutil.which("bwrap") is None:
        return "the program bwrap is missing; install the package bubblewrap"
    if not os.path.exists("/bin/bash"):
        return "the program /bin/bash is missing"
    starter = _Starter()
    try:
        _started(starter, [], None, MachineLimits(), _unprivileged_uid()).close()
    except (OSError, ConfigError) as error:
        return f"bwrap does not start ({error}); user namespaces may be forbidden"
    finally:
        starter.close()
    return ""
