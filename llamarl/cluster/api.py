"""The interface between the controller and the places where executors run. No Monarch, no torch.

A call has one of four outcomes. It returns a value, it raises in the executor (`RemoteError`), the executor is gone
(`MeshFailed`), or its timeout passes (`CallTimeout`).

The controller sees an executor as an `ExecutorHandle`, or as a typed port::

    class RewardPort(Protocol):
        async def score(self, groups: Sequence[...]) -> list[...]: ...

    reward = port(RewardPort, handle, timeout_s)
    results = await reward.score(groups)

Arguments and results cross as pickled bytes on every backend. Longer ones are sent in several messages.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

from llamarl.config.errors import RanksLost
from llamarl.observability.spans import NOTHING, Span, Usage

MAX_PAYLOAD_BYTES = 256 << 20
"""Largest pickled arguments, and largest pickled result, of one call. Weights do not pass through calls."""

Tell = Callable[[str], None]
MAX_MESSAGE_BYTES = 1 << 20
"""Largest message of a backend. Short messages pass between the parts of a long one."""
DEALT_BYTES = 64 << 10
"""Arguments of at least this size are distributed: each part is sent to one rank, and the ranks exchange the parts."""
MAX_DEALT_RANKS = 16
"""Most ranks that receive parts of one call."""
Role = TypeVar("Role")
Method = TypeVar("Method", bound=Callable[..., object])
_EACH = "is_answered_by_each_rank"


class HostShare(NamedTuple):
    """The ranks of an executor on one host."""

    name: str
    num_ranks: int
    env: dict[str, str]
    """Environment variables in addition to those of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorSpec:
    """An executor to start: its class, its ranks and their environment."""

    name: str
    """Name in messages, logs and metrics, unique within a cluster, for example `generator-0`."""
    target: str
    """The class, as `package.module:Class`; a subclass of `llamarl.cluster.api.Executor`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class; at most `MAX_PAYLOAD_BYTES` when pickled."""
    num_ranks: int = 1
    """Number of processes. With more than one, each has RANK, WORLD_SIZE and LOCAL_RANK in its environment."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, set before the interpreter of the rank starts. The inline cluster ignores them."""
    code_paths: tuple[str, ...] = ()
    """Folders put first on the rank's `sys.path`."""
    hosts: tuple[HostShare, ...] = ()
    """Hosts of its ranks, in rank order. Empty for a cluster with one machine."""


class ExecutorError(Exception):
    """An error of one executor."""

    executor: str
    """Name of the executor."""


class RemoteError(ExecutorError):
    """A method, the constructor or `work()` raised, in any rank. `__cause__` is the original exception if it can be
    pickled."""

    def __init__(self, executor: str, method: str, remote_traceback: str, rank: int | None = None) -> None:
        """
        Args:
            rank: the rank that raised. None means that there is only one.
        """
        super().__init__(executor, method, remote_traceback, rank)
        self.executor = executor
        self.method = method
        self.remote_traceback = remote_traceback
        self.rank = rank

    def __str__(self) -> str:
        where = "" if self.rank is None else f" in rank {self.rank}"
        return f"{self.executor}.{self.method} failed{where}\n{self.remote_traceback.rstrip()}"


class MeshFailed(ExecutorError):
    """Processes of an executor are gone, or cannot be reached by the controller or by each other."""

    def __init__(self, executor: str, ranks: tuple[int, ...], cause: str) -> None:
        super().__init__(executor, ranks, cause)
        self.executor = executor
        self.ranks = ranks
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.executor} (rank {', '.join(map(str, self.ranks))}): {self.cause}"


class HostFailed(MeshFailed):
    """A host of an executor is lost."""


class CallTimeout(ExecutorError):
    """A call was not answered in time. If it still waited in the queue, it is dropped there."""

    def __init__(self, executor: str, method: str, timeout_s: float, doing: str) -> None:
        super().__init__(executor, method, timeout_s, doing)
        self.executor = executor
        self.method = method
        self.timeout_s = timeout_s
        self.doing = doing

    def __str__(self) -> str:
        limit = f"{self.timeout_s:.3g} s{'' if self.method in ('status', 'peek') else ' (cluster.timeout_s)'}"
        return f"{self.executor}.{self.method} had no answer after {limit}; {self.executor} {self.doing}"


class PayloadTooLarge(ExecutorError):
    """Arguments or a result exceed `MAX_PAYLOAD_BYTES`."""

    def __init__(self, executor: str, what: str, size_bytes: int) -> None:
        super().__init__(executor, what, size_bytes)
        self.executor = executor
        self.what = what
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        return (
            f"{self.executor}: {self.what} is {self.size_bytes:,} bytes when pickled, over the cap of "
            f"{MAX_PAYLOAD_BYTES:,}; weights travel by a transport, and other records in several calls"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostStatus:
    """Status of one rank of an executor."""

    pid: int
    doing: str
    """Running method; `work`, `idle`, `start` (constructor), `close`, `failed` or `closed`."""
    doing_age_s: float
    """Seconds since it began."""
    busy_s: dict[str, float]
    """Seconds since the start by span name, including the running method."""
    queued_calls: int
    """Calls that wait for the executor's thread."""
    spans: list[Span]
    """Spans that have ended since the last status."""
    launcher_pid: int = 0
    """Process that was started for the rank and ends with this one, which a fork server has forked. 0 means none."""
    stage: str = ""
    """Stage of the running method if it takes long and reports its stages, such as `loading the model`."""
    where: str = ""
    """Line at which the executor's thread is, such as `sum (mesh.py:88)`. Known for messages about timeouts only."""
    usage: Usage = NOTHING
    """Memory, descriptors and threads of the process. NOTHING if the process is gone."""


class ExecutorHandle(ABC):
    """The controller's side of one executor. Use it on the event loop that spawned it."""

    name: str
    """`ExecutorSpec.name`."""
    pids: list[int]
    """Process per rank; this process for an inline executor."""
    failed: asyncio.Future[ExecutorError]
    """Resolves, with MeshFailed or RemoteError as its result, when the executor dies. A stop leaves it pending."""
    num_calls: int = 0
    """Number of calls, without those for its status."""
    hosts: tuple[str, ...] = ("",)
    """Names of the machines of its ranks, each once. The empty name is this machine."""

    @abstractmethod
    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Runs a method on every rank, in the order of the calls. Returns rank 0's value.

        Raises RemoteError, MeshFailed, CallTimeout or PayloadTooLarge.
        """

    @abstractmethod
    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        """Runs a method on every rank, in the order of the calls. Returns all ranks' values. Raises as `call` does."""

    @abstractmethod
    async def status(self, timeout_s: float) -> HostStatus:
        """Returns rank 0's status, also while a method runs. Clears the spans of every rank."""

    @abstractmethod
    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        """Returns the status of every rank, also while a method runs. Clears the spans of every rank."""

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Waits for the running method, calls `close()` and ends the processes. Kills them after the timeout.

        Pending and later calls raise MeshFailed. If `close()` failed, raises RemoteError once the processes are gone.
        """

    async def give_up(self, error: MeshFailed, timeout_s: float) -> None:
        """Treats an executor that does not answer as dead, for this reason, and stops it."""
        if not self.failed.done():
            self.failed.set_result(error)
        await self.stop(timeout_s)


class Cluster(ABC):
    """A place where executors run."""

    @abstractmethod
    async def spawn(self, spec: ExecutorSpec, timeout_s: float, tell: Tell | None = None) -> ExecutorHandle:
        """Starts an executor and waits until it is built. Several spawns may run concurrently.

        Args:
            tell: called with the stage of rank 0 meanwhile, which is `HostStatus.stage`.

        Raises RemoteError if the constructor raises, MeshFailed if a process dies, and CallTimeout.
        """

    @abstractmethod
    async def shutdown(self, timeout_s: float) -> None:
        """Stops every executor. Kills the remaining ones after `timeout_s`. Never raises for an executor's error."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(timeout_s=15.0)


class Deal(NamedTuple):
    """A call whose arguments were distributed to its ranks in parts."""

    number: int
    """Number of the deal, from 1."""
    num_bytes: int
    """Size of the arguments in bytes."""
    method: str

    def owners(self, num_ranks: int) -> list[int]:
        """Returns the rank that receives each part. The ranks are few and evenly spaced, so that they are on many
        hosts."""
        num_parts = -(-self.num_bytes // MAX_MESSAGE_BYTES)
        dealt = min(MAX_DEALT_RANKS, num_ranks, num_parts)
        return [part % dealt * num_ranks // dealt for part in range(num_parts)]

    def parts(self, data: bytes, num_ranks: int) -> list[tuple[int, bytes]]:
        """Splits the arguments into parts of about equal size. Returns each with its owner."""
        owners = self.owners(num_ranks)
        return list(zip(owners, parts(data, -(-self.num_bytes // len(owners))), strict=True))


class Reply(NamedTuple):
    """Answer of one rank to one call."""

    value: bytes = b""
    """The pickled result, or its first part. Empty after an error."""
    rest_of: int = 0
    """Number of the call whose result continues after this part. 0 means that the result is complete."""
    method: str = ""
    """Method that raised: the called one, or `work` if the executor has failed."""
    remote_traceback: str = ""
    """Text of the traceback. Empty for a result."""
    exception: bytes = b""
    """The pickled exception. Empty if it cannot be pickled."""
    rank: int | None = None
    """The rank that raised. None means that there is only one."""
    expired: bool = False
    """Whether the call's deadline passed at the rank, before it ran or before its deferred reply."""


def pickled(value: Any, executor: str, what: str) -> bytes:
    """Pickles `value`. Raises PayloadTooLarge with `what` as its name."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(executor, what, len(data))
    return data


def parts(data: bytes, size: int = MAX_MESSAGE_BYTES) -> list[bytes]:
    """Splits `data` into messages: at least one, which may be empty."""
    starts = range(0, len(data), size) or (0,)
    return [data[start : start + size] for start in starts]


def error_reply(error: BaseException, method: str, rank: int | None, caught: bool = True) -> Reply:
    """Converts an exception to a reply.

    Args:
        caught: the traceback begins with the frame that caught the error, which is left out.
    """
    trace = error.__traceback__
    if caught and trace is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, _from_theirs(trace)))
    return Reply(method=method, remote_traceback=text, exception=_pickled_exception(error), rank=rank)


def _from_theirs(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the first frame of the user's own code on, such as a reward. Without such a frame,
    returns all of it."""
    first = trace
    while first is not None and first.tb_frame.f_globals.get("__name__", "").startswith("llamarl."):
        first = first.tb_next
    is_theirs = first is not None and not first.tb_frame.f_code.co_filename.startswith((sys.prefix, sys.base_prefix))
    return first if is_theirs else trace


def value_of(reply: Reply, executor: str) -> Any:
    """Returns the result. Raises the error that the reply reports, as by `error_of`."""
    if not reply.remote_traceback:
        return pickle.loads(reply.value)
    raise error_of(reply, executor)


def error_of(reply: Reply, executor: str) -> ExecutorError:
    """Returns the exception of an error reply: a PayloadTooLarge unchanged, MeshFailed for a rank that lost other
    ranks, and RemoteError otherwise."""
    cause = _unpickled_exception(reply.exception)
    if isinstance(cause, PayloadTooLarge):
        return cause
    if isinstance(cause, RanksLost):
        return MeshFailed(executor, (reply.rank or 0,), str(cause))
    error = RemoteError(executor, reply.method, reply.remote_traceback, reply.rank)
    error.__cause__ = cause
    return error


def _pickled_exception(error: BaseException) -> bytes:
    # An exception with its own constructor may pickle and still not unpickle, so unpickling is tried here.
    try:
        data = pickle.dumps(error, protocol=pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)
    except Exception:
        return b""
    return data if len(data) <= MAX_PAYLOAD_BYTES else b""


def _unpickled_exception(data: bytes) -> BaseException | None:
    # The class may be in a module that only the executor can import. The traceback is complete without it.
    try:
        return pickle.loads(data) if data else None
    except Exception:
        return None


class Executor:
    """Base of every executor: a plain class whose public methods can be called through a handle.

    The constructor, all methods and all hooks run on one thread, one at a time, so an executor needs no locks. A method
    may return a `concurrent.futures.Future` to answer later, for example from `work()`. After the caller's timeout the
    rank cancels that future. Resolve it with `if future.set_running_or_notify_cancel(): future.set_result(...)`, so
    that no result is lost unnoticed.
    """

    SPANS: ClassVar[dict[str, str]] = {}
    """Span name per method (and `work`) that counts as work of the run. Other methods record no span."""
    SHARES_CALLS: ClassVar[bool] = False
    """Whether ranks can join (`whole`) the parts of distributed arguments."""

    def work(self) -> bool:
        """Does one piece of background work. Called whenever no call waits. An exception fails the executor.

        Returns:
            True if there may be more work. False to sleep until the next call.
        """
        return False

    def whole(self, parts: Mapping[int, bytes], owners: Sequence[int], num_bytes: int) -> bytes | memoryview:
        """Joins the arguments of a call. All ranks make this call together.

        Args:
            parts: this rank's parts, by their place.
            owners: the rank that has each part.
            num_bytes: size of the arguments.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Releases the executor's resources. Called last."""


def each_rank(method: Method) -> Method:
    """Marks a call of a role that returns a list with the answers of all ranks instead of rank 0's answer."""
    setattr(method, _EACH, True)
    return method


def calls_of(role: type) -> dict[str, bool]:
    """Returns the calls of a role, each with whether all ranks answer."""
    return {
        name: hasattr(method, _EACH)
        for base in reversed(role.__mro__)
        for name, method in vars(base).items()
        if callable(method) and not name.startswith("_")
    }


def port(role: type[Role], handle: ExecutorHandle, timeout_s: float) -> Role:
    """Returns `handle` as an object of type `role`. Each call waits at most `timeout_s`.

    A call raises RemoteError, MeshFailed, CallTimeout or PayloadTooLarge.
    """
    calls = {
        name: partial(handle.call_each if each else handle.call, name, timeout_s=timeout_s)
        for name, each in calls_of(role).items()
    }
    return cast(Role, SimpleNamespace(**calls))
