"""`WorkerPool`: calls a function in processes that can be killed.

Limits are on the process: CPU time and memory by the kernel, wall time per item as a backstop, and wall time per batch.
A timeout by signal handler or thread would not end a grader that is stuck in C code or catches it. An item is tried
again once after its worker dies. A dead fork server is replaced. The process that uses the pool is never forked, so it
may have threads. Answers are JSON, never a pickle, so a worker cannot make the pool run code.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from llamarl.child import Child, code_path
from llamarl.config import ConfigError
from llamarl.sandbox.pool_server import READY, FailureKind, Limits

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
DEFAULTS = Limits()
MAX_WORKERS = 256
"""Largest number of worker processes of a pool."""
_ORDERS = (1, -1)
"""Order of the items of a batch for the first fork server, and for its replacement: an item that kills the first server
is the last that the second gets."""
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TMPDIR", "VIRTUAL_ENV", "LLAMARL_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Reason why an item has no result."""

    kind: FailureKind
    reason: str
    """A short text for people."""


class WorkerPool:
    """Runs `function` on items in worker processes. Starts at the first `map`. Only one `map` runs at a time."""

    def __init__(
        self,
        function: str,
        limits: Limits = DEFAULTS,
        *,
        warm_up: Sequence[Any] = (),
        keeps_environment: bool = False,
    ) -> None:
        """
        Args:
            function: `module:name` of a function from one JSON value to another.
            warm_up: trusted items that the fork server itself runs once, so that workers begin with warm caches.
            keeps_environment: whether workers get all of this process's environment variables, as a user's code
                expects.

        Raises:
            ConfigError: a number that is not positive, or more workers than `MAX_WORKERS`.
        """
        numbers = {
            "workers": limits.num_workers,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "recycle_after": limits.recycle_after,
        }
        for option, number in numbers.items():
            if not number > 0:
                raise ConfigError(f"`{option} = {number}` of a grader pool must be positive")
        if limits.num_workers > MAX_WORKERS:
            raise ConfigError(f"`workers = {limits.num_workers}` of a grader pool is more than {MAX_WORKERS} processes")
        self._keeps_environment = keeps_environment
        self._options = {"function": function, "warm_up": list(warm_up), "limits": asdict(limits)}
        self._lock = threading.Lock()
        self._server: Child | None = None
        self._closed = False

    def map(self, items: Sequence[Any], batch_s: float) -> list[Any]:
        """Returns one result or `Failure` per item, in order, within `batch_s` seconds, not counting starts of a
        server.

        Raises:
            RuntimeError: the pool is closed, or its fork server cannot start.
        """
        results: dict[int, Any] = {}
        failure = Failure(kind=FailureKind.DIED, reason=f"grader died, as did {len(_ORDERS)} fork servers")
        with self._lock:
            if self._closed:
                raise RuntimeError("the grader pool is closed")
            deadline = time.monotonic() + batch_s
            for order in _ORDERS:
                if len(results) == len(items):
                    break
                before = time.monotonic()
                control = self._started().stream
                deadline += time.monotonic() - before
                with suppress(OSError, ValueError):  # the server has died or hangs, or a worker sent no JSON
                    self._ask(control, items, results, deadline - time.monotonic(), order)
                    break
                self._stop()
                if self._closed:
                    failure = Failure(kind=FailureKind.BATCH, reason="the grader pool was closed")
                    break
        return [results.get(index, failure) for index in range(len(items))]

    def _ask(
        self, control: socket.socket, items: Sequence[Any], results: dict[int, Any], batch_s: float, order: int
    ) -> None:
        """Adds missing results as they arrive. Raises OSError, ValueError."""
        if self._closed:  # during the start
            raise ConnectionError
        missing = [index for index in range(len(items)) if index not in results][::order]
        batch = {"items": [items[index] for index in missing], "batch_s": batch_s}
        control.settimeout(max(batch_s, 0.0) + _STOP_TIMEOUT_S)
        control.sendall(json.dumps(batch).encode() + b"\n")
        with control.makefile("rb") as answers:
            for _ in missing:
                line = answers.readline()
                if not line:
                    raise ConnectionError
                place, kind, value = json.loads(line)
                failure = Failure(kind=FailureKind(kind), reason=value) if kind else None
                results[missing[place]] = failure or value

    def close(self) -> None:
        """Ends server and workers. May be called twice, and while another thread is in `map`."""
        self._closed = True
        if server := self._server:
            with suppress(OSError):  # no longer connected
                server.stream.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._stop()

    def _started(self) -> Child:
        if self._server:
            return self._server
        # Little is inherited: graders need no secrets. A fixed hash seed repeats verdicts that depend on set order.
        kept = ("",) if self._keeps_environment else _KEPT_ENVIRONMENT
        environment = {name: value for name, value in os.environ.items() if name.startswith(kept)}
        environment |= {"PYTHONPATH": code_path(), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        options = json.dumps(self._options | {"parent": os.getpid()})
        module = "llamarl.sandbox.pool_server"
        server = self._server = Child("-m", module, options, env=environment, stdout=subprocess.DEVNULL)
        server.stream.settimeout(_START_TIMEOUT_S)
        reply = b""
        with suppress(OSError):
            reply = b"" if self._closed else server.stream.recv(len(READY))  # `close` may have come first
        if reply != READY and not self._closed:
            self._stop()
            raise RuntimeError(f"the fork server of {self._options['function']} did not start")
        return server

    def _stop(self) -> None:
        if self._server is not None:
            self._server.end(_STOP_TIMEOUT_S)
            self._server = None
