"""Executors in processes: the command that starts a rank, and a handle that notices deaths by pidfds."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from llamarl.child import kill_group
from llamarl.cluster import launcher, start_up
from llamarl.cluster.api import ExecutorError, ExecutorSpec, MeshFailed, Reply, error_of, value_of
from llamarl.cluster.handle import CAUSE_S, BaseHandle, cause_of, cause_of_reaped, killed_by
from llamarl.cluster.rank import CLOSE

_LAUNCHER = Path(launcher.__file__).read_text(encoding="utf-8")


def rank_command(
    spec: ExecutorSpec,
    rank: int,
    local_rank: int,
    env: Mapping[str, str],
    log_folder: Path | None,
    engine_module: str,
    *,
    launches: bool,
) -> tuple[list[str], dict[str, str]]:
    """Returns arguments for the Python interpreter that start a rank, and environment variables to add.

    Args:
        engine_module: module that takes the rank's calls.
        launches: a fork server may be available to fork the rank.
    """
    variables, log_name = dict(env), spec.name
    if spec.num_ranks > 1:
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(spec.num_ranks)}
        log_name = f"{spec.name}.{rank}"
    log_file = log_folder / f"{log_name}.log" if log_folder else None
    arguments = start_up.command(engine_module, spec.code_paths, log_file)
    if launches:
        arguments = ["-I", "-S", "-c", _LAUNCHER, spec.target.partition(":")[0], *arguments]
    return arguments, variables


class WatchedHandle(BaseHandle):
    """Watches the processes of an executor and stops them. A backend implements `_send`, `_watch_work` and `_leave`."""

    def __init__(self, spec: ExecutorSpec) -> None:
        super().__init__(spec)
        loop = asyncio.get_running_loop()
        self._exits: list[asyncio.Future[None]] = [loop.create_future() for _ in range(spec.num_ranks)]
        """Resolved when the process of a rank, and its launcher if there is one, has ended."""
        self._running: list[set[int]] = [set() for _ in range(spec.num_ranks)]
        """Descriptors of the processes of each rank that have not ended."""
        self._stopping: asyncio.Task[None] | None = None

    @abstractmethod
    def _watch_work(self) -> None:
        """Begins to wait for failures of `work()`. Each is handled by `_failure_told`."""

    @abstractmethod
    async def _leave(self) -> None:
        """Ends the processes of an executor that has closed. Returns when they have ended, or never."""

    def _watch(self) -> None:
        self._watch_work()
        for rank, pids in enumerate(zip(self._launchers, self.pids, strict=True)):
            self._watch_processes(rank, filter(None, pids))
            if not self._running[rank]:
                self._exited(rank, "has ended")

    def _watch_processes(self, rank: int, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                self._running[rank].add(descriptor)
                asyncio.get_running_loop().add_reader(descriptor, self._process_ended, rank, descriptor)

    def _failure_told(self, failure: Reply) -> bool:
        """Handles a failure that a rank reports. A rank that only lost other ranks may report before them. Returns
        whether this was such a rank."""
        raised = error_of(failure, self.name)
        if is_consequence := isinstance(raised, MeshFailed):
            asyncio.get_running_loop().call_later(CAUSE_S, self._fail, raised)
        else:
            self._fail(raised)
        return is_consequence

    def _where(self, rank: int) -> str:
        """Returns the host of a rank for a message, empty for this machine."""
        return ""

    def _process_ended(self, rank: int, descriptor: int) -> None:
        """Handles the end of a rank or of its launcher. The launcher ends as the rank does, and this process can learn
        its cause."""
        asyncio.get_running_loop().remove_reader(descriptor)
        cause = None
        try:
            info = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                killed = info.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                cause = killed_by(info.si_status) if killed else f"ended with exit code {info.si_status}"
        except ChildProcessError:  # Monarch, the parent's code, has reaped it first, or a fork server is the parent
            cause = cause_of_reaped(descriptor)
        os.close(descriptor)
        self._running[rank].discard(descriptor)
        self._exited(rank, cause)

    def _exited(self, rank: int, cause: str | None) -> None:
        if self.pids:
            kill_group(self.pids[rank])
        if not self._running[rank] and not self._exits[rank].done():
            self._exits[rank].set_result(None)
        self._dead(rank, cause)

    def _dead(self, rank: int, cause: str | None) -> None:
        """Marks a rank dead. None as cause means that the backend gets time to report it."""
        ended = cause or "has ended"
        if self.pids:
            text = f"pid {self.pids[rank]}{self._where(rank)} {ended}"
        else:
            text = f"a process {ended} while it started"
        error = MeshFailed(self.name, (rank,), text)
        if cause is not None:
            self._fail(error)
        elif not self._ended.done():
            asyncio.get_running_loop().call_later(CAUSE_S, self._fail, error)

    async def _lost(self, error: BaseException | None) -> ExecutorError:
        await asyncio.wait((self._ended,), timeout=CAUSE_S)
        if self._ended.done():
            return self._ended.result()
        when = "" if self.pids else " while it started"
        return MeshFailed(self.name, tuple(range(self._num_ranks)), f"a process {cause_of(str(error))}{when}")

    async def stop(self, timeout_s: float) -> None:
        if self._stopping is None:
            self._end()
            self._stopping = asyncio.create_task(self._stop(time.monotonic() + timeout_s, timeout_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, deadline_s: float, timeout_s: float) -> None:
        """Closes, leaves, then kills. The close may take half of the time, and leaving two thirds of the rest."""
        closed = self._send(CLOSE, b"", timeout_s)
        closed.add_done_callback(lambda replies: replies.exception())
        await asyncio.wait((closed,), timeout=timeout_s / 2)
        if not closed.done():
            self._kill()
        left = asyncio.ensure_future(self._leave())
        await asyncio.wait((left,), timeout=(deadline_s - time.monotonic()) * 2 / 3)
        self._kill()
        if watched := [ended for ended, running in zip(self._exits, self._running, strict=True) if running]:
            await asyncio.wait(watched, timeout=max(0.1, deadline_s - time.monotonic()))
        if closed.done() and closed.exception() is None:
            for reply in closed.result():
                value_of(reply, self.name)

    def _kill(self) -> None:
        for pid, ended in zip(self.pids, self._exits, strict=False):  # no process is known during startup
            if not ended.done():
                kill_group(pid)
