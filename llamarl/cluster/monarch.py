"""Executors in processes, run by Monarch. No other file imports Monarch; parts import its names from here.

Monarch starts the processes, carries the calls and stops the processes. llamarl defines the order of calls, threads,
errors and payloads: one endpoint passes bytes to the `ExecutorRank` of each rank. Each executor has its own proc mesh,
and fails as a whole.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from llamarl.cluster import fork_server
from llamarl.cluster.api import (
    Cluster,
    ExecutorHandle,
    ExecutorSpec,
    MeshFailed,
    Reply,
    Tell,
    pickled,
)
from llamarl.cluster.engine_files import quiet_stderr
from llamarl.cluster.engine_sockets import keep_private, limit_unauthenticated, warn_if_open
from llamarl.cluster.handle import cause_of, rank_of, stop_all
from llamarl.cluster.launcher import SERVER
from llamarl.cluster.rank import FAILURE, ExecutorRank
from llamarl.cluster.watched import WatchedHandle, rank_command
from llamarl.config.errors import ConfigError

try:
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
    from monarch.actor import (
        Actor,
        Future,
        HostMesh,
        MeshFailure,
        ProcMesh,
        ValueMesh,
        attach_to_workers,
        concurrent_endpoint,
        run_worker_loop_forever,
        this_host,
    )
except ImportError as error:
    raise ConfigError(
        f"cluster.kind = 'monarch' needs Monarch ({error}); pip install 'llamarl[monarch]', "
        "or set cluster.kind = 'processes', which does without it on one machine"
    ) from error

__all__ = ["BootstrapCommand", "MonarchCluster", "MonarchHandle", "ProcMesh", "attach_to_workers", "serve_host"]
keep_private()
limit_unauthenticated()
_ENGINE_MODULE = "monarch._src.actor.bootstrap_main"
MAX_SENDS = 16
"""Most messages in which a call to all ranks of a mesh leaves this process, or a rank that forwards it in Monarch's
tree."""
_SETTINGS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "30s",
    "HYPERACTOR_MESH_MAX_CAST_FANOUT": f"{MAX_SENDS - 1}",
}
"""Environment variables of Monarch. With its defaults, it may take 9 s until the death of a process is noticed. A start
fails if torch, which a fork server imports before it forks a rank, takes 30 s. Here `cluster.timeout_s` is the
limit."""
_WAITS = "MESH_ORPHAN MESH_SUPERVISION_WATCHDOG MESSAGE_DELIVERY CHANNEL_RECONNECT"
_PATIENT = {f"HYPERACTOR_{name}_TIMEOUT": "1h" for name in _WAITS.split()}
"""Timeouts for one machine, where pidfds show which process is dead. Shorter ones would fail all executors of a
controller that was stopped for 30 s."""
TRUST = "trust_all_connections"
"""Monarch trusts all connections, because TLS or the file system restricts them."""
_CLIENT_S = 0.3
"""Seconds that Monarch's client has for each of its two last flushes."""
_END_S = 10.0
"""Longest wait for Monarch's client to end. If the interpreter ends before, a thread of Monarch's ends the process with
exit code 1, so that a successful run looks failed. A busy machine needs more than a second."""


def serve_host(address: str) -> None:
    """Runs the engine on another host. Prints the address at which it can be attached, and serves until the process is
    killed, at the latest when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    # Its package also brings a web server and pyarrow, which every executor would import.
    from monarch.job import new_service_proc_id, service_proc_addr

    url = service_proc_addr(f"tls://{address}:{port}", new_service_proc_id())
    os.write(sys.stdout.fileno(), json.dumps({"url": url}).encode() + b"\n")
    run_worker_loop_forever(address=url, ca=TRUST)


class Rank(Actor):
    """One process of an executor."""

    def __init__(self, packed_spec: bytes) -> None:
        self._host = ExecutorRank(pickle.loads(packed_spec))

    @concurrent_endpoint
    async def invoke(self, method: str, payload: bytes, timeout_s: float) -> Reply:
        return await asyncio.wrap_future(self._host.submit(method, payload, timeout_s))


class MonarchHandle(WatchedHandle):
    """Passes calls through Monarch."""

    def __init__(self, spec: ExecutorSpec, meshes: Sequence[tuple[ProcMesh, Rank]]) -> None:
        """
        Args:
            meshes: processes and the rank actors in them. Ranks are numbered through all meshes.
        """
        super().__init__(spec)
        self._meshes = meshes

    def _send(
        self, method: str, payload: bytes, timeout_s: float, rank: int | None = None
    ) -> asyncio.Future[list[Reply]]:
        replies: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        to = [ranks for _, ranks in self._meshes] if rank is None else [self._slice(rank)]
        calls = [ranks.invoke.call(method, payload, timeout_s).as_asyncio() for ranks in to]

        def settle(answers: asyncio.Future[ValueMesh[Reply]]) -> None:
            error = answers.exception()
            if replies.done():
                return
            if error is not None:
                replies.set_exception(error)
            elif all(call.done() for call in calls):
                replies.set_result([reply for call in calls for _, reply in call.result().items()])

        for call in calls:
            call.add_done_callback(settle)
        return replies

    def _slice(self, rank: int) -> Rank:
        """Returns one rank's actor."""
        for _, ranks in self._meshes:
            if rank < ranks.size():
                return ranks.flatten("ranks").slice(ranks=rank)
            rank -= ranks.size()
        raise IndexError(rank)

    def _watch_work(self) -> None:
        first = 0
        for _, ranks in self._meshes:  # one call for all ranks of a mesh
            self._hear(first, ranks.invoke.stream(FAILURE, b"", 0.0))
            first += ranks.size()

    def _hear(self, first: int, failures: Iterator[Future[Reply]]) -> None:
        """Waits for the next failure of a mesh."""
        if failure := next(failures, None):
            failure.as_asyncio().add_done_callback(partial(self._mesh_told, first, failures))

    def _mesh_told(self, first: int, failures: Iterator[Future[Reply]], failure: asyncio.Future[Reply]) -> None:
        """Handles a failure of a mesh, which begins with rank `first`: `work()` has raised in a rank, or Monarch has
        lost a rank."""
        if (lost := failure.exception()) is not None:
            rank, cause = first + rank_of(str(lost)), cause_of(str(lost))
            self._fail(MeshFailed(self.name, (rank,), f"pid {self.pids[rank]}{self._where(rank)} {cause}"))
        elif self._failure_told(failure.result()):
            self._hear(first, failures)

    async def _leave(self) -> None:
        """Stops the meshes. Meshes with dead processes may refuse to stop; their other processes are killed next."""
        stopping = (mesh.stop("stopped by the controller") for mesh, _ in self._meshes)
        await asyncio.gather(*stopping, return_exceptions=True)


class MonarchCluster(Cluster):
    """Executors on this machine, over Unix sockets.

    Monarch's client, once shut down, cannot start again in the same process. It ends with the interpreter, and every
    cluster of the process shares it.
    """

    def __init__(self, log_folder: Path | None, transport: str = "ipc") -> None:
        """
        Args:
            transport: where Monarch listens.
        """
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = log_folder
        self._handles: list[MonarchHandle] = []
        for name, value in (_SETTINGS | (_PATIENT if transport == "ipc" else {})).items():
            os.environ.setdefault(name, value)
        reload_config_from_env()
        monarch.actor.unhandled_fault_hook = _ignore_fault
        with quiet_stderr():
            monarch.actor.enable_transport(transport)
            self._machine = this_host()
        atexit.register(_end_client)  # before Monarch's own, which would report a timeout

    async def spawn(self, spec: ExecutorSpec, timeout_s: float, tell: Tell | None = None) -> ExecutorHandle:
        timeout_s = await fork_server.ready(spec.target.partition(":")[0], timeout_s, tell)
        handle = MonarchHandle(spec, [self._start(spec, self._machine, spec.num_ranks, self._bootstrap_command)])
        return await self._ready(handle, timeout_s, tell)

    async def shutdown(self, timeout_s: float) -> None:
        handles, self._handles = self._handles, []
        await stop_all(handles, timeout_s)

    def _start(
        self,
        spec: ExecutorSpec,
        machine: HostMesh,
        num_ranks: int,
        command: Callable[[ExecutorSpec, int], BootstrapCommand],
    ) -> tuple[ProcMesh, Rank]:
        """Starts ranks on `machine`.

        Args:
            command: returns the command with which a rank is started.
        """
        packed_spec = pickled(spec, spec.name, "the specification")
        mesh = machine.spawn_procs(
            per_host={"ranks": num_ranks},
            name="executor",
            bootstrap_command=lambda point: command(spec, point.rank),
        )
        return mesh, mesh.spawn("rank", Rank, packed_spec)

    async def _ready(self, handle: MonarchHandle, timeout_s: float, tell: Tell | None) -> ExecutorHandle:
        self._handles.append(handle)
        await handle.ready(timeout_s, tell)
        warn_if_open()
        return handle

    def _bootstrap_command(self, spec: ExecutorSpec, rank: int) -> BootstrapCommand:
        launches = SERVER in os.environ
        return bootstrap_command(spec, rank, rank, spec.env, self._log_folder, launches=launches)


def bootstrap_command(
    spec: ExecutorSpec, rank: int, local_rank: int, env: Mapping[str, str], log_folder: Path | None, *, launches: bool
) -> BootstrapCommand:
    """Returns the command with which Monarch starts a rank.

    Args:
        launches: a fork server may be available to fork the rank.
    """
    arguments, variables = rank_command(spec, rank, local_rank, env, log_folder, _ENGINE_MODULE, launches=launches)
    return BootstrapCommand(sys.executable, None, arguments, {**variables})


def _end_client() -> None:
    """Ends Monarch's client. All executors have been stopped, so a timeout loses nothing."""
    with suppress(TimeoutError):
        monarch.actor.shutdown_context(host_timeout=_CLIENT_S).get(timeout=_END_S)


def _ignore_fault(failure: MeshFailure) -> None:
    """Ignores a failure, since every handle watches its own processes. The default hook would interrupt the main
    thread."""
