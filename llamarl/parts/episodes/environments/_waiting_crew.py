"""`WaitingCrew`: the worker processes of an environment whose `reply` is a coroutine. No torch."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from llamarl.child import Child
from llamarl.parts.episodes.environments._base import Environment
from llamarl.sandbox.pool import Failure
from llamarl.sandbox.pool_server import FailureKind

T = TypeVar("T")
GRACE_S = 10.0
"""Seconds after the limit of a reply until its process counts as hung."""
END_S = 5.0
"""Longest wait in seconds for a process to close the states of its episodes."""
_LOOK_S = 1.0
"""Longest time in seconds between two looks at deadlines."""


class _OpenReply(NamedTuple):
    name: str
    episode: Any
    until_s: float


class WaitingCrew(Generic[T]):
    """Requests replies for episodes, which have names, like `Crew`. A process waits for all of its episodes at once. If
    episodes have state, the process of the first reply makes all of them."""

    def __init__(
        self,
        environment: Environment,
        item_of: Callable[[T], dict[str, Any]],
        replied: Callable[[Sequence[tuple[T, dict[str, Any] | Failure]], float], Sequence[bool]],
    ) -> None:
        """See `Crew`."""
        self._environment, self._item_of, self._replied = environment, item_of, replied
        self._processes = [_LoopProcess(environment, self._answered) for _ in range(environment.workers)]
        self._homes = dict[str, _LoopProcess]()
        self._lock = threading.Lock()

    def ask(self, episodes: Sequence[tuple[str, T]]) -> None:
        """Queues episodes, by name, whose last turn needs a reply."""
        for name, episode in episodes:
            item = self._item_of(episode)
            with self._lock:
                process = self._homes.get(name) or min(self._processes, key=lambda one: one.num_waiting)
                if self._environment.is_stateful:
                    self._homes[name] = process
            process.ask(name, episode, item)

    def leave(self, names: Sequence[str]) -> None:
        """Closes the state of these episodes."""
        for name in names:
            with self._lock:
                process = self._homes.pop(name, None)
            if process is not None:
                process.end_episode(name)

    def close(self) -> None:
        """Closes all episodes and stops all processes."""
        for process in self._processes:
            process.close()

    def _answered(self, waiting: _OpenReply, said: dict[str, Any] | Failure, seconds: float) -> None:
        (goes_on,) = self._replied([(waiting.episode, said)], seconds)
        if not goes_on:
            self.leave([waiting.name])


class _LoopProcess:
    """One process with an event loop, started on demand and again after its death. A thread reads its replies."""

    def __init__(
        self, environment: Environment, answered: Callable[[_OpenReply, dict[str, Any] | Failure, float], None]
    ) -> None:
        self._limits, self._answered = environment, answered
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._waiting = dict[int, _OpenReply]()
        self._numbers, self._is_closed = count(), False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def ask(self, name: str, episode: Any, item: dict[str, Any]) -> None:
        with self._lock:
            if self._is_closed:
                return
            number = next(self._numbers)
            self._waiting[number] = _OpenReply(name, episode, time.monotonic() + self._limits.step_s + GRACE_S)
            if self._child is None:
                self._start()
            self._send({"number": number, "step_s": self._limits.step_s} | item)

    def end_episode(self, name: str) -> None:
        with self._lock:
            if self._child is not None:
                self._send({"number": -1, "step_s": self._limits.step_s, "ended": name})

    def close(self) -> None:
        with self._lock:
            self._is_closed, child = True, self._child
        if child is not None:
            with suppress(OSError):
                child.stream.shutdown(socket.SHUT_WR)
            child.end(END_S)

    def _start(self) -> None:
        arguments = str(self._limits.memory_bytes), str(os.getpid())
        child = self._child = Child("-m", "llamarl.parts.episodes.environments._async_worker", *arguments)
        child.stream.settimeout(GRACE_S)  # of a send: a process that hangs reads nothing
        threading.Thread(target=self._read, args=(child,), name="environment", daemon=True).start()

    def _send(self, message: dict[str, Any]) -> None:
        """Sends a message. If the process has died or hangs, the thread that reads its replies notices."""
        assert self._child is not None
        with suppress(OSError):
            self._child.stream.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, child: Child) -> None:
        """Passes replies on until the process ends or hangs. All episodes that wait for it then fail."""
        arrived, reason = bytearray(), ""
        with suppress(OSError, ValueError):  # the stream was closed meanwhile
            while not reason:
                if select.select([child.stream], [], [], _LOOK_S)[0]:
                    if not (data := child.stream.recv(1 << 20)):
                        break
                    arrived += data
                    *lines, rest = arrived.split(b"\n")
                    arrived = rest
                    for line in lines:
                        self._take(json.loads(line))
                elif min((one.until_s for one in list(self._waiting.values())), default=time.monotonic()) < (
                    time.monotonic()
                ):
                    reason = f"environment hung for {self._limits.step_s + GRACE_S:g} s"
        with self._lock:
            is_closed, self._child = self._is_closed, None
            lost, self._waiting = list(self._waiting.values()), {}
        if is_closed:
            return
        child.end()
        reason = reason or f"environment died: exit code {child.returncode}"
        for waiting in lost:
            self._answered(waiting, Failure(kind=FailureKind.DIED, reason=reason), 0.0)

    def _take(self, said: dict[str, Any]) -> None:
        with self._lock:
            waiting = self._waiting.pop(said.pop("number"), None)
        seconds = said.pop("seconds", 0.0)
        if waiting is not None:
            reason = said.get("error")
            self._answered(waiting, Failure(kind=FailureKind.ERROR, reason=reason) if reason else said, seconds)
