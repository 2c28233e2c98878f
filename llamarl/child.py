"""`Child`: a process of this package that is started, spoken to and killed, whatever it is at."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

KILLED_S = 5.0
"""Longest wait in seconds for a killed process to be gone."""


class Child(subprocess.Popen[bytes]):
    """This Python with other arguments, on whose standard input is the other end of `stream`.

    That ends when this process does, however it ends, and no other child inherits it: who reads it to its end leaves
    no orphan. The child leads a session of its own: Ctrl-C is for this process alone, which ends that one together
    with what it has started.
    """

    def __init__(self, *arguments: str, kind: int = socket.SOCK_STREAM, **options: Any) -> None:
        """
        Args:
            arguments: of the interpreter, such as `-m llamarl.parts.hub.client`.
            kind: of the stream, such as `SOCK_SEQPACKET`.
            options: of `subprocess.Popen`, for output and folder; without `env` it gets this process's environment, and
                finds the same code.

        Raises:
            OSError: it cannot be started.
        """
        self.stream, theirs = socket.socketpair(socket.AF_UNIX, kind)
        options.setdefault("env", {**os.environ, "PYTHONPATH": code_path()})
        with theirs:
            super().__init__([sys.executable, *arguments], stdin=theirs.fileno(), start_new_session=True, **options)

    def has_ended(self) -> bool:
        """Whether it has. If somebody has killed it, what it has started ends with it."""
        if self.returncode is None and self.poll() is not None and self._was_killed:
            kill_group(self.pid)
        return self.returncode is not None

    def end(self, grace_s: float = 0.0) -> None:
        """Closes the stream, gives the child as long to end by itself, and then kills it and what it has started."""
        self.stream.close()
        if self.returncode is not None:  # its number may be another's by now
            return
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
        if self.returncode is None or self._was_killed:
            kill_group(self.pid)
        self.wait(KILLED_S)

    @property
    def _was_killed(self) -> bool:
        """Whether a signal has ended it, so that it could not see to what it has started."""
        return self.returncode is not None and self.returncode < 0


def stream_to_parent() -> socket.socket:
    """In a child, the other end of its `stream`. Its standard input is empty from then on, for all that it starts."""
    stream = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    return stream


def kill_group(pid: int) -> None:
    """Ends a process that leads a group, if it still runs, and what it has started and left behind."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def code_path() -> str:
    """PYTHONPATH of a process that finds the same code as this one, in whatever folder it runs."""
    return os.pathsep.join(map(os.path.abspath, sys.path))
