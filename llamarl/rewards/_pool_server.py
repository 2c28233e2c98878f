"""The process behind a `WorkerPool`: loads the function once, forks a worker per order, reports every death.

It never runs an item itself, so it always answers, and it is single-threaded, so forking it is safe. Standard library
only: what it imports, every worker carries.

    pool -> server   int32: FORK, with one end of a socket pair attached, or the pid of a worker to kill
    server -> pool   2 x int32: (0, READY), (pid, FORKED), or (pid, wait status) of a dead worker
    pool <-> worker  one line of JSON each way per item

Nothing outlives the pool's process: the server ends at the end of its order stream or when its parent changes, and
workers end with the server (parent-death signal on Linux; killed by name elsewhere).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

ORDER = struct.Struct("=i")
REPORT = struct.Struct("=ii")
FORK = 0
READY = -1
FORKED = -2
_PARENT_CHECK_S = 1.0
_PR_SET_PDEATHSIG = 1


class Limits(NamedTuple):
    """What one worker may use."""

    cpu_s: int
    """CPU seconds per item."""
    memory_bytes: int
    """Address space."""


def main() -> None:
    """Arguments: file descriptor of the order stream and a JSON object with function, warm_up, limits, parent."""
    control = socket.socket(fileno=int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    # A blocked SIGXCPU or an ignored SIGCHLD would be inherited from the thread that started this process.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    module, _, name = options["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for item in options["warm_up"]:
        function(item)
    gc.collect()
    gc.freeze()
    _Server(control, function, Limits(*options["limits"]), options["parent"]).serve()


class _Server:
    def __init__(self, control: socket.socket, function: Callable[[Any], Any], limits: Limits, parent: int) -> None:
        self._control, self._function, self._limits, self._parent = control, function, limits, parent
        self._workers: set[int] = set()

    def serve(self) -> None:
        """Consumes orders and deaths; ends with the order stream or with the parent."""
        woken, waker = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            self._control.sendall(REPORT.pack(0, READY))
            # A forked copy of the parent can hold the stream open after the parent's death: look at the parent too.
            while os.getppid() == self._parent:
                readable, _, _ = select.select([self._control, woken], [], [], _PARENT_CHECK_S)
                if woken in readable:
                    os.read(woken, 4096)
                    self._reap()
                if self._control in readable and not self._obey():
                    return
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)
            for pid in self._workers:
                os.waitpid(pid, 0)

    def _reap(self) -> None:
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._workers.remove(pid)
                self._control.sendall(REPORT.pack(pid, status))

    def _obey(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if not message:
            return False
        (order,) = ORDER.unpack(message)
        if order in self._workers:  # not yet reaped, so the pid cannot belong to another process
            os.kill(order, signal.SIGKILL)
        elif order == FORK:
            pid = self._fork(descriptors[0])
            self._workers.add(pid)
            os.close(descriptors[0])
            self._control.sendall(REPORT.pack(pid, FORKED))
        return True

    def _fork(self, descriptor: int) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(descriptor, server)
        return pid

    def _become_worker(self, descriptor: int, server: int) -> None:
        """Never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            _confine(self._limits, server)
            _work(socket.socket(fileno=descriptor), self._function, self._limits.cpu_s)
            status = 0
        finally:
            os._exit(status)


def _confine(limits: Limits, server: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def _work(connection: socket.socket, function: Callable[[Any], Any], cpu_s: int) -> None:
    """Answers items until the pool closes the connection. The kernel ends a worker that exceeds its CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    stream = connection.makefile("rwb")
    for line in stream:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s), hard))
        try:
            reply = json.dumps({"value": function(json.loads(line))})
        except Exception as error:  # the sandbox: whatever an item raises is an answer about that item
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:200]})
        stream.write(reply.encode() + b"\n")
        stream.flush()


if __name__ == "__main__":
    main()
