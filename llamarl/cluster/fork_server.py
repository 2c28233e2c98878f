"""`fork_server`: a process that imports torch and the executors once for a run, and forks each rank of an executor.

A forked rank differs from an ordinary one in its parent and in the time that its start takes. The rank takes arguments,
environment, standard streams and limits from the program that is started for it (`cluster/launcher.py`). The server
declines a request if a variable differs that libraries read at import; the rank then starts by itself. The server has
one thread and no CUDA context.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from llamarl.child import kill_group
from llamarl.cluster import start_up
from llamarl.cluster.launcher import ORDINARY, SERVER
from llamarl.cluster.start_up import LIFELINE

SWITCH = "LLAMARL_FORK_SERVER"
"""Environment variable; with 0 no process is forked."""
EXECUTORS = (
    ("llamarl.executors.reward",),
    ("llamarl.executors.trainer", "llamarl.executors.generator"),
)
"""Modules that the server imports, by stage. Each stage is a process that also has the modules of the stages before it.
The first stage has no torch, like the executors that are forked from it."""
_LIGHT = "llamarl.parts.episodes.executors."
"""Prefix of the names of other modules that need no torch."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_EARLY = (
    "ACC_", "ATEN_", "COMPILE_STROBELIGHT_", "DNNL_", "FX_", "GFORTRAN_", "GLIBC_", "GOMP_", "GOTO_", "HF_", "HOME",
    "INTEL_", "I_MPI_", "KINETO_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL", "MPI_", "NPY_", "NUMPY_", "NVPL_",
    "OMP", "ONEDNN_", "OPENBLAS_", "OPENSSL_", "PYDANTIC_", "PYTHON", "PYTORCH_", "RUST_", "TOKENIZERS_LOG", "TORCH",
    "TRITON_", "TZ",
)  # fmt: skip
"""Prefixes of the names of variables that Python, and libraries that the server imports, read at import."""
DEVICES = ("/dev/nvidia", "/dev/kfd")
"""Prefixes of the devices that a driver opens when it is initialized."""
_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import json
sys.path[:] = json.loads(sys.argv[1])
__import__("llamarl.cluster.fork_server", fromlist=["serve"]).serve()
from llamarl.cluster.start_up import main
main()
"""
_LOOK_S = 0.01
"""Interval in seconds between two checks whether the server is ready."""
_END_S = 0.5
"""Longest wait in seconds for the server to end its stages and itself."""
_NAME_CHARS = 4000
"""Length in characters of an argument that reserves memory for the command line of a rank."""
_MAX_REQUEST_BYTES = 1 << 20
_NUM_DESCRIPTORS, _REPLY = 5, 3
"""Descriptors of a request: standard streams, the socket for answers, the pipe that ends the rank."""


class ForkServer:
    """Starts and ends the server's process."""

    def __init__(self, stages: Sequence[Sequence[str]] = EXECUTORS) -> None:
        """Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        until, self._lifeline = os.pipe()
        self._news, tells = os.pipe()
        os.set_blocking(self._news, False)
        self._num_ready, self._has_ended = 0, False
        held = [theirs.fileno(), until, tells, *map(int, filter(None, [os.environ.get(LIFELINE)]))]
        paths = json.dumps(list(dict.fromkeys(map(os.path.abspath, sys.path))))
        numbers = map(str, (theirs.fileno(), until, os.getpid(), tells))
        own = [json.dumps(stages), *numbers, " " * _NAME_CHARS]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, paths, *own],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=held,
                    process_group=0, env={**os.environ, **dict.fromkeys(_THREADS, "1")},
                )  # fmt: skip
            finally:
                os.close(until)
                os.close(tells)
        self._control, self._stages = ours, stages
        self._control.set_inheritable(True)  # by the processes of ranks
        self.place = f"{os.getpid()}:{ours.fileno()}"
        """Value of the variable `SERVER` by which launchers find the server."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def control(self) -> int:
        """Descriptor that reaches the server."""
        return self._control.fileno()

    def is_ready(self, module: str) -> bool:
        """Returns whether a launcher's request for a module would be answered at once. True if the server has ended."""
        while not self._has_ended:
            try:
                told = os.read(self._news, len(self._stages))
            except BlockingIOError:
                break
            self._num_ready, self._has_ended = self._num_ready + len(told), not told
        stage = next((number for number, one in enumerate(self._stages) if module in one), len(self._stages) - 1)
        return self._has_ended or self._num_ready > stage

    def close(self) -> None:
        """Ends the server. Forked ranks continue."""
        is_importing = not self.is_ready("")  # then it does not look at its socket
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        if not is_importing:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        kill_group(self._process.pid)
        self._process.wait()
        os.close(self._lifeline)
        os.close(self._news)


_lock = threading.Lock()
_users: list[object] = []
"""Runs of this process that share the server."""
_shared: list[ForkServer] = []
"""The server of this process, if there is one."""


@contextmanager
def fork_server(kind: str) -> Iterator[None]:
    """Context in which ranks of this machine are forked if possible. Simultaneous runs of a process share one server.

    Args:
        kind: `cluster.kind`. With `inline` and `hosts` this process starts no ranks, and no server.
    """
    if kind not in ("monarch", "processes"):
        yield
        return
    user = object()
    with _lock:
        if not _users:
            begin()
        _users.append(user)
    try:
        yield
    finally:
        with _lock:
            _users.remove(user)
            if not _users:
                end()


def begin() -> None:
    """Starts the server of this process, or notes why ranks start by themselves."""
    end()  # this process may have inherited the place of another process's server
    if os.environ.get(SWITCH) == "0":
        return
    if not hasattr(os, "pidfd_open") or not hasattr(fcntl, "F_SETSIG"):
        os.environ[ORDINARY] = "this system has no fork server"
        return
    try:
        _shared.append(ForkServer())
    except OSError as error:
        os.environ[ORDINARY] = f"no fork server can be started: {error}"
    else:
        os.environ[SERVER] = _shared[0].place


def end() -> None:
    """Ends the server of this process, if there is one."""
    for name in (SERVER, ORDINARY):
        os.environ.pop(name, None)
    while _shared:
        _shared.pop().close()


def descriptors() -> tuple[int, ...]:
    """Returns the descriptors by which processes that this one starts reach its server."""
    return tuple(server.control for server in _shared)


async def ready(module: str, timeout_s: float, tell: Callable[[str], None] | None = None) -> float:
    """Waits until the server of this process can fork ranks of a module at once, for `timeout_s` at most: Monarch gives
    a rank that it starts less time than imports may take. Returns the seconds that are left."""
    import asyncio  # the command that starts the server has not imported it yet

    until_s = time.monotonic() + timeout_s
    if tell and SERVER in os.environ:
        tell("imports modules")
    while _shared and not _shared[0].is_ready(module) and time.monotonic() < until_s:
        await asyncio.sleep(_LOOK_S)
    return max(0.0, until_s - time.monotonic())


def serve() -> None:
    """Runs the server. Returns only in each forked rank, with the `sys.argv` of the ordinary start."""
    stages: list[list[str]] = json.loads(sys.argv[2])
    control, until, starter, tells = map(int, sys.argv[3:7])
    start_up.die_with(until)
    _rename([sys.executable, "-m", "llamarl.cluster.fork_server"])
    gc.disable()  # a search for garbage among modules takes a sixth of their import
    parent, here = os.pidfd_open(starter), dict(os.environ)
    listener = socket.socket(fileno=control)
    following, next_stage = None, 0
    for number, modules in enumerate(stages):
        for name in modules:
            importlib.import_module(name)
        os.write(tells, b"0")
        if number + 1 < len(stages):
            if reason := unfit():
                sys.exit(reason)
            following, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if next_stage := os.fork():
                theirs.close()
                break
            following.close()
            listener.close()
            following, listener = None, theirs
    os.close(tells)
    gc.freeze()
    server = _Stage(listener, following, next_stage, parent, until, here, modules)
    request, descriptors = server.next_request()
    _become(request, descriptors)


class _Stage:
    """One stage: forks a rank for each request about its modules, and sends other requests to the next stage."""

    def __init__(
        self, listener: socket.socket, following: socket.socket | None, next_stage: int, parent: int, until: int,
        environment: Mapping[str, str], modules: Sequence[str],
    ) -> None:  # fmt: skip
        self._listener, self._following, self._next_stage = listener, following, next_stage
        self._parent, self._until, self._environment, self._modules = parent, until, environment, modules
        self._ranks = dict[int, tuple[int, socket.socket]]()
        """Process of each rank and its launcher's socket, by the rank's pidfd."""
        self._poll = select.poll()
        for descriptor in (listener.fileno(), parent):
            self._poll.register(descriptor, select.POLLIN)

    def next_request(self) -> tuple[dict[str, Any], list[int]]:
        """Serves. Returns only in a new rank, with its request and the descriptors that came with it."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._parent:
                    self._end()
                if descriptor in self._ranks:
                    self._ended(descriptor)
                elif found := self._asked():
                    return found

    def _asked(self) -> tuple[dict[str, Any], list[int]] | None:
        """Answers a request. Returns it, with its descriptors, in a new rank; None in the server."""
        data, descriptors, _, _ = socket.recv_fds(self._listener, _MAX_REQUEST_BYTES, _NUM_DESCRIPTORS)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if not data:
            self._end()
        request: dict[str, Any] = json.loads(data)
        if self._following is not None and not self._is_own(request["module"]):
            with suppress(OSError):  # the next stage has ended, and the launcher reads the end of its socket
                socket.send_fds(self._following, [data], descriptors)
        elif self._forked(request, socket.socket(fileno=os.dup(descriptors[_REPLY]))):
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        return None

    def _is_own(self, module: str) -> bool:
        """Returns whether ranks of a module are forked from this stage, and not from one that follows it."""
        return module in self._modules or (self._following is not None and module.startswith(_LIGHT))

    def _forked(self, request: Mapping[str, Any], reply: socket.socket) -> bool:
        """Forks a rank or declines. Returns True in the rank."""
        reason = _objection(request["environment"], self._environment) or unfit()
        if not (self._is_own(request["module"]) or request["module"].startswith("llamarl.")):
            reason = f"the fork server does not know {request['module']}"
        pid = -1
        try:
            pid = -1 if reason else os.fork()
        except OSError as error:
            reason = f"no process can be forked: {error}"
        if pid == 0:
            self._leave()
        elif reason:
            _tell(reply, declined=reason)
        else:
            self._poll.register(watched := os.pidfd_open(pid), select.POLLIN)
            self._ranks[watched] = pid, reply
            return False
        reply.close()
        return pid == 0

    def _end(self) -> NoReturn:
        """Ends the following stage, then this one."""
        if self._next_stage:
            os.kill(self._next_stage, signal.SIGKILL)
            os.waitpid(self._next_stage, 0)
        os._exit(0)

    def _ended(self, descriptor: int) -> None:
        pid, reply = self._ranks.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _tell(reply, status=os.waitpid(pid, 0)[1])
        reply.close()

    def _leave(self) -> None:
        """Closes the server's descriptors in a new rank."""
        for descriptor, (_, reply) in self._ranks.items():
            os.close(descriptor)
            reply.close()
        self._listener.close()
        if self._following is not None:
            self._following.close()
        for descriptor in (self._parent, self._until):
            os.close(descriptor)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Makes this process the rank that a launcher asks for, and reports it to the launcher. Ends the process if a limit
    cannot be set."""
    *streams, reply_at, until = descriptors
    reply = socket.socket(fileno=reply_at)
    try:
        os.setpgid(0, 0)
        start_up.die_with(until)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.umask(request["umask"])
        for kind, soft, hard in request["limits"]:
            resource.setrlimit(kind, (soft, hard))
        os.sched_setaffinity(0, request["cores"])
        os.setpriority(os.PRIO_PROCESS, 0, request["priority"])
    except (OSError, ValueError) as error:  # ValueError: a limit is higher than this process may set
        _tell(reply, declined=f"a forked process cannot take its place: {error}")
        os._exit(1)
    own: dict[str, str] = request["environment"]
    for name in os.environ.keys() - own.keys():
        del os.environ[name]
    os.environ.update(own)
    os.environ["HYPERACTOR_MESH_BOOTSTRAP_ENABLE_PDEATHSIG"] = "false"  # the rank survives the server, its parent
    _set_threads(own)
    tempfile.tempdir = None
    if random := sys.modules.get("numpy.random"):
        random.seed()  # Python's module `random` does so after each fork
    _, _, paths, *arguments = request["arguments"]
    sys.argv[:], sys.path[:] = ["-c", paths, *arguments], json.loads(paths)
    importlib.invalidate_caches()
    start_up.launcher_pid = request["launcher"]
    _rename([sys.executable, *request["arguments"]])
    gc.enable()
    _tell(reply, pid=os.getpid())
    reply.close()


def _objection(own: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Returns why a rank with the environment `own` cannot be forked from a process that started with `before`. Empty
    means that it can."""
    for name in sorted(own.keys() | before.keys()):
        if name.startswith(_EARLY) and name not in _THREADS and own.get(name) != before.get(name):
            return f"its environment variable {name} is another than the fork server's"
    if not all(own.get(name, "1").isdecimal() for name in _THREADS) or "OMP_NUM_THREADS" not in own:
        return "its number of threads is not given as one number (OMP_NUM_THREADS)"
    if own.get("MKL_NUM_THREADS", own["OMP_NUM_THREADS"]) != own["OMP_NUM_THREADS"]:
        return "OMP_NUM_THREADS and MKL_NUM_THREADS differ"
    return ""


def _set_threads(own: Mapping[str, str]) -> None:
    """Sets the number of threads of libraries that were loaded with one thread."""
    number = int(own["OMP_NUM_THREADS"])
    if number != 1 and (torch := sys.modules.get("torch")):
        torch.set_num_threads(number)
    if (number := int(own.get("OPENBLAS_NUM_THREADS", number))) != 1 and "numpy" in sys.modules:
        lines = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(None, 5)[-1] for line in lines if "openblas" in line}:
            library = ctypes.CDLL(path)
            for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
                if hasattr(library, name):
                    getattr(library, name)(number)


def unfit() -> str:
    """Returns why this process must not fork: a new process lacks its other threads, and cannot use its devices. Empty
    means that it may fork."""
    if (number := len(os.listdir("/proc/self/task"))) != 1:
        return f"the fork server has {number} threads"
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing
            if (path := os.readlink(f"/proc/self/fd/{name}")).startswith(DEVICES):
                return f"the fork server has opened {path}"
    return ""


def _tell(reply: socket.socket, **answer: Any) -> None:
    with suppress(OSError):  # the launcher has ended
        reply.send(json.dumps(answer).encode())


def _rename(command: Sequence[str]) -> None:
    """Replaces the command line that `ps` shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
