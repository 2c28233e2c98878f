"""`ProgramJudge`: programs that nobody trusts, judged by tests that they cannot reach.

A worker of a `WorkerPool` has a fork server of its own, a process that knows no job. For each job that forks two
children (judge_children.py), both confined to computing (seccomp.py). The program's values cross as JSON
(judge_values.py); the verdict is the tester's.
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
from llamarl.sandbox.pool import Failure, WorkerPool

_START_S = 60.0
_END_S = 30.0
_SUPERVISOR_CPU_S = 30
_QUICK_CPU_S, _QUICK_WALL_S = 1, 10.0
"""All of a batch get so much first: those that need more hold up nobody but each other."""
_MIN_MEMORY_BYTES = 1 << 27


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeJob:
    """A program, and either tests that call it or cases for its standard input."""

    code: str
    prelude: str = ""
    """Code of the row, run before the program's, or continued by it."""
    setup: str = ""
    """Code that the tests need to have run before."""
    tests: str = ""
    entry: str = ""
    """Name of the function that `check(candidate)` is called with, where the tests define `check`."""
    names: tuple[str, ...] = ()
    """Names that are the program's even where `setup` or Python has them too; others that the tests do not know are
    anyway."""
    cases: tuple[tuple[str, str], ...] = ()
    """Standard input and what is printed then; without tests."""
    shows: int = 0
    """Only run the program, without tests, and say so many characters of what it prints as the `reason`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramVerdict:
    """Judgement of the tests on one program."""

    is_right: bool | None
    """Verdict on the program; None: nothing follows for it, as the tests are at fault."""
    reason: str = ""
    """Short and for people."""


class ProgramJudge:
    """Runs jobs in `workers` at a time. Starts at the first call; nothing outlives `close`."""

    def __init__(self, *, workers: int, cpu_s: int, wall_s: float, memory_bytes: int) -> None:
        """
        Args:
            workers: jobs at the same time.
            cpu_s: CPU seconds of a program, and again of its tests.
            wall_s: seconds of a job; one that goes over a limit may have taken as long before, in a short attempt.
            memory_bytes: address space of a program, and again of its tests.

        Raises:
            ConfigError: a number that cannot work, or a machine that cannot confine a process.
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
            num_workers=workers,
            cpu_s=_SUPERVISOR_CPU_S,
            wall_s=wall_s,
            slack_s=_START_S + _END_S,
            recycle_after=10_000,
            memory_bytes=memory_bytes + (1 << 30),
        )

    def judge(self, jobs: Sequence[JudgeJob], batch_s: float) -> list[ProgramVerdict | Failure]:
        """One verdict per job, in order; a `Failure` where the judge itself failed or `batch_s` seconds were over."""
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
        """Ends every process. May be called twice."""
        self._pool.close()


def _can_go_on(answer: list[Any] | Failure, options: dict[str, Any]) -> bool:
    """Whether an attempt with the limits of `options` can change an answer of an attempt before it."""
    if isinstance(answer, Failure) or answer[2] == {}:
        return False
    limits = {"cpu_s": options["limits"]["cpu_s"], "wall_s": options["wall_s"]}
    return answer[2] is None or any(limits[name] > limit for name, limit in answer[2].items())


def judge(item: dict[str, Any]) -> list[Any]:
    """Judges one item in a worker. Returns [is_right, reason, {name of the limit that was exceeded: the limit}]. Ends
    the worker if its fork server is lost: the pool then tries once more."""
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
    if -signal.SIGXCPU in ends:  # first: tests may take the end of the program for an exception that they wait for
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
    """Answer of the tester, and whether it was given up."""
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
    except ConnectionError:  # it died; how, the server says
        pass
    return said, False


@functools.cache
def _server() -> Child:
    """The worker's fork server: a program of its own, so that no job, path or variable of ours is in its memory."""
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
