"""`InlineCluster`: all executors in this process, one thread each. For tests, debugging and runs on one device."""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from pathlib import Path

from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, Reply, Tell, error_of, pickled, value_of
from llamarl.cluster.handle import BaseHandle, stop_all
from llamarl.cluster.rank import CLOSE, FAILURE, ExecutorRank
from llamarl.config.cluster import use_processes
from llamarl.config.errors import ConfigError

_log = logging.getLogger(__name__)


class InlineHandle(BaseHandle):
    """Passes calls from the event loop to the executor's thread as bytes, so no object is shared by accident."""

    def __init__(self, spec: ExecutorSpec, packed_spec: bytes, log: Path | None) -> None:
        super().__init__(spec)
        self._host = ExecutorRank(pickle.loads(packed_spec), log)
        self._closed: asyncio.Future[Reply] | None = None

    def _send(
        self, method: str, payload: bytes, timeout_s: float, rank: int | None = None
    ) -> asyncio.Future[list[Reply]]:
        return asyncio.gather(*[asyncio.wrap_future(self._host.submit(method, payload, timeout_s))])

    def _watch(self) -> None:
        failure = self._send(FAILURE, b"", 0.0)
        failure.add_done_callback(lambda replies: self._fail(error_of(replies.result()[0], self.name)))

    async def stop(self, timeout_s: float) -> None:
        self._end()
        if self._closed is not None:
            return
        self._closed = asyncio.wrap_future(self._host.submit(CLOSE, b"", timeout_s))
        await asyncio.wait((self._closed,), timeout=timeout_s)
        if self._closed.done():
            value_of(self._closed.result(), self.name)
        else:
            _log.warning("%s did not stop within %g s; its thread ends with the process", self.name, timeout_s)


class InlineCluster(Cluster):
    """Executors share the interpreter, its environment and its devices. Each has one rank."""

    def __init__(self, log_folder: Path | None = None) -> None:
        """
        Args:
            log_folder: folder with a file of technical notes for each executor. None means standard output.
        """
        self._log_folder = log_folder
        self._handles: list[InlineHandle] = []

    async def spawn(self, spec: ExecutorSpec, timeout_s: float, tell: Tell | None = None) -> ExecutorHandle:
        if spec.num_ranks > 1:
            raise ConfigError(
                f"cluster.kind = 'inline' runs one rank per executor, and {spec.name} asks for {spec.num_ranks}; "
                + use_processes()
            )
        sys.path[:0] = [path for path in spec.code_paths if path not in sys.path]
        log = self._log_folder / f"{spec.name}.log" if self._log_folder else None
        handle = InlineHandle(spec, pickled(spec, spec.name, "the specification"), log)
        self._handles.append(handle)
        await handle.ready(timeout_s, tell)
        return handle

    async def shutdown(self, timeout_s: float) -> None:
        handles, self._handles = self._handles, []
        await stop_all(handles, timeout_s)
