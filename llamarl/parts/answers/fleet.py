"""`Fleet`: generator processes that answer like a single engine. Their weights never change."""

from __future__ import annotations

import asyncio
import math
import queue
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from llamarl.cluster.api import ExecutorHandle, port
from llamarl.cluster.fork_server import fork_server
from llamarl.cluster.open import check_cluster, open_cluster
from llamarl.config import RunConfig
from llamarl.controller.ports import GeneratorPort
from llamarl.controller.supervision import PausableClockLoop
from llamarl.executors.replies import GeneratorStats
from llamarl.generation.backend import EngineStats
from llamarl.run.executors import GeneratorSpecs, spawn_all
from llamarl.run.placement import LocalPlacer
from llamarl.types import GenerationRequest, Rollout

T = TypeVar("T")
STEP_S = 0.05
"""Maximum duration of one `step` in seconds. New requests are accepted between two steps."""
ANSWER_S = 24 * 3600.0
"""Maximum wait for a rollout in seconds. The death of a process is noticed at once."""


class _Member:
    """One generator and its unfinished rollouts."""

    def __init__(self, handle: ExecutorHandle, timeout_s: float) -> None:
        self.short, self.long = port(GeneratorPort, handle, timeout_s), port(GeneratorPort, handle, ANSWER_S)
        self.owed = Counter[int]()
        """Number of rollouts by request that `step` has not returned yet. Only the caller's thread uses it."""
        self.num_open = 0
        """Number of rollouts that the generator has not returned yet. Only the loop's thread uses it."""
        self.is_asked = asyncio.Event()
        self.stats = GeneratorStats()


class Fleet:
    """Replicas of a generator behind the interface of an engine (`RolloutEngine`). A request goes to the replica with
    the fewest unfinished rollouts. Not thread-safe."""

    def __init__(self, config: RunConfig) -> None:
        """Starts the processes.

        Raises:
            ConfigError: the device, the model or the process cluster is not available.
            ExecutorError: a process failed to start.
        """
        check_cluster(config.cluster)
        self._config, self._placer = config, LocalPlacer(config, only="generator")
        self._placer.check()
        self._news = queue.SimpleQueue[tuple[_Member, list[Rollout]] | Exception]()
        self._members: list[_Member] = []
        self._logs = tempfile.TemporaryDirectory(prefix="llamarl-", ignore_cleanup_errors=True)
        self._cluster = open_cluster(config.cluster, Path(self._logs.name))
        self._loop, self._tasks = PausableClockLoop(), list[asyncio.Task[None]]()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()
        self._leaving = ExitStack()
        self._leaving.enter_context(fork_server(config.cluster.kind))
        try:
            self._now(self._start(), math.inf)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the processes."""
        limit_s = self._config.cluster.shutdown_timeout_s
        self._now(self._end(limit_s), 2 * limit_s + 1)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=1)
        self._leaving.close()
        self._logs.cleanup()

    @property
    def has_work(self) -> bool:
        """Returns whether rollouts are unfinished or ready for `step`."""
        return any(member.owed for member in self._members)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Distributes requests. Raises ExecutorError."""
        for request in requests:
            member = min(self._members, key=lambda one: one.owed.total())
            member.owed[request.group_id] = len(request.indices)
            self._now(self._ask(member, request))

    def step(self) -> list[Rollout]:
        """Returns finished rollouts, or none after `STEP_S` seconds. Raises ExecutorError."""
        with suppress(queue.Empty):
            found = self._news.get(timeout=STEP_S)
            if isinstance(found, Exception):
                raise found
            member, rollouts = found
            member.owed -= Counter(rollout.group_id for rollout in rollouts)
            return rollouts
        return []

    def abort(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Cancels requests. Their partial rollouts are returned by `step`. Raises ExecutorError."""
        self._each(group_ids, lambda member, ids: member.short.abort(ids))
        return []

    def so_far(self, group_ids: Iterable[int]) -> list[Rollout]:
        """Returns copies of the rollouts of these requests that are being decoded. Raises ExecutorError."""
        found = self._each(group_ids, lambda member, ids: member.short.so_far(ids))
        return [rollout for rollouts in found for rollout in rollouts]

    def stats(self) -> EngineStats:
        """Returns the summed state. Counters are those of the last rollout that each generator finished."""
        most, owed = self._config.generator.max_running, [member.owed.total() for member in self._members]
        counted = [member.stats for member in self._members]
        return EngineStats(
            running=sum(min(one, most) for one in owed),
            waiting=sum(max(one - most, 0) for one in owed),
            kv_use=math.nan,
            decode_tokens=sum(one.generated_tokens for one in counted),
            prefill_tokens=int(sum(one.prefill_tokens for one in counted)),
            steps=int(sum(one.decode_steps + one.prefill_steps for one in counted)),
            recomputed_tokens=int(sum(one.recomputed_tokens for one in counted)),
            recompute_s=sum(one.recompute_s for one in counted),
        )

    def _each(self, group_ids: Iterable[int], call: Callable[[_Member, Sequence[int]], Awaitable[T]]) -> list[T]:
        """Returns the results of the call on each generator that has any of these requests."""
        ids = set(group_ids)
        found = [(member, sorted(mine)) for member in self._members if (mine := ids & member.owed.keys())]

        async def ask() -> list[T]:
            return list(await asyncio.gather(*(call(member, mine) for member, mine in found)))

        return self._now(ask()) if found else []

    def _now(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 0.0) -> T:
        """Runs a coroutine in the fleet's loop and returns its result. The calls inside have deadlines."""
        limit_s = timeout_s or 2 * self._config.cluster.timeout_s
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(None if math.isinf(limit_s) else limit_s)

    async def _start(self) -> None:
        config, specs = self._config, GeneratorSpecs(config=self._config).first(self._placer)
        handles = await spawn_all(self._cluster, specs, config.cluster.timeout_s)
        self._members = [_Member(handle, config.cluster.timeout_s) for handle in handles]
        self._tasks = [asyncio.create_task(self._collect(member)) for member in self._members]

    async def _ask(self, member: _Member, request: GenerationRequest) -> None:
        await member.short.submit([request])
        member.num_open += len(request.indices)
        member.is_asked.set()

    async def _end(self, limit_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        await self._cluster.shutdown(limit_s)

    async def _collect(self, member: _Member) -> None:
        """Fetches rollouts while any are unfinished. Waits for `submit` otherwise."""
        try:
            while True:
                await member.is_asked.wait()
                member.is_asked.clear()
                while member.num_open:
                    collected = await member.long.collect(0)
                    member.stats = collected.stats
                    member.num_open -= len(collected.rollouts)
                    self._news.put((member, list(collected.rollouts)))
        except Exception as error:  # the next `step` raises it
            self._news.put(error)
