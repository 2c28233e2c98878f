"""The program that is started for a rank. It requests the process from a fork server, and represents the process.

It ends as that process ends, and that process is killed when it ends first. Without a server, or when the server
declines, it becomes the ordinary start. A bare interpreter (`-I -S`) runs the text of this file, so it imports little.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long as everything else here
    from typing import Any, NoReturn

SERVER = "LLAMARL_FORK_SERVER_AT"
"""Environment variable: process that has started the fork server, and the descriptor there that reaches it."""
ORDINARY = "LLAMARL_ORDINARY_START"
"""Environment variable: why a rank that could have been forked imports everything itself."""
SERVER_ENDED = "the fork server has ended"
WAIT_S = 15.0
"""Longest wait in seconds for a rank to be forked. Monarch waits 30 s for a rank to report, and the ordinary start must
fit into the rest."""
REAPED_S = 0.5
"""Longest wait in seconds for the system to reap an ended process, whose exit status it then reports."""
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""Request and flag of linux/pidfd.h."""


def main() -> NoReturn:
    """Runs a rank; `sys.argv` has the module of its executor and the arguments of the ordinary start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    module, *arguments = sys.argv[1:]
    if place := os.environ.pop(SERVER, ""):
        try:
            os.environ[ORDINARY] = _run(place, module, arguments)
        except OSError as error:
            os.environ[ORDINARY] = f"the fork server cannot be asked: {error}"
    os.execv(sys.executable, [sys.executable, *arguments])


def _run(place: str, module: str, arguments: list[str]) -> str:
    """Has a rank forked and ends as it does. Returns why there is none. Raises OSError."""
    starter, control = map(int, place.split(":"))
    if os.getppid() != starter:
        return "the fork server is another process's"
    parent = os.pidfd_open(starter)
    answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until, lifeline = os.pipe()  # the rank is killed when no process holds `lifeline`, which only this process does
    with socket.socket(fileno=control) as server, theirs:
        request = json.dumps(_request(module, arguments)).encode()
        try:
            socket.send_fds(server, [request], [0, 1, 2, theirs.fileno(), until])
        except (BrokenPipeError, ConnectionError):
            return SERVER_ENDED
    os.close(until)
    if not _wait(answers.fileno(), parent, WAIT_S):
        os.close(lifeline)
        return f"the fork server has not answered within {WAIT_S:g} s"
    answer = _answer(answers)
    if "pid" not in answer:
        os.close(lifeline)
        return str(answer.get("declined", SERVER_ENDED))
    rank = _opened(answer["pid"])
    signal.signal(signal.SIGTERM, lambda *_: _terminate(rank))
    _wait(answers.fileno(), parent)
    if "status" not in (answer := _answer(answers)):
        if rank is not None:
            _wait(rank, parent)
        answer = {"status": _status(rank)}
    return _end_as(answer["status"])


def _opened(pid: int) -> int | None:
    """Descriptor of a process; None means that it has ended and was waited for."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _terminate(rank: int | None) -> None:
    try:
        if rank is not None:
            signal.pidfd_send_signal(rank, signal.SIGTERM)
    except ProcessLookupError:
        pass


def _request(module: str, arguments: list[str]) -> dict[str, Any]:
    """Returns the request for a rank: its arguments and its environment."""
    umask = os.umask(0o077)
    os.umask(umask)
    kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "module": module,
        "arguments": arguments,
        "launcher": os.getpid(),
        "environment": dict(os.environ),
        "umask": umask,
        "limits": [(kind, *resource.getrlimit(kind)) for kind in kinds],
        "cores": sorted(os.sched_getaffinity(0)),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }


def _answer(answers: socket.socket) -> dict[str, Any]:
    """The next message of the server or the rank; empty when both have closed the socket."""
    try:
        return json.loads(answers.recv(1 << 16) or "{}")
    except OSError:
        return {}


def _wait(descriptor: int, parent: int, timeout_s: float = -1.0) -> bool:
    """Waits until there is something to read. Returns False if nothing came in time; a negative time means no limit.
    Ends this process if its parent ends first."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(parent, select.POLLIN)
    ready = dict(poll.poll(timeout_s * 1e3))
    if ready and descriptor not in ready:
        os._exit(1)
    return bool(ready)


def _status(rank: int | None) -> int:
    """Wait status of a process that is not a child. That of exit code 1 if the process ended long ago, and on Linux
    before 6.15."""
    info = bytearray(64)  # struct pidfd_info: a mask first, the wait status last
    until_s = time.monotonic() + REAPED_S
    while rank is not None and time.monotonic() < until_s:
        struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(rank, _PIDFD_GET_INFO, info)
        except OSError:
            break
        if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return struct.unpack_from("i", info, 60)[0]
        time.sleep(0.01)
    return 1 << 8


def _end_as(status: int) -> NoReturn:
    """Ends this process as another one has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that process has left its memory already
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
