"""`AgentWorkers`: processes of agents, which can be killed. Each process runs many agents concurrently."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from itertools import count
from typing import Any

from llamarl.child import Child
from llamarl.config.roles import AgentConfig
from llamarl.parts.episodes.line_worker import MAX_LINE_BYTES

GRACE_S = 10.0
"""Seconds that an agent may exceed its deadline before its process is killed."""


class AgentWorkers:
    """Assigns each episode to the worker with the fewest episodes."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._workers = [_AgentProcess(config) for _ in range(config.workers)]

    async def run(self, item: dict[str, Any], *, alone: bool) -> dict[str, Any]:
        """Returns an agent's result in the form of `_worker`. `alone`: runs it in a separate process. Raises EOFError
        if the process died, because of this episode or another one in it."""
        if not alone:
            return await min(self._workers, key=lambda one: len(one.waiting)).ask(item)
        worker = _AgentProcess(self._config)
        try:
            return await worker.ask(item)
        finally:
            worker.kill()

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


class _AgentProcess:
    """One process, started on demand and restarted after a crash."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._starting = asyncio.Lock()
        self._process: Child | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.waiting = dict[int, asyncio.Future[dict[str, Any]]]()
        self._numbers = count()

    async def ask(self, item: dict[str, Any]) -> dict[str, Any]:
        number, limit_s = next(self._numbers), item["episode_s"] + GRACE_S
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_s):
                async with self._starting:
                    if self._process is None:
                        await self._start()
                assert self._writer is not None
                self._writer.write(json.dumps(item | {"number": number}).encode() + b"\n")
                return await answer
        except TimeoutError:
            self.kill()
            raise EOFError(f"its worker hung for {limit_s:g} s") from None
        finally:
            del self.waiting[number]

    async def _start(self) -> None:
        arguments = str(self._config.memory_bytes), str(os.getpid()), self._config.model_dump_json()
        process = self._process = Child("-m", "llamarl.parts.episodes.gateway._worker", *arguments)
        reader, self._writer = await asyncio.open_connection(sock=process.stream, limit=MAX_LINE_BYTES)
        self._reading = asyncio.create_task(self._read(reader, process))

    async def _read(self, reader: asyncio.StreamReader, process: Child) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                said = json.loads(line)
                if (answer := self.waiting.get(said.pop("number"))) and not answer.done():
                    answer.set_result(said)
        if self._process is process:
            self.kill()

    def kill(self) -> None:
        """Kills the worker and all processes that its agents started. The next episode gets a new process."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._writer is not None:  # None if the connection was canceled while it was opened
            self._writer.transport.abort()
        process.end()
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(EOFError(f"its worker died with code {process.returncode}"))
