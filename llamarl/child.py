"""`Child`: a child process with a stream to its parent, which can be killed with all that it has started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

KILLED_S = 5.0
"""Longest wait for a killed process to end."""


class Child(subprocess.Popen[bytes]):
    """A Python process with other arguments, whose standard input is the other end of `stream`.

    The stream closes when this process ends, however it ends, and no other child inherits it. So a child that reads the
    stream to its end leaves no orphan. The child leads its own session: Ctrl-C goes only to this process, which then
    ends the child and all processes that the child has started.
    """

    def __init__(self, *arguments: str, kind: int = socket.SOCK_STREAM, **options: Any) -> None:
        """
        Args:
            arguments: arguments of the interpreter, such as `-m llamarl.parts.hub.client`.
            kind: kind of the stream, such as `SOCK_SEQPACKET`.
            options: options of `subprocess.Popen`, for output and folder. Without `env`, the child gets this process's
                environment, and finds the same code.

        Raises:
            OSError: it cannot be started.
        """
        self.stream, theirs = socket.socketpair(socket.AF_UNIX, kind)
        options.setdefault("env", {**os.environ, "PYTHONPATH": code_path()})
        with theirs:
            super().__init__([sys.executable, *arguments], stdin=theirs.fileno(), start_new_session=True, **options)

    def has_ended(self) -> bool:
        """Returns whether the child has ended. If a signal killed it, its own children are killed, too."""
        if self.returncode is None and self.poll() is not None and self._was_killed:
            kill_group(self.pid)
        return self.returncode is not None

    def end(self, grace_s: float = 0.0) -> None:
        """Closes the stream, waits up to `grace_s` for the child to end, and then kills it and all that it has
        started."""
        self.stream.close()
        if self.returncode is not None:  # its process id may be another's by now
            return
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                self.wait(grace_s)
        if self.returncode is None or self._was_killed:
            kill_group(self.pid)
        self.wait(KILLED_S)

    @property
    def _was_killed(self) -> bool:
        """Whether a signal has ended it, so that it could not end its own children."""
        return self.returncode is not None and self.returncode < 0


def stream_to_parent() -> socket.socket:
    """Returns a child's end of its `stream`. Its standard input is empty from then on, also for its own children."""
    stream = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), 0)
    return stream


def kill_group(pid: int) -> None:
    """Kills the processes of a group, also if its leader has ended."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def code_path() -> str:
    """Returns the PYTHONPATH of a process that finds the same code as this one, in any folder."""
    return os.pathsep.join(map(os.path.abspath, sys.path))
