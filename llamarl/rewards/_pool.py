"""`WorkerPool`: a function in processes that can be killed.

Limits are on the process: CPU time and memory by the kernel, wall time by this side as backstop, and wall time per
batch. No time-out by signal handler or thread: those do not end a grader that is stuck in C code or catches them. A
worker that dies under an item costs that item one retry; a dead fork server is replaced. The process that uses the pool
is never forked, so it may have threads.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import wait
from typing import Any

from llamarl.config import ConfigError
from llamarl.rewards._pool_server import FORK, FORKED, ORDER, READY, REPORT

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_MAX_ATTEMPTS = 2
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "VIRTUAL_ENV", "LLAMARL_")


class FailureKind(StrEnum):
    """Why an item has no result."""

    CPU = "cpu"
    """Over its CPU time."""
    WALL = "wall"
    """Over its wall time."""
    BATCH = "batch"
    """The batch ran out of time, or the pool was closed."""
    DIED = "died"
    """Two workers died under it."""
    ERROR = "error"
    """The function raised; memory errors are here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """In place of a result."""

    kind: FailureKind
    reason: str
    """Short and for people."""


class _ServerLost(Exception):
    """The fork server is gone."""


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    connection: socket.socket
    index: int | None = None
    """Item that it works on."""
    deadline: float = 0.0
    """Monotonic second at which the item is given up."""
    reply: bytes = b""
    num_answers: int = 0
    hung_up: bool = False
    """Its connection is at its end; the report of its death follows."""


@dataclass(slots=True, eq=False)
class _Batch:
    lines: list[bytes]
    waiting: deque[int]
    results: list[Any]
    done: list[bool]
    attempts: list[int]

    @classmethod
    def of(cls, items: Sequence[Any]) -> _Batch:
        lines, count = [json.dumps(item).encode() + b"\n" for item in items], len(items)
        return cls(lines, deque(range(count)), [None] * count, [False] * count, [0] * count)

    def settle(self, index: int, result: Any) -> None:
        self.results[index], self.done[index] = result, True


class WorkerPool:
    """Runs `function` on items in worker processes. Starts at the first `map`; one `map` at a time, others wait."""

    def __init__(
        self,
        function: str,
        *,
        num_workers: int = 2,
        cpu_s: int = 3,
        wall_s: float = 30.0,
        recycle_after: int = 500,
        memory_bytes: int = 2**30,
        warm_up: Sequence[Any] = (),
    ) -> None:
        """
        Args:
            function: `module:name` of a function from one JSON value to another.
            num_workers: processes that work at the same time.
            cpu_s: CPU seconds per item, rounded up to the kernel's whole seconds.
            wall_s: seconds per item.
            recycle_after: answers after which a worker is replaced, which bounds leaks.
            memory_bytes: address space per worker.
            warm_up: items that the fork server itself runs once, so that workers begin with warm caches; trusted.

        Raises:
            ConfigError: a number that is not positive.
        """
        numbers = {"workers": num_workers, "cpu_s": cpu_s, "wall_s": wall_s, "recycle_after": recycle_after}
        for option, number in numbers.items():
            if not number > 0:
                raise ConfigError(f"`{option} = {number}` of a grader pool must be positive")
        self.num_workers, self.cpu_s, self.wall_s, self.recycle_after = num_workers, cpu_s, wall_s, recycle_after
        self._options = {"function": function, "warm_up": list(warm_up), "limits": [cpu_s, memory_bytes]}
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._reports = b""
        self._deaths: list[tuple[int, int]] = []
        self._workers: list[_Worker] = []
        self._closed = False

    @property
    def started(self) -> bool:
        return self._server is not None

    def worker_pids(self) -> list[int]:
        """Processes that are alive, as far as this side knows."""
        return [worker.pid for worker in self._workers]

    def map(self, items: Sequence[Any], batch_s: float) -> list[Any]:
        """One result or `Failure` per item, in order, within `batch_s` seconds (the pool's first start not counted).

        Raises:
            RuntimeError: the pool is closed, or its fork server cannot start.
        """
        batch = _Batch.of(items)
        if not items:
            return []
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader pool is closed")
            self._start()
            deadline = time.monotonic() + batch_s
            try:
                while not all(batch.done) and time.monotonic() < deadline and not self._closed:
                    self._advance(batch, deadline)
            finally:
                self._end_busy()
        reason = "the grader pool was closed" if self._closed else f"the batch of {len(items)} took over {batch_s:g} s"
        unfinished = Failure(kind=FailureKind.BATCH, reason=reason)
        return [result if done else unfinished for result, done in zip(batch.results, batch.done, strict=True)]

    def close(self) -> None:
        """Ends server and workers. May be called twice, and while another thread is in `map`."""
        self._closed = True
        control = self._control
        if control is not None:
            with suppress(OSError):  # already disconnected
                control.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._stop()

    def _advance(self, batch: _Batch, deadline: float) -> None:
        """Hands out items, then waits for an answer, a death or a deadline."""
        try:
            self._start()
            self._dispatch(batch)
            self._collect(batch, deadline)
        except _ServerLost:
            for worker in self._workers:
                self._lose(worker, batch, "its fork server died")
            self._stop()

    # --- server ---

    def _start(self) -> None:
        if self._server is not None:
            return
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_TIMEOUT_S)
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        # Little is inherited: graders need no secrets. With a fixed hash seed, verdicts that hang on set order repeat.
        environment = {name: value for name, value in os.environ.items() if name.startswith(_KEPT_ENVIRONMENT)}
        environment |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        options = json.dumps(self._options | {"parent": os.getpid()})
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "llamarl.rewards._pool_server", str(theirs.fileno()), options],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which then closes the pool
            )
        self._control = ours
        try:
            self._await_report(READY)
        except _ServerLost:
            self._stop()
            if not self._closed:
                raise RuntimeError(f"the fork server of {self._options['function']} did not start") from None

    def _stop(self) -> None:
        for worker in self._workers:
            worker.connection.close()
        self._workers, self._deaths, self._reports = [], [], b""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            try:
                self._server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait(_STOP_TIMEOUT_S)
            self._server = None

    def _order(self, order: int, *connections: socket.socket) -> None:
        if self._control is None:
            raise _ServerLost
        try:
            socket.send_fds(self._control, [ORDER.pack(order)], [connection.fileno() for connection in connections])
        except OSError as error:
            raise _ServerLost from error

    def _read_reports(self) -> list[tuple[int, int]]:
        if self._control is None:
            raise _ServerLost
        try:
            data = self._control.recv(65536)
        except OSError as error:
            raise _ServerLost from error
        if not data:
            raise _ServerLost
        self._reports += data
        end = len(self._reports) // REPORT.size * REPORT.size
        reports, self._reports = list(REPORT.iter_unpack(self._reports[:end])), self._reports[end:]
        return reports

    def _await_report(self, kind: int) -> int:
        """The pid in the next report of this kind; deaths that come before it are kept for `_collect`."""
        while True:
            found = None
            for pid, status in self._read_reports():
                if status == kind:
                    found = pid
                else:
                    self._deaths.append((pid, status))
            if found is not None:
                return found

    # --- workers ---

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._order(FORK, theirs)
            worker = _Worker(self._await_report(FORKED), ours)
        except _ServerLost:
            ours.close()
            raise
        ours.setblocking(False)
        self._workers.append(worker)
        return worker

    def _retire(self, worker: _Worker, *, kill: bool) -> None:
        """Forgets a worker. An idle one ends by itself when its connection closes."""
        self._workers.remove(worker)
        worker.connection.close()
        if kill:
            self._order(worker.pid)

    def _end_busy(self) -> None:
        try:
            for worker in [worker for worker in self._workers if worker.index is not None]:
                self._retire(worker, kill=True)
        except _ServerLost:
            self._stop()

    # --- one batch ---

    def _dispatch(self, batch: _Batch) -> None:
        idle = [worker for worker in self._workers if worker.index is None and not worker.hung_up]
        while batch.waiting and (idle or len(self._workers) < self.num_workers):
            worker = idle.pop() if idle else self._spawn()
            index = worker.index = batch.waiting.popleft()
            worker.deadline = time.monotonic() + self.wall_s
            try:
                worker.connection.settimeout(self.wall_s)  # a stopped worker must not hold a long item for ever
                worker.connection.sendall(batch.lines[index])
                worker.connection.setblocking(False)
                batch.attempts[index] += 1
            except ConnectionError:  # it died while idle: not the item's doing
                batch.waiting.appendleft(index)
                self._retire(worker, kill=True)
            except TimeoutError:
                worker.deadline = 0.0

    def _collect(self, batch: _Batch, deadline: float) -> None:
        if self._control is None:
            raise _ServerLost
        busy = [worker for worker in self._workers if worker.index is not None]
        until = min([deadline, *(worker.deadline for worker in busy)])
        heard = [self._control, *(worker.connection for worker in busy if not worker.hung_up)]
        ready = wait(heard, 0 if self._deaths else max(0.0, until - time.monotonic()))
        for worker in busy:
            if worker.connection in ready:
                self._receive(worker, batch)
        if self._control in ready:
            self._deaths += self._read_reports()
        self._bury(batch)
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.index is not None and worker.deadline <= now]:
            self._settle(worker, batch, Failure(kind=FailureKind.WALL, reason=f"grader took over {self.wall_s:g} s"))
            self._retire(worker, kill=True)

    def _receive(self, worker: _Worker, batch: _Batch) -> None:
        try:
            while data := worker.connection.recv(65536):
                worker.reply += data
            worker.hung_up = True
        except BlockingIOError:
            pass
        except ConnectionError:
            worker.hung_up = True
        if not worker.reply.endswith(b"\n"):
            return
        reply, worker.reply = json.loads(worker.reply), b""
        if "error" in reply:
            self._settle(worker, batch, Failure(kind=FailureKind.ERROR, reason=f"grader: {reply['error']}"))
        else:
            self._settle(worker, batch, reply["value"])
        worker.num_answers += 1
        if worker.num_answers >= self.recycle_after:
            self._retire(worker, kill=False)

    def _bury(self, batch: _Batch) -> None:
        """Workers that the server reported dead. One that answered before it died has done its work."""
        deaths, self._deaths = dict(self._deaths), []
        for worker in [worker for worker in self._workers if worker.pid in deaths]:
            if worker.index is not None and not worker.hung_up:
                self._receive(worker, batch)
            if worker not in self._workers:
                continue
            status = deaths[worker.pid]
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU and worker.index is not None:
                reason = f"grader used over {self.cpu_s} s of CPU time"
                self._settle(worker, batch, Failure(kind=FailureKind.CPU, reason=reason))
            self._lose(worker, batch, f"exit code {os.waitstatus_to_exitcode(status)}")
            self._retire(worker, kill=False)

    def _settle(self, worker: _Worker, batch: _Batch, result: Any) -> None:
        if worker.index is not None:
            batch.settle(worker.index, result)
            worker.index = None

    def _lose(self, worker: _Worker, batch: _Batch, cause: str) -> None:
        """The item of a worker that is gone: tried once more elsewhere, then given up."""
        if worker.index is None:
            return
        if batch.attempts[worker.index] < _MAX_ATTEMPTS:
            batch.waiting.appendleft(worker.index)
            worker.index = None
        else:
            reason = f"{_MAX_ATTEMPTS} graders died under it, the last with: {cause}"
            self._settle(worker, batch, Failure(kind=FailureKind.DIED, reason=reason))
