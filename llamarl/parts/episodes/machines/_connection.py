"""`AgentMachine`: a machine whose agent (`_agent.py`) is reached over a stream. No torch."""

from __future__ import annotations

import array
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from llamarl.parts.episodes.machines._base import CommandResult, Machine, MachineLimits, MachineLost, is_inside

GRACE_S = 10.0
"""Seconds after the limit of a request until the machine counts as hung."""
FILES_S = 60.0
"""Maximum seconds for unpacking or packing files."""
_MAX_LINE_BYTES = 1 << 12
_CHUNK = 1 << 16
_DESCRIPTORS = 256
_MEMORY_LOCK_BYTES = 1 << 16
_TAR_BYTES_PER_FILE = 2048
"""Bytes that an archive has for each file in addition to its content."""


class AgentStream(Protocol):
    """What is used of a socket."""

    def settimeout(self, s: float, /) -> None: ...
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, most: int, /) -> bytes: ...
    def recvmsg(self, most: int, control: int, /) -> tuple[bytes, list[Any], int, Any]: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class AgentMachine(Machine):
    """Sends requests to the agent of a machine and checks its answers, which a hostile program may have written."""

    def __init__(self, stream: AgentStream, end: Callable[[], None]) -> None:
        """
        Args:
            end: ends the machine.
        """
        self._stream, self._end = stream, end
        self._arrived = bytearray()
        self._lock = threading.Lock()
        self._is_closed = False
        self.busy_until_s = 0.0
        """Monotonic second of the end of the current request. 0 means that none is running."""
        self.lost_because = ""
        """Why the machine was ended from outside."""

    def wait_until_ready(self, start_s: float) -> int | None:
        """Waits for the agent's first message. Returns a descriptor of the machine's /proc if it sent one.

        Raises:
            OSError: the machine did not start.
        """
        self._stream.settimeout(start_s)
        try:
            data, control, _, _ = self._stream.recvmsg(_MAX_LINE_BYTES, socket.CMSG_SPACE(4))
        except TimeoutError:
            raise OSError(f"the machine did not start within {start_s:g} s") from None
        descriptors = array.array("i")
        for _, kind, content in control:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) // 4 * 4])
        with suppress(ValueError):
            if "fault" in (message := json.loads(data)):
                raise OSError(message["fault"])
            return next(iter(descriptors), None)
        raise OSError("the machine ended while it started")

    def run(self, command: str, s: float, cap: int) -> CommandResult:
        request = {"op": "run", "s": s, "cap": cap}
        answer, output = self._request(request, command.encode(errors="replace"), s, cap)
        return self._result(answer, output)

    def ask(self, program: str, text: str, s: float, cap: int) -> CommandResult:
        request = {"op": "ask", "program": program, "s": s, "cap": cap}
        answer, output = self._request(request, text.encode(errors="replace"), s, cap)
        return self._result(answer, output)

    def put(self, tar: bytes) -> None:
        answer, _ = self._request({"op": "put"}, tar, FILES_S, 0)
        if error := answer.get("error"):
            raise OSError(f"files do not fit into the machine: {error}")

    def get(self, paths: Sequence[str], cap: int) -> bytes:
        assert all(map(is_inside, paths))
        most = cap + (len(paths) + 10) * _TAR_BYTES_PER_FILE
        answer, tar = self._request({"op": "get", "paths": list(paths), "cap": cap}, b"", FILES_S, most)
        if error := answer.get("error"):
            raise MachineLost(f"the machine packed no files: {error}")
        return tar

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._end()
        with suppress(OSError):  # wakes up a thread that waits for an answer
            self._stream.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._stream.close()

    @staticmethod
    def _result(answer: dict[str, Any], output: bytes) -> CommandResult:
        if error := answer.get("error"):
            raise MachineLost(f"the machine ran no command: {error}")
        try:
            code, is_late, total = int(answer["code"]), bool(answer["is_late"]), int(answer["total"])
        except (KeyError, TypeError, ValueError):
            raise MachineLost("the machine answered nonsense") from None
        return CommandResult(code=code, is_late=is_late, output=output, total=total)

    def _request(self, request: dict[str, Any], content: bytes, s: float, most: int) -> tuple[dict[str, Any], bytes]:
        """Returns the answer to a request, with at most `most` bytes. Raises MachineLost."""
        until_s = time.monotonic() + s + GRACE_S
        self.busy_until_s = until_s
        try:
            line = json.dumps(request | {"bytes": len(content)}).encode() + b"\n"
            self._stream.settimeout(s + GRACE_S)
            self._stream.sendall(line + content)
            while b"\n" not in self._arrived:
                self._receive(until_s, _MAX_LINE_BYTES)
            head, _, rest = self._arrived.partition(b"\n")
            answer = json.loads(head)
            size = answer["bytes"]
            if not (isinstance(size, int) and 0 <= size <= most):
                raise ValueError
            self._arrived = rest
            while len(self._arrived) < size:
                self._receive(until_s, size)
            data = bytes(self._arrived[:size])
            del self._arrived[:size]
        except TimeoutError:
            raise self._lost("the machine hung") from None
        except (OSError, EOFError):
            raise self._lost("the machine ended") from None
        except (ValueError, KeyError, TypeError):
            raise self._lost("the machine answered nonsense") from None
        finally:
            self.busy_until_s = 0.0
        return answer, data

    def _receive(self, until_s: float, most: int) -> None:
        if len(self._arrived) > most:
            raise ValueError
        self._stream.settimeout(max(until_s - time.monotonic(), 1e-3))
        data = self._stream.recv(_CHUNK)
        if not data:
            raise EOFError
        self._arrived += data

    def _lost(self, reason: str) -> MachineLost:
        self.close()
        return MachineLost(self.lost_because or reason)


def agent_program() -> str:
    """Returns the source of the agent."""
    with open(os.path.join(os.path.dirname(__file__), "_agent.py"), encoding="utf-8") as file:
        return file.read()


def process_limits(limits: MachineLimits) -> dict[str, int]:
    """Returns the limits of each process of a machine."""
    return {
        "RLIMIT_AS": limits.memory_bytes, "RLIMIT_NPROC": limits.processes, "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.disk_bytes, "RLIMIT_NOFILE": _DESCRIPTORS, "RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_MEMLOCK": _MEMORY_LOCK_BYTES, "RLIMIT_SIGPENDING": _DESCRIPTORS, "RLIMIT_RTPRIO": 0, "RLIMIT_NICE": 0,
    }  # fmt: skip
