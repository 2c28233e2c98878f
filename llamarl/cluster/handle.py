"""The part of a handle that is the same on every backend: timeouts, errors and the executor's end."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, ExecutorSpec, HostStatus, MeshFailed, Tell
from llamarl.cluster.payload import DEALT_BYTES, Deal, Reply, error_of, parts, pickled, value_of
from llamarl.cluster.rank import DEAL, DEALT, PART, PEEK, READY, REST, STATUS

_log = logging.getLogger(__name__)

_NO_ARGUMENTS = pickle.dumps(((), {}))
_PEEK_S = 1.0
"""Longest wait for what a timed-out executor is doing."""
_STAGE_S = 0.5
"""Between two questions what an executor that is not ready is at."""
_MARGIN_S = 0.5
"""Seconds at most by which the host gives a call up before the caller leaves: a late result is then not lost."""
_ABANDON_S = 2.0
"""Time to stop an executor that was never ready."""
CAUSE_S = 4.0
"""Longest wait for why an executor has died, once that has shown by what follows from it."""


class BaseHandle(ExecutorHandle):
    """Everything but the transport. `_send` and `stop` are the backend's."""

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
        """Resolves when the executor dies or is stopped, with what calls raise from then on."""

    @abstractmethod
    def _send(
        self, method: str, payload: bytes, timeout_s: float, rank: int | None = None
    ) -> asyncio.Future[list[Reply]]:
        """Sends a call to every rank, or to one, before it returns; the replies by rank. An exception is one of the
        transport."""

    @abstractmethod
    def _watch(self) -> None:
        """Begins to notice the executor's death; `pids` are known."""

    async def ready(self, timeout_s: float, tell: Tell | None = None) -> None:
        """Waits until every rank is built, and tells what rank 0 is at; an executor that does not get there is stopped.

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
            await self.stop(timeout_s=_ABANDON_S)
            raise CallTimeout(self.name, "start", timeout_s, error.doing) from None
        except (ExecutorError, asyncio.CancelledError):
            await self.stop(timeout_s=_ABANDON_S)
            raise

    async def _tell_stages(self, tell: Tell) -> None:
        """Until it is canceled; an executor that is too busy to answer is asked again."""
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
        """Results by rank; None of all but rank 0, unless the arguments say that each is to answer."""
        self.num_calls += 1
        payload = pickled(arguments, self.name, f"the argument list of {method}")
        deadline_s = _now_s() + timeout_s
        return await self._values(await self._whole(await self._ask(method, payload, timeout_s), deadline_s))

    async def _values(self, replies: list[Reply]) -> list[Any]:
        """The results. Raises what a rank's own code raised, whichever rank that is; an executor whose ranks have but
        lost others is dead, of what is known by then or soon."""
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
        """The replies of all ranks, whatever they report. Raises MeshFailed, RemoteError (failed) or CallTimeout."""
        if self._ended.done():
            raise _again(self._ended.result())
        sent, payload = self._dealt(method, payload, timeout_s)
        *first, last = parts(payload)
        for part in first:  # without a wait in between, so that no other call comes between the parts
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
        doing = "has not said yet what it does" if method == PEEK else await self._doing()
        raise CallTimeout(self.name, method.removeprefix("@"), timeout_s, doing)

    def _dealt(self, method: str, payload: bytes, timeout_s: float) -> tuple[str, bytes]:
        """Sends each part of long arguments to one rank, where ranks share them; what is left to send to all."""
        if not self._shares_calls or len(payload) <= DEALT_BYTES:
            return method, payload
        self._num_deals += 1
        deal = Deal(self._num_deals, len(payload), method)
        for place, (owner, part) in enumerate(deal.parts(payload, self._num_ranks)):
            dealt = pickle.dumps((deal.number, place, part), pickle.HIGHEST_PROTOCOL)
            self._send(DEALT, dealt, timeout_s, owner).add_done_callback(_retrieve)
        return DEAL, pickle.dumps(deal)

    async def _whole(self, replies: list[Reply], deadline_s: float) -> list[Reply]:
        """The replies with what is left of long results."""
        pieces = [[reply.value] for reply in replies]
        last = replies
        while rest_of := max(reply.rest_of for reply in last):
            last = await self._ask(REST, pickle.dumps(rest_of), max(0.0, deadline_s - _now_s()))
            for piece, reply in zip(pieces, last, strict=True):
                piece.append(reply.value)
        return [reply._replace(value=b"".join(piece)) for reply, piece in zip(replies, pieces, strict=True)]

    async def _lost(self, error: BaseException | None) -> ExecutorError:
        """The error to report when the transport raised `error`; only a transport that can fail has its own answer."""
        return MeshFailed(self.name, tuple(range(self._num_ranks)), f"cannot be reached: {error}")

    async def _doing(self) -> str:
        """Text for a message: what every rank does now."""
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
        """Rank and process of those on this machine."""
        return enumerate(self.pids)

    def _fail(self, error: ExecutorError) -> None:
        """Marks the executor dead; only the first reason counts, and none after a stop."""
        if not self._ended.done():
            self._ended.set_result(error)
            self.failed.set_result(error)

    def _end(self) -> None:
        """Marks the executor stopped, unless it has died before."""
        if not self._ended.done():
            self._ended.set_result(MeshFailed(self.name, tuple(range(self._num_ranks)), "stopped by the controller"))


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine stands still, by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


async def stop_all(handles: Sequence[ExecutorHandle], timeout_s: float) -> None:
    """Stops executors side by side. An executor's own fault is logged, so that the others still end."""
    results = await asyncio.gather(*(handle.stop(timeout_s) for handle in handles), return_exceptions=True)
    for result in results:
        if isinstance(result, ExecutorError):
            _log.warning("%s", result)
        elif isinstance(result, BaseException):
            raise result


def _now_s() -> float:
    """Seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()


def _sentence(status: HostStatus) -> str:
    doing = "is idle" if status.doing == "idle" else f"is in {status.doing}"
    doing += f" ({status.stage})" if status.stage else ""
    return f"{doing} for {status.doing_age_s:.1f} s, {status.queued_calls} calls queued"


def _again(error: ExecutorError) -> ExecutorError:
    # One exception raised for many callers would collect the traceback of each.
    fresh = copy.copy(error)
    fresh.__cause__ = error.__cause__
    return fresh


def _retrieve(future: asyncio.Future[Any]) -> None:
    # A reply that comes after its caller has left is of no interest, nor is its error.
    if not future.cancelled():
        future.exception()
