"""`ProgramJudge`: judges untrusted programs by tests that they cannot access.

Each worker of a `WorkerPool` has a separate fork server process that never receives a job. For each job it forks two
children (judge_children.py), both confined to computing (seccomp.py). Values of the program cross as JSON
(judge_values.py). The tester determines the verdict.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llamarl.child import Child
from llamarl.config import ConfigError
from llamarl.parts.episodes.sandbox import seccomp
from llamarl.parts.episodes.sandbox.judge_server import READY
from llamarl.sandbox.pool import Failure, Limits, WorkerPool

_START_S = 60.0
_END_S = 30.0
_SUPERVISOR_CPU_S = 30
_QUICK_CPU_S, _QUICK_WALL_S = 1, 10.0
"""CPU and wall-clock limits of the first attempt of every job. Jobs that need more are repeated after all others."""
_MIN_MEMORY_BYTES = 1 << 27


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeJob:
    """A program, and either tests that call it or cases for its standard input."""

    code: str
    prelude: str = ""
    """Code of the row that runs before the program, or that the program continues."""
    setup: str = ""
    """Code that runs before the tests."""
    tests: str = ""
    entry: str = ""
    """Name of the function passed to `check(candidate)`, if the tests define `check`."""
    names: tuple[str, ...] = ()
    """Names that the program provides even if `setup` or Python defines them. Names that the tests do not define are
    always the program's."""
    cases: tuple[tuple[str, str], ...] = ()
    """Standard inputs and expected outputs, instead of tests."""
    shows: int = 0
    """Runs the program without tests, and returns up to this many characters of its output as the `reason`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramVerdict:
    """Verdict of the tests on one program."""

    is_right: bool | None
    """Whether the program is right. None means no verdict, because the tests are faulty."""
    reason: str = ""
    """Short explanation for people."""


class ProgramJudge:
    """Runs `workers` jobs in parallel. Starts at the first call. `close` stops all processes."""

    def __init__(self, *, workers: int, cpu_s: int, wall_s: float, memory_bytes: int) -> None:
        """
        Args:
            workers: number of parallel jobs.
            cpu_s: CPU seconds of a program, and separately of its tests.
            wall_s: seconds of a job. A job that exceeds a limit may have taken as long before, in a short attempt.
            memory_bytes: address space of a program, and separately of its tests.

        Raises:
            ConfigError: a limit is invalid, or this machine cannot confine a process.
        """
        if memory_bytes < _MIN_MEMORY_BYTES:
            raise ConfigError(f"`memory_bytes = {memory_bytes}` holds no Python; give at least {_MIN_MEMORY_BYTES}")
        if cpu_s < 1 or cpu_s != int(cpu_s):
            raise ConfigError(f"`cpu_s = {cpu_s}` must be whole seconds, at least 1: the kernel counts no others")
        if lacking := seccomp.missing():
            raise ConfigError(f"programs cannot be confined here: {lacking}; use such a machine, or another reward")
        self._attempts = [
            {"limits": {"cpu_s": cpu, "memory_bytes": memory_bytes}, "wall_s": wall}
            for cpu, wall in ((min(cpu_s, _QUICK_CPU_S), min(wall_s, _QUICK_WALL_S)), (cpu_s, wall_s))
        ]
        self._pool = WorkerPool(
            f"{__name__}:judge",
            Limits(
                num_workers=workers,
                cpu_s=_SUPERVISOR_CPU_S,
                wall_s=wall_s,
                slack_s=_START_S + _END_S,
                recycle_after=10_000,
                memory_bytes=memory_bytes + (1 << 30),
            ),
        )

    def judge(self, jobs: Sequence[JudgeJob], batch_s: float) -> list[ProgramVerdict | Failure]:
        """Returns one verdict per job, in order. A `Failure` means that the judge failed or `batch_s` seconds were
        over."""
        deadline = time.monotonic() + batch_s
        answers: list[Any] = [[None, "", None]] * len(jobs)
        for options in self._attempts:
            left = [n for n, answer in enumerate(answers) if _can_go_on(answer, options)]
            items = [{**options, "job": asdict(jobs[n])} for n in left]
            for n, answer in zip(
                left,
                self._pool.map(items, round(max(deadline - time.monotonic(), 0.0), 1)) if left else (),
                strict=True,
            ):
                answers[n] = answer
        return [
            answer if isinstance(answer, Failure) else ProgramVerdict(is_right=answer[0], reason=answer[1])
            for answer in answers
        ]

    def close(self) -> None:
        """Stops every process. May be called twice."""
        self._pool.close()


def _can_go_on(answer: list[Any] | Failure, options: dict[str, Any]) -> bool:
    """Returns whether a second attempt with the limits of `options` can have a different result."""
    if isinstance(answer, Failure) or answer[2] == {}:
        return False
    limits = {"cpu_s": options["limits"]["cpu_s"], "wall_s": options["wall_s"]}
    return answer[2] is None or any(limits[name] > limit for name, limit in answer[2].items())


def judge(item: dict[str, Any]) -> list[Any]:
    """Judges one item in a worker. Returns [is_right, reason, {name of the exceeded limit: the limit}]. Exits the
    worker if its fork server has died, so that the pool retries once."""
    limits, wall_s = item["limits"], item["wall_s"]
    try:
        server = _server().stream
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(server, [json.dumps(limits).encode()], [theirs.fileno()])
        with ours:
            said, is_late = _ask(ours, json.dumps(item["job"]).encode() + b"\n", time.monotonic() + wall_s)
        server.send(b".")
        *ends, is_idle = json.loads(server.recv(1 << 16))
    except (OSError, ValueError) as error:
        raise SystemExit(1) from error
    if -signal.SIGUSR1 in ends:
        raise RuntimeError("a process could not be confined, so nothing was run")
    verdict = json.loads(said) if said.endswith(b"\n") else None
    if -signal.SIGXCPU in ends:  # first, because tests may catch the end of the program as an expected exception
        who = "program" if ends[0] == -signal.SIGXCPU else "tests"
        return [False, f"the {who} used over {limits['cpu_s']} s of CPU time", {"cpu_s": limits["cpu_s"]}]
    if verdict and verdict[0]:
        return [*verdict, {}]
    if is_late:
        return [False, f"over {wall_s:g} s", {"wall_s": wall_s}]
    if is_idle:
        return [False, "it waits for what never comes", {}]
    if verdict is None:
        raise RuntimeError("the tester died")
    return [*verdict, {}]


def _ask(stream: socket.socket, job: bytes, deadline: float) -> tuple[bytes, bool]:
    """Returns the tester's answer, and whether it timed out."""
    said = b""
    try:
        stream.settimeout(max(deadline - time.monotonic(), 1e-3))
        stream.sendall(job)
        while not said.endswith(b"\n"):
            stream.settimeout(max(deadline - time.monotonic(), 1e-3))
            data = stream.recv(1 << 16)
            if not data:
                break
            said += data
    except TimeoutError:
        return said, True
    except ConnectionError:  # the tester died; the server has the cause
        pass
    return said, False


@functools.cache
def _server() -> Child:
    """Returns the worker's fork server, a separate program, so that its memory contains no job, path or variable of
    ours."""
    kept = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    server = Child(
        *("-P", "-s", "-m", "llamarl.parts.episodes.sandbox.judge_server"),
        env={**kept, "PYTHONHASHSEED": "0"}, kind=socket.SOCK_SEQPACKET,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    server.stream.settimeout(_START_S)
    if server.stream.recv(len(READY)) != READY:
        raise ConnectionError("the fork server of the judge did not start")
    return server
