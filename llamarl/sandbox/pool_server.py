"""The process behind a `WorkerPool`: loads the function once, forks workers and distributes the items of a batch.

It never runs an item itself, so it always answers, and it is single-threaded, so forking it is safe. It imports only
the standard library and `llamarl.child`, because every worker inherits its imports.

    pool -> server    one line of JSON per batch: {"items": [...], "batch_s": seconds}
    server -> pool    READY, then per item, in any order: [index, null, value] or [index, a FailureKind, why]
    server -> worker  an item on a line; the worker replies with the rest of such an answer

Nothing outlives the pool's process: the server ends at the end of its stream or when its parent changes, and workers
end with the server (parent-death signal on Linux; killed by id elsewhere). On Linux, processes that a worker has
started end with it: they become children of the server, which kills them.
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
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from llamarl.child import stream_to_parent

READY = b"ready\n"
_MAX_ATTEMPTS = 2
_IDLE = -1
_LOOK_AROUND_S = 1.0
"""Seconds between two checks of the server's parent."""
_SEND_TIMEOUT_S = 60.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_SWEEPS = 100
"""Largest number of sweeps over processes that fork while they are killed."""


class FailureKind(StrEnum):
    """Kind of reason why an item has no result."""

    CPU = "cpu"
    """The item exceeded its CPU time."""
    WALL = "wall"
    """The item exceeded its wall time."""
    BATCH = "batch"
    """The batch ran out of time, or the pool was closed."""
    DIED = "died"
    """Two workers died during the item, or two servers during its batch."""
    ERROR = "error"
    """The function raised, for example a memory error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the items of a pool."""

    num_workers: int = 2
    """Processes that work at the same time."""
    cpu_s: int = 3
    """CPU seconds per item. The kernel counts whole seconds."""
    wall_s: float = 30.0
    """Seconds per item."""
    slack_s: float = 0.0
    """Further seconds per item, if the function itself keeps to `wall_s`."""
    recycle_after: int = 500
    """Answers after which a worker is replaced, which bounds leaks."""
    memory_bytes: int = 1 << 30
    """Address space per worker."""

    @property
    def most_s(self) -> float:
        """Seconds after which an item is given up."""
        return self.wall_s + self.slack_s


@dataclass(slots=True)
class _PoolChild:
    pid: int
    stream: socket.socket
    index: int = _IDLE
    """Item that it works on."""
    deadline: float = 0.0
    """Monotonic second at which the item is given up."""
    answer: bytes = b""
    num_answers: int = 0


@dataclass(slots=True)
class _Batch:
    items: list[Any]
    waiting: deque[int]
    attempts: list[int]


def main() -> None:
    """Standard input: the pool's stream. Argument: a JSON object with function, warm_up, limits, parent."""
    control, options = stream_to_parent(), json.loads(sys.argv[1])
    # A blocked SIGXCPU would be inherited from the thread that started this process.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    module, _, name = options["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    for item in options["warm_up"]:
        function(item)
    gc.collect()
    gc.freeze()
    _Server(control, function, Limits(**options["limits"]), options["parent"]).serve()


class _Server:
    def __init__(self, control: socket.socket, function: Callable[[Any], Any], limits: Limits, parent: int) -> None:
        self._control, self._function, self._limits, self._parent = control, function, limits, parent
        self._control.settimeout(_SEND_TIMEOUT_S)  # a forked copy of a dead pool does not read
        self._received = bytearray()
        self._workers: list[_PoolChild] = []

    def serve(self) -> None:
        """Answers one batch after the other, until the pool's stream ends or its process is gone."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            self._control.sendall(READY)
            while True:
                while not self._received.endswith(b"\n"):
                    self._wait(_LOOK_AROUND_S)
                batch = json.loads(self._received)
                self._received.clear()
                self._answer(batch["items"], batch["batch_s"])
        except (EOFError, OSError):
            return
        finally:
            for worker in list(self._workers):
                self._end(worker)

    def _wait(self, timeout_s: float) -> list[socket.socket]:
        """Returns streams with something to read. Raises EOFError when the pool is gone."""
        # A forked copy of the parent can keep the stream open after the parent's death, so the parent is checked too.
        if os.getppid() != self._parent:
            raise EOFError
        watched = [self._control, *(worker.stream for worker in self._busy())]
        readable, _, _ = select.select(watched, [], [], min(max(timeout_s, 0.0), _LOOK_AROUND_S))
        if self._control in readable:
            data = self._control.recv(1 << 20)
            if not data:
                raise EOFError
            self._received += data
        return readable

    def _busy(self) -> list[_PoolChild]:
        return [worker for worker in self._workers if worker.index != _IDLE]

    def _answer(self, items: list[Any], batch_s: float) -> None:
        deadline = time.monotonic() + batch_s
        batch = _Batch(items, deque(range(len(items))), [0] * len(items))
        while time.monotonic() < deadline:
            self._hand_out(batch)
            if not self._busy():
                return
            until = min([deadline, *(worker.deadline for worker in self._busy())])
            readable = self._wait(until - time.monotonic())
            for worker in self._busy():
                if worker.stream in readable:
                    self._read(worker, batch)
                elif worker.deadline <= time.monotonic():
                    self._fail(worker.index, FailureKind.WALL, f"grader took over {self._limits.wall_s:g} s")
                    self._end(worker)
        for worker in self._busy():
            batch.waiting.append(worker.index)
            self._end(worker)
        for index in batch.waiting:
            self._fail(index, FailureKind.BATCH, f"the batch of {len(items)} took over {batch_s:g} s")

    def _hand_out(self, batch: _Batch) -> None:
        idle = [worker for worker in self._workers if worker.index == _IDLE]
        while batch.waiting and (idle or len(self._workers) < self._limits.num_workers):
            worker = idle.pop() if idle else self._fork()
            worker.index = batch.waiting.popleft()
            worker.deadline = time.monotonic() + self._limits.most_s
            try:  # a stopped worker must not keep a long item
                worker.stream.sendall(json.dumps(batch.items[worker.index]).encode() + b"\n")
            except TimeoutError:
                worker.deadline = 0.0
            except OSError:  # it died while idle, not because of the item
                batch.waiting.appendleft(worker.index)
                self._end(worker)

    def _read(self, worker: _PoolChild, batch: _Batch) -> None:
        """Forwards an answer. An item whose worker died is tried again once."""
        try:
            data = worker.stream.recv(1 << 16)
        except ConnectionError:
            data = b""
        worker.answer += data
        if worker.answer.endswith(b"\n"):
            self._control.sendall(b"[%d, %b]\n" % (worker.index, worker.answer[:-1]))
            worker.index, worker.answer = _IDLE, b""
            worker.num_answers += 1
            if worker.num_answers >= self._limits.recycle_after:
                self._end(worker)
        elif not data:
            index, status = worker.index, self._end(worker)
            batch.attempts[index] += 1
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                self._fail(index, FailureKind.CPU, f"grader used over {self._limits.cpu_s} s of CPU time")
            elif batch.attempts[index] < _MAX_ATTEMPTS:
                batch.waiting.appendleft(index)
            else:
                self._fail(index, FailureKind.DIED, f"grader died: exit code {os.waitstatus_to_exitcode(status)}")

    def _fail(self, index: int, kind: FailureKind, reason: str) -> None:
        self._control.sendall(json.dumps([index, kind, reason]).encode() + b"\n")

    def _end(self, worker: _PoolChild) -> int:
        """Ends a worker and the processes that it started. Returns its wait status, which is that of an earlier end if
        it had ended."""
        self._workers.remove(worker)
        worker.stream.close()
        os.kill(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        for _ in range(_MAX_SWEEPS):
            if not (left := _children() - {other.pid for other in self._workers}):
                break
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return status

    def _fork(self) -> _PoolChild:
        server, (ours, theirs) = os.getpid(), socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                ours.close()
                _confine(self._limits, server)
                _work(theirs, self._function, self._limits.cpu_s)
            finally:
                os._exit(0 if sys.exception() is None else 1)
        theirs.close()
        ours.settimeout(self._limits.most_s)
        self._workers.append(_PoolChild(pid, ours))
        return self._workers[-1]


def _children() -> set[int]:
    """Returns the ids of this process's children, on Linux only."""
    children, parent = set[int](), str(os.getpid())
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with suppress(OSError):  # it has ended
            if name.isdigit() and Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1] == parent:
                children.add(int(name))
    return children


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
    """Answers items until the server is gone. The kernel ends a worker that exceeds its CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    stream = connection.makefile("rwb")
    for line in stream:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s), hard))
        try:
            reply = f"null, {json.dumps(function(json.loads(line)))}"
        except Exception as error:  # the sandbox: an exception is the answer about its item
            reply = json.dumps([FailureKind.ERROR, f"grader: {type(error).__name__}: {error}"[:200]])[1:-1]
        stream.write(reply.encode() + b"\n")
        stream.flush()


if __name__ == "__main__":
    main()
