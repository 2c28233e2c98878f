"""`BaseHandle`: the common part of a handle on every backend, which has timeouts, errors and the executor's end.

Causes of a process's death are read from Monarch's reports (`cause_of`) or from the kernel (`cause_of_reaped`).
"""

from __future__ import annotations

import asyncio
import copy
import fcntl
import logging
import os
import pickle
import re
import signal
import struct
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.cluster.api import (
    DEALT_BYTES,
    CallTimeout,
    Deal,
    ExecutorError,
    ExecutorHandle,
    ExecutorSpec,
    HostStatus,
    MeshFailed,
    Reply,
    Tell,
    error_of,
    parts,
    pickled,
    value_of,
)
from llamarl.cluster.rank import DEAL, DEALT, PART, PEEK, READY, REST, STATUS

_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""Request and flag of linux/pidfd.h."""
_log = logging.getLogger(__name__)

_NO_ARGUMENTS = pickle.dumps(((), {}))
_PEEK_S = 1.0
"""Longest wait for the status of an executor after a timeout."""
_STAGE_S = 0.5
"""Interval between two questions for the stage of an executor that is not ready."""
_MARGIN_S = 0.5
"""A rank expires a call up to this time before the caller gives up, so that a late result is not lost."""
ABANDON_S = 2.0
"""Time to stop an executor that was never ready."""
CAUSE_S = 4.0
"""Longest wait for the cause of an executor's death, after its consequences have appeared."""


def cause_of(report: str) -> str:
    """Returns the cause of a process's death, in one line, from Monarch's report."""
    if killed := re.search(r"Killed(?:\(sig=| \{ signal: )(\d+)", report):
        return killed_by(int(killed[1]))
    if ended := re.search(r"(?:exit_code[=:] ?|exited with non-zero code )(\d+)", report):
        return f"ended with exit code {ended[1]}"
    if "process exited cleanly" in report:
        return "ended with exit code 0"
    return f"cannot be reached: {' '.join(report.split())[-300:]}"


def rank_of(report: str) -> int:
    """Returns the rank in Monarch's report of a death, from its place in each dimension of the mesh. 0 if the report
    names none."""
    rank = 0
    for place, size in re.findall(r"'\w+': (\d+)/(\d+)", report.partition("}")[0]):
        rank = rank * int(size) + int(place)
    return rank


def cause_of_reaped(descriptor: int) -> str | None:
    """Returns the cause of death of a process that another process has waited for. None on Linux before 6.15, which
    does not tell."""
    info = bytearray(64)  # struct pidfd_info: a mask first, the wait status last
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
        return None
    code = os.waitstatus_to_exitcode(struct.unpack_from("i", info, 60)[0])
    return killed_by(-code) if code < 0 else f"ended with exit code {code}"


def killed_by(number: int) -> str:
    return f"was killed by {signal.Signals(number).name}"


class BaseHandle(ExecutorHandle):
    """Implements everything but the transport. A backend implements `_send`, `_watch` and `stop`."""

    def __init__(self, spec: ExecutorSpec) -> None:
        loop = asyncio.get_running_loop()
        self.name = spec.name
        self.pids: list[int] = []
        self._launchers: list[int] = []
        """`HostStatus.launcher_pid` per rank."""
        self.failed: asyncio.Future[ExecutorError] = loop.create_future()
        self._num_ranks = spec.num_ranks
        self._shares_calls, self._num_deals = False, 0
        self._ended: asyncio.Future[ExecutorError] = loop.create_future()
        """Resolves when the executor dies or is stopped, with the error that later calls raise."""

    @abstractmethod
    def _send(
        self, method: str, payload: bytes, timeout_s: float, rank: int | None = None
    ) -> asyncio.Future[list[Reply]]:
        """Sends a call to every rank, or to one, before it returns. The future has the replies by rank, or an error of
        the transport."""

    @abstractmethod
    def _watch(self) -> None:
        """Begins to watch for the executor's death. `pids` are known."""

    async def ready(self, timeout_s: float, tell: Tell | None = None) -> None:
        """Waits until every rank is built, and calls `tell` with the stage of rank 0. Stops an executor that fails to
        start.

        Raises RemoteError, MeshFailed or CallTimeout.
        """
        deadline_s = _now_s() + timeout_s
        try:
            statuses = await self._statuses(PEEK, timeout_s)
            self.pids = [status.pid for status in statuses]
            self._launchers = [status.launcher_pid for status in statuses]
            self._watch()
            telling = asyncio.create_task(self._tell_stages(tell)) if tell else None
            try:
                built = await self._ask(READY, _NO_ARGUMENTS, max(0.0, deadline_s - _now_s()))
                self._shares_calls = all(await self._values(built)) and self._num_ranks > 1
            finally:
                if telling:
                    telling.cancel()
        except CallTimeout as error:
            await self.stop(timeout_s=ABANDON_S)
            raise CallTimeout(self.name, "start", timeout_s, error.doing) from None
        except (ExecutorError, asyncio.CancelledError):
            await self.stop(timeout_s=ABANDON_S)
            raise

    async def _tell_stages(self, tell: Tell) -> None:
        """Reports stages until it is canceled. Asks an executor again that is too busy to answer."""
        while True:
            with suppress(ExecutorError):
                tell((await self._statuses(PEEK, _PEEK_S))[0].stage)
            await asyncio.sleep(_STAGE_S)

    async def give_up(self, error: MeshFailed, timeout_s: float) -> None:
        self._fail(error)
        await self.stop(timeout_s)

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        return (await self._call((args, kwargs, False), method, timeout_s))[0]

    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        return await self._call((args, kwargs, True), method, timeout_s)

    async def _call(self, arguments: tuple[Any, Any, bool], method: str, timeout_s: float) -> list[Any]:
        """Returns results by rank. Those of ranks other than 0 are None unless the arguments request all answers."""
        self.num_calls += 1
        payload = pickled(arguments, self.name, f"the argument list of {method}")
        deadline_s = _now_s() + timeout_s
        return await self._values(await self._whole(await self._ask(method, payload, timeout_s), deadline_s))

    async def _values(self, replies: list[Reply]) -> list[Any]:
        """Returns the results. Raises the error of a rank's own code, of any rank. If ranks only report that they lost
        others, the executor is dead, and the cause that is known by then or soon after is raised."""
        errors = [error_of(reply, self.name) for reply in replies if reply.remote_traceback]
        if not errors:
            return [value_of(reply, self.name) for reply in replies]
        first = next((error for error in errors if not isinstance(error, MeshFailed)), None)
        if first is None:
            await asyncio.wait((self._ended,), timeout=CAUSE_S)
            self._fail(errors[0])
        raise first or _again(self._ended.result())

    async def status(self, timeout_s: float) -> HostStatus:
        return (await self.status_each(timeout_s))[0]

    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        return await self._statuses(STATUS, timeout_s)

    async def _statuses(self, method: str, timeout_s: float) -> list[HostStatus]:
        return [pickle.loads(reply.value) for reply in await self._ask(method, _NO_ARGUMENTS, timeout_s)]

    async def _ask(self, method: str, payload: bytes, timeout_s: float) -> list[Reply]:
        """Returns the replies of all ranks, including error replies. Raises MeshFailed, RemoteError (failed) or
        CallTimeout."""
        if self._ended.done():
            raise _again(self._ended.result())
        sent, payload = self._dealt(method, payload, timeout_s)
        *first, last = parts(payload)
        for part in first:  # without awaiting, so that no other call comes between the parts
            self._send(PART, part, timeout_s).add_done_callback(_retrieve)
        replies = self._send(sent, last, timeout_s - min(_MARGIN_S, timeout_s / 10))
        replies.add_done_callback(_retrieve)
        await asyncio.wait((replies, self._ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        answered = replies.done() and replies.exception() is None
        if answered and not any(reply.expired for reply in replies.result()):
            return replies.result()
        if replies.done() and not answered and not self._ended.done():
            self._fail(await self._lost(replies.exception()))
        if self._ended.done():
            raise _again(self._ended.result())
        doing = "has not reported yet what it does" if method == PEEK else await self._doing()
        raise CallTimeout(self.name, method.removeprefix("@"), timeout_s, doing)

    def _dealt(self, method: str, payload: bytes, timeout_s: float) -> tuple[str, bytes]:
        """Distributes long arguments, each part to one rank, if ranks can share them. Returns the method and payload to
        send to all."""
        if not self._shares_calls or len(payload) <= DEALT_BYTES:
            return method, payload
        self._num_deals += 1
        deal = Deal(self._num_deals, len(payload), method)
        for place, (owner, part) in enumerate(deal.parts(payload, self._num_ranks)):
            dealt = pickle.dumps((deal.number, place, part), pickle.HIGHEST_PROTOCOL)
            self._send(DEALT, dealt, timeout_s, owner).add_done_callback(_retrieve)
        return DEAL, pickle.dumps(deal)

    async def _whole(self, replies: list[Reply], deadline_s: float) -> list[Reply]:
        """Returns the replies with the rest of long results."""
        pieces = [[reply.value] for reply in replies]
        last = replies
        while rest_of := max(reply.rest_of for reply in last):
            last = await self._ask(REST, pickle.dumps(rest_of), max(0.0, deadline_s - _now_s()))
            for piece, reply in zip(pieces, last, strict=True):
                piece.append(reply.value)
        return [reply._replace(value=b"".join(piece)) for reply, piece in zip(replies, pieces, strict=True)]

    async def _lost(self, error: BaseException | None) -> ExecutorError:
        """Returns the error to report when the transport raised `error`. A transport that can fail overrides this."""
        return MeshFailed(self.name, tuple(range(self._num_ranks)), f"cannot be reached: {error}")

    async def _doing(self) -> str:
        """Returns what every rank does now, for a message."""
        try:
            statuses = await self._statuses(PEEK, _PEEK_S)
        except ExecutorError:
            stopped = [f"rank {rank} (pid {pid})" for rank, pid in self._local_pids() if is_stopped(pid)]
            if stopped:
                return f"{', '.join(stopped)} is stopped (SIGSTOP or a debugger)"
            return f"did not answer a status request within {_PEEK_S:g} s either"
        texts = [_sentence(status) for status in statuses]
        if len(texts) == 1:
            return texts[0]
        return "; ".join(f"rank {rank} {text}" for rank, text in enumerate(texts))

    def _local_pids(self) -> Iterable[tuple[int, int]]:
        """Returns rank and process of the ranks on this machine."""
        return enumerate(self.pids)

    def _fail(self, error: ExecutorError) -> None:
        """Marks the executor dead. Only the first reason counts, and none after a stop."""
        if not self._ended.done():
            self._ended.set_result(error)
            self.failed.set_result(error)

    def _end(self) -> None:
        """Marks the executor stopped, unless it has died before."""
        if not self._ended.done():
            self._ended.set_result(MeshFailed(self.name, tuple(range(self._num_ranks)), "stopped by the controller"))


def is_stopped(pid: int) -> bool:
    """Returns whether a process of this machine is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


async def stop_all(handles: Sequence[ExecutorHandle], timeout_s: float) -> None:
    """Stops executors in parallel. Logs an executor's own error, so that the others still end."""
    results = await asyncio.gather(*(handle.stop(timeout_s) for handle in handles), return_exceptions=True)
    for result in results:
        if isinstance(result, ExecutorError):
            _log.warning("%s", result)
        elif isinstance(result, BaseException):
            raise result


def _now_s() -> float:
    """Returns seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()


def _sentence(status: HostStatus) -> str:
    doing = "is idle" if status.doing == "idle" else f"is in {status.doing}"
    doing += f" ({status.stage})" if status.stage else ""
    where = f" at {status.where}" if status.where else ""
    return f"{doing} for {status.doing_age_s:.1f} s{where}, {status.queued_calls} calls queued"


def _again(error: ExecutorError) -> ExecutorError:
    # One exception raised for many callers would collect the traceback of each.
    fresh = copy.copy(error)
    fresh.__cause__ = error.__cause__
    return fresh


def _retrieve(future: asyncio.Future[Any]) -> None:
    # A reply, or its error, that comes after its caller has left is ignored.
    if not future.cancelled():
        future.exception()
