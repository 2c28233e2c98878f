"""`ProcessCluster`: executors in processes of this machine, without Monarch.

Each rank is a process with an unnamed socket to the controller, so nothing listens. The end of a process is noticed by
its pidfd. A rank ends when the controller does: it reads the end of its socket, and the kernel kills it when a pipe
closes whose other end only the controller holds.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llamarl.child import kill_group
from llamarl.cluster import fork_server
from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, MeshFailed, Reply, Tell, parts, pickled
from llamarl.cluster.handle import ABANDON_S, CAUSE_S, stop_all
from llamarl.cluster.launcher import SERVER
from llamarl.cluster.process_rank import LENGTH, framed
from llamarl.cluster.rank import FAILURE
from llamarl.cluster.watched import WatchedHandle, rank_command

_RANK_MODULE = "llamarl.cluster.process_rank"


class _Connection(asyncio.Protocol):
    """The controller's end of a rank's socket."""

    def __init__(self, lost: Callable[[], None]) -> None:
        """
        Args:
            lost: called when the connection has ended.
        """
        self._lost = lost
        self._transport: asyncio.WriteTransport | None = None
        self._arrived = bytearray()
        self._unanswered = dict[int, asyncio.Future[Reply]]()

    def send(self, message: bytes) -> None:
        """Sends a message, or loses it when the connection has ended."""
        if self._transport is not None:
            self._transport.write(framed(message))

    def ask(self, number: int, call: bytes) -> asyncio.Future[Reply]:
        """Sends a call. The future has the rank's reply, or ConnectionError when the connection ends before."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            reply.set_exception(ConnectionError("the connection has ended"))
        else:
            self._unanswered[number] = reply
            self.send(call)
        return reply

    def close(self) -> None:
        """Ends the connection once all messages are sent."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        while len(self._arrived) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._arrived)[0]
            if len(self._arrived) < end:
                return
            with memoryview(self._arrived) as arrived:
                number, reply = pickle.loads(arrived[LENGTH.size : end])
            del self._arrived[:end]
            answered = self._unanswered.pop(number)
            if not answered.done():  # the event loop may end with calls
                answered.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        unanswered, self._unanswered = self._unanswered, {}
        for reply in unanswered.values():
            if not reply.done():
                reply.set_exception(ConnectionError("the connection has ended"))
        self._lost()


class ProcessHandle(WatchedHandle):
    """Passes calls through a socket to each rank."""

    def __init__(self, spec: ExecutorSpec) -> None:
        super().__init__(spec)
        self._processes: list[subprocess.Popen[bytes]] = []
        """The process that was started for each rank: the rank itself, or its launcher."""
        self._lifelines: list[int] = []
        """Descriptor of the pipe of each rank that ends it."""
        self._connections: list[_Connection] = []
        self._num_sent = 0

    async def start(self, spec: ExecutorSpec, log_folder: Path | None) -> None:
        """Starts the processes. Raises PayloadTooLarge, or MeshFailed if a process cannot be started."""
        first, *others = [LENGTH.pack(len(packed := pickled(spec, spec.name, "the specification"))), *parts(packed)]
        for rank in range(spec.num_ranks):
            try:
                ours = self._start_rank(spec, rank, log_folder)
            except OSError as error:
                self._fail(MeshFailed(spec.name, (rank,), f"a process cannot be started: {error}"))
                raise self._ended.result() from error
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                lambda rank=rank: _Connection(lambda: self._connection_lost(rank)), sock=ours
            )
            self._connections.append(connection)
            for message in (first, *others):
                connection.send(message)

    def _start_rank(self, spec: ExecutorSpec, rank: int, log_folder: Path | None) -> socket.socket:
        """Starts the process of a rank. Returns the controller's end of its socket. Raises OSError."""
        launches = SERVER in os.environ
        arguments, variables = rank_command(spec, rank, rank, spec.env, log_folder, _RANK_MODULE, launches=launches)
        ours, theirs = socket.socketpair()
        until, lifeline = os.pipe()
        try:
            with theirs:
                socket.send_fds(ours, [b"\0"], [until])
                process = subprocess.Popen(
                    [sys.executable, *arguments], stdin=theirs.fileno(), env={**os.environ, **variables},
                    pass_fds=fork_server.descriptors(), process_group=0,
                )  # fmt: skip
        except OSError:
            ours.close()
            os.close(lifeline)
            raise
        finally:
            os.close(until)
        self._processes.append(process)
        self._lifelines.append(lifeline)
        self._watch_processes(rank, [process.pid])
        return ours

    def _send(
        self, method: str, payload: bytes, timeout_s: float, rank: int | None = None
    ) -> asyncio.Future[list[Reply]]:
        self._num_sent += 1
        call = pickle.dumps((self._num_sent, method, payload, timeout_s), pickle.HIGHEST_PROTOCOL)
        to = self._connections if rank is None else [self._connections[rank]]
        return asyncio.gather(*[connection.ask(self._num_sent, call) for connection in to])

    def _watch(self) -> None:
        """Watches ranks that a fork server has forked; the processes that were started are watched already."""
        self._watch_work()
        for rank, (pid, process) in enumerate(zip(self.pids, self._processes, strict=True)):
            if pid != process.pid:
                self._watch_processes(rank, [pid])

    def _watch_work(self) -> None:
        for rank in range(self._num_ranks):
            self._send(FAILURE, b"", 0.0, rank).add_done_callback(self._rank_told)

    def _rank_told(self, failure: asyncio.Future[list[Reply]]) -> None:
        if not failure.cancelled() and failure.exception() is None:
            self._failure_told(failure.result()[0])

    def _connection_lost(self, rank: int) -> None:
        """Handles the end of a connection. It usually follows the end of the process, which has a better cause."""
        lost = MeshFailed(self.name, (rank,), "a process has closed its connection")
        asyncio.get_running_loop().call_later(CAUSE_S, self._fail, lost)

    def _exited(self, rank: int, cause: str | None) -> None:
        process = self._processes[rank]
        if process.returncode is None and process.poll() is not None:
            kill_group(process.pid)
        super()._exited(rank, cause)
        if not self._running[rank] and self._lifelines[rank] >= 0:
            os.close(self._lifelines[rank])
            self._lifelines[rank] = -1

    async def _leave(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._processes:
            await asyncio.wait(self._exits[: len(self._processes)])

    def _kill(self) -> None:
        super()._kill()
        for process in self._processes:
            if process.returncode is None:
                kill_group(process.pid)


class ProcessCluster(Cluster):
    """Executors in processes of this machine."""

    def __init__(self, log_folder: Path | None) -> None:
        """
        Args:
            log_folder: folder for the output of each rank. None means this process's standard output and error.
        """
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        self._log_folder = log_folder
        self._handles: list[ProcessHandle] = []

    async def spawn(self, spec: ExecutorSpec, timeout_s: float, tell: Tell | None = None) -> ExecutorHandle:
        timeout_s = await fork_server.ready(spec.target.partition(":")[0], timeout_s, tell)
        handle = ProcessHandle(spec)
        self._handles.append(handle)
        try:
            await handle.start(spec, self._log_folder)
        except BaseException:
            with suppress(MeshFailed):
                await handle.stop(ABANDON_S)
            raise
        await handle.ready(timeout_s, tell)
        return handle

    async def shutdown(self, timeout_s: float) -> None:
        handles, self._handles = self._handles, []
        await stop_all(handles, timeout_s)
