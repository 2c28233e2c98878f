"""The interface between the controller and the places where executors run. No Monarch, no torch.

Three things happen to a call: it returns a value, it raises in the executor (`RemoteError`), or the executor is gone
(`MeshFailed`). It never waits longer than its timeout (`CallTimeout`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

from llamarl.observability.spans import NOTHING, Span, Usage

MAX_PAYLOAD_BYTES = 256 << 20
"""Cap on the pickled arguments, and on the pickled result, of one call: weights do not pass through calls."""

Tell = Callable[[str], None]


class HostShare(NamedTuple):
    """One host's share of an executor: so many of its ranks."""

    name: str
    num_ranks: int
    env: dict[str, str]
    """Environment variables beside those of all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorSpec:
    """An executor to start: its class, its ranks and their surroundings."""

    name: str
    """Name in messages, logs and metrics, unique within a cluster, for example `generator-0`."""
    target: str
    """The class, as `package.module:Class`; a subclass of `llamarl.cluster.executor.Executor`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class; at most `MAX_PAYLOAD_BYTES` when pickled."""
    num_ranks: int = 1
    """Processes; above 1, each finds RANK, WORLD_SIZE and LOCAL_RANK in its environment."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, set before the interpreter of the rank starts. The inline cluster has only this process's
    environment and ignores them."""
    code_paths: tuple[str, ...] = ()
    """Folders put first on the rank's `sys.path`."""
    hosts: tuple[HostShare, ...] = ()
    """Hosts that its ranks run on, in rank order; empty where a cluster has one machine."""


class ExecutorError(Exception):
    """Something went wrong at one executor."""

    executor: str
    """Name of the executor."""


class RemoteError(ExecutorError):
    """A method, the constructor or `work()` raised, in any rank. `__cause__` is the original exception when it can be
    pickled."""

    def __init__(self, executor: str, method: str, remote_traceback: str, rank: int | None = None) -> None:
        """`rank`: the one that raised; None: there is just one."""
        super().__init__(executor, method, remote_traceback, rank)
        self.executor = executor
        self.method = method
        self.remote_traceback = remote_traceback
        self.rank = rank

    def __str__(self) -> str:
        where = "" if self.rank is None else f" in rank {self.rank}"
        return f"{self.executor}.{self.method} failed{where}\n{self.remote_traceback.rstrip()}"


class MeshFailed(ExecutorError):
    """The processes of an executor are gone, or can no longer be reached: by the controller, or by each other."""

    def __init__(self, executor: str, ranks: tuple[int, ...], cause: str) -> None:
        super().__init__(executor, ranks, cause)
        self.executor = executor
        self.ranks = ranks
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.executor} (rank {', '.join(map(str, self.ranks))}): {self.cause}"


class HostFailed(MeshFailed):
    """A host of an executor is lost, which is no fault of what ran there."""


class CallTimeout(ExecutorError):
    """A call had no answer in time; a call that still waited in the queue is dropped there."""

    def __init__(self, executor: str, method: str, timeout_s: float, doing: str) -> None:
        super().__init__(executor, method, timeout_s, doing)
        self.executor = executor
        self.method = method
        self.timeout_s = timeout_s
        self.doing = doing

    def __str__(self) -> str:
        settings = {"start": " (cluster.start_timeout_s)", "status": "", "peek": ""}
        limit = f"{self.timeout_s:g} s{settings.get(self.method, ' (cluster.call_timeout_s)')}"
        return f"{self.executor}.{self.method} had no answer after {limit}; {self.executor} {self.doing}"


class PayloadTooLarge(ExecutorError):
    """Arguments or a result above `MAX_PAYLOAD_BYTES`."""

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
    """Status of one rank of an executor: what it is doing now, and what it has done."""

    pid: int
    doing: str
    """Method that runs now; `work`, `idle`, `start` (constructor), `close`, `failed` or `closed`."""
    doing_age_s: float
    """Seconds since that began."""
    busy_s: dict[str, float]
    """Seconds spent since the start, per span name, the running method included."""
    queued_calls: int
    """Calls that wait for the executor's thread."""
    spans: list[Span]
    """Finished stretches of work since the last status."""
    launcher_pid: int = 0
    """Process that ends as this one has ended, where another process than this one was started for the rank; 0 means
    none."""
    stage: str = ""
    """Stage of what it is doing, where that takes long and says so, such as `loading the model`."""
    usage: Usage = NOTHING
    """Memory, descriptors and threads of the process; of one that is not there, nothing."""


class ExecutorHandle(ABC):
    """The controller's side of one executor. Use it on the event loop that spawned it."""

    name: str
    """`ExecutorSpec.name`."""
    pids: list[int]
    """Process per rank; this process for an inline executor."""
    failed: asyncio.Future[ExecutorError]
    """Resolves, with MeshFailed or RemoteError as its result, when the executor dies. A stop leaves it pending."""
    num_calls: int = 0
    """Calls that were made, those for its status left out."""
    hosts: tuple[str, ...] = ("",)
    """Names of the machines that its ranks are on, each once; the empty name is this machine."""

    @abstractmethod
    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Runs a method on every rank, in the order of the calls; rank 0's value.

        Raises RemoteError, MeshFailed, CallTimeout or PayloadTooLarge.
        """

    @abstractmethod
    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        """Runs a method on every rank, in the order of the calls; all ranks' values. Raises as `call` does."""

    @abstractmethod
    async def status(self, timeout_s: float) -> HostStatus:
        """Rank 0's status, answered while a method runs. Takes the spans of every rank."""

    @abstractmethod
    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        """Statuses of all ranks, answered while a method runs. Takes the spans of every rank."""

    @abstractmethod
    async def stop(self, timeout_s: float) -> None:
        """Ends the running method's turn, runs `close()`, ends the processes; kills them when that takes too long.

        Pending and later calls raise MeshFailed. Raises RemoteError, once the processes are gone, if `close()` did.
        """

    async def give_up(self, error: MeshFailed, timeout_s: float) -> None:
        """Counts an executor that does not answer as dead from now on, for this reason, and ends it as `stop` does."""
        if not self.failed.done():
            self.failed.set_result(error)
        await self.stop(timeout_s)


class Cluster(ABC):
    """A place where executors run."""

    @abstractmethod
    async def spawn(self, spec: ExecutorSpec, timeout_s: float, tell: Tell | None = None) -> ExecutorHandle:
        """Starts an executor and waits until it is built. Several spawns may run concurrently.

        Args:
            tell: hears meanwhile what its rank 0 is at, as `HostStatus.stage` does.

        Raises RemoteError when its constructor raises, MeshFailed when its process dies, CallTimeout.
        """

    @abstractmethod
    async def shutdown(self, timeout_s: float) -> None:
        """Stops every executor; what is left after `timeout_s` is killed. Never raises for an executor's fault."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown(timeout_s=15.0)
