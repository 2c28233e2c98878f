"""Simulated executors: handles that answer as the real ones do, after the time that the real ones would take.

They take calls in the order of their arrival and one at a time, as an `ExecutorRank` does; only `collect` waits aside.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, HostStatus, MeshFailed
from llamarl.config import RunConfig
from llamarl.executors.replies import (
    GROUPS_INTERVAL_S,
    LATEST_S,
    REPLY_INTERVAL_S,
    Adoption,
    Collected,
    GeneratorStats,
    Probe,
    Published,
)
from llamarl.observability.metrics import UpdateMetrics
from llamarl.observability.spans import Span
from llamarl.parts.forecast.costs import Costs
from llamarl.parts.forecast.simulator.decoding import Attempt, Decoded, DecodeQueue
from llamarl.parts.forecast.simulator.draws import ResponseLengths
from llamarl.parts.forecast.simulator.faults import Faults
from llamarl.parts.forecast.simulator.records import repeated
from llamarl.training.result import PolicyStepResult
from llamarl.types import FinishReason, GenerationRequest, Prompt, Rollout, RolloutGroup, continued
from llamarl.weight_sync.layout import Address

NOWHERE = Address(transport="simulated", publisher="", num_writers=0, places={})
NOTHING_T = np.zeros(1, np.float32)
PROBE = Probe(sequences=[NOTHING_T], logprobs=[NOTHING_T])


@dataclass(kw_only=True, slots=True)
class World:
    """State that all executors of a simulation share."""

    config: RunConfig
    costs: Costs
    faults: Faults
    trainer_gpus: int
    lengths: ResponseLengths
    counts: Counter[str] = field(default_factory=Counter)
    """Number of events, by the names of `COUNTS`."""
    executors_cpu_s: float = 0.0
    """Processor time inside simulated executors: in a real run it passes elsewhere, not in the controller."""
    controller: list[tuple[float, float]] = field(default_factory=list)
    """Times at which the controller works, and its processor seconds from each on."""

    def message(self, now_s: float) -> None:
        """One between the controller and an executor."""
        if self.costs.cores:
            self.controller.append((now_s, self.costs.controller_call_s / 2))


class SimulatedHandle(ExecutorHandle):
    """One executor that only takes time: `do_METHOD` gives the seconds of a call and its result."""

    SPANS: ClassVar[dict[str, str]] = {}
    """Span name of each method that is work."""

    def __init__(self, name: str, world: World) -> None:
        self._loop = asyncio.get_running_loop()
        self._world, self._costs = world, world.costs
        self.name = name
        self.pids = [0]
        self.failed: asyncio.Future[ExecutorError] = self._loop.create_future()
        self._ended: ExecutorError | None = None
        self.alive_s = (self._loop.time(), math.inf)
        """Virtual seconds of its birth and of its death."""
        self._free_s = 0.0
        """Time when the calls that were taken so far are done, in virtual seconds."""
        self._doing, self._doing_since_s = "idle", 0.0
        self._calls = set[asyncio.Future[None]]()
        self._spans = list[Span]()

    @property
    def is_alive(self) -> bool:
        return self._ended is None

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        if self._ended:
            raise self._ended
        self.num_calls += 1
        start_s = max(self._loop.time(), self._free_s)
        self._world.message(self._loop.time())
        began_s = time.thread_time()
        duration_s, result = getattr(self, f"do_{method}")(*args)
        self._world.executors_cpu_s += time.thread_time() - began_s
        await self._busy_until(start_s, start_s + duration_s, method, timeout_s)
        await self._under_way()
        return result

    async def _under_way(self) -> None:
        """Waits while a call and its answer are under way; the executor may do other work meanwhile."""
        self._world.message(self._loop.time())
        if self._costs.call_s:
            await asyncio.sleep(self._costs.call_s)

    async def _busy_until(self, start_s: float, end_s: float, method: str, timeout_s: float) -> None:
        """Waits until this call is done, no longer than `timeout_s`; the executor goes on in either case."""
        now_s = self._loop.time()
        if end_s > start_s:
            self._free_s = end_s
            self._doing, self._doing_since_s = method, start_s
            if method in self.SPANS:
                self._spans.append(Span(self.SPANS[method], start_s, end_s))
        if end_s <= now_s or end_s == start_s:
            return
        done = self._loop.create_future()
        timer = self._loop.call_at(min(end_s, now_s + timeout_s), _resolve, done)
        self._calls.add(done)
        try:
            await done
        finally:
            timer.cancel()
            self._calls.discard(done)
        if end_s > now_s + timeout_s:
            raise CallTimeout(self.name, method, timeout_s, f"is in {self._doing}")

    async def call_each(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        return [await self.call(method, *args, timeout_s=timeout_s, **kwargs)]

    async def status(self, timeout_s: float) -> HostStatus:
        if self._ended:
            raise self._ended
        spans, self._spans = self._spans, []
        now_s = self._loop.time()
        doing, since_s = self._current(now_s)
        return HostStatus(pid=0, doing=doing, doing_age_s=now_s - since_s, busy_s={}, queued_calls=0, spans=spans)

    def _current(self, now_s: float) -> tuple[str, float]:
        """Method that it runs, or `idle`, and since when, in virtual seconds."""
        return (self._doing, self._doing_since_s) if now_s < self._free_s else ("idle", self._free_s)

    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        return [await self.status(timeout_s)]

    async def stop(self, timeout_s: float) -> None:
        self._end(MeshFailed(self.name, (0,), "stopped by the controller"))

    def die(self) -> None:
        """The process is gone, as after `kill -9`."""
        error = MeshFailed(self.name, (0,), "was killed by SIGKILL")
        self._end(error)
        self.failed.set_result(error)

    def _end(self, error: ExecutorError) -> None:
        if self._ended is None:
            self._ended, self.alive_s = error, (self.alive_s[0], self._loop.time())
        for done in self._calls:
            if not done.done():
                done.set_exception(error)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class SimulatedGenerator(SimulatedHandle):
    """Decodes by `DecodeQueue`; one timer stands for its next event."""

    SPANS: ClassVar[dict[str, str]] = {"adopt": "weight_sync", "score": "weight_sync"}

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        settings, costs = world.config.generator, world.costs
        self._slowness = slowness = world.faults.slowness(int(name.removeprefix("generator-")), settings.replicas)
        self._queue = DecodeQueue(
            base_s=costs.decode_base_s * slowness,
            per_rollout_s=costs.decode_per_rollout_s * slowness,
            max_running=settings.max_running,
        )
        self._begun = dict[tuple[int, int], Rollout]()
        """Rollouts as they were when generation began, for unfinished ones, by group and index."""
        self._reply: asyncio.Future[Collected] | None = None
        self._reply_deadline_s = self._reply_timeout_s = 0.0
        self._replied_s, self._num_wanted = 0.0, 0
        self._early = list[GenerationRequest]()
        """Requests that wait for a version to come."""
        self._aborted = list[Rollout]()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._decoding_since_s: float | None = None

    @property
    def num_unfinished(self) -> int:
        """Rollouts that would be lost with it."""
        return len(self._queue.unfinished) + len(self._queue.finished)

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        if method != "collect":
            return await super().call(method, *args, timeout_s=timeout_s, **kwargs)
        if self._ended:
            raise self._ended
        assert self._reply is None, "one collect at a time"
        self.num_calls += 1
        (self._num_wanted,) = args
        reply = self._reply = self._loop.create_future()
        self._reply_timeout_s, self._reply_deadline_s = timeout_s, self._loop.time() + timeout_s
        self._schedule()
        self._world.message(self._loop.time())
        collected = await reply
        await self._under_way()
        return collected

    def do_weight_specs(self) -> tuple[float, Any]:
        return 0.0, ()

    def do_submit(self, requests: Sequence[GenerationRequest]) -> tuple[float, Any]:
        for request in requests:
            if request.from_version > self._queue.version:
                self._early.append(request)
            else:
                self._submit(self._loop.time(), request)
        self._schedule()
        return 0.0, None

    def do_adopt(self, version: int, _: Address) -> tuple[float, Any]:
        pause_s = self._costs.adopt_s * self._slowness
        seconds = self._pause(version, pause_s)
        early, self._early = self._early, []
        self.do_submit(early)
        return seconds, Adoption(version=version, stall_s=pause_s)

    def do_abort(self, group_ids: Sequence[int]) -> tuple[float, Any]:
        """Takes back requests that wait for a version; no others are taken back."""
        for request in (one for one in self._early if one.group_id in group_ids):
            self._aborted += [replace(one, finish_reason=FinishReason.ABORTED) for one in request.starts()]
        self._early = [one for one in self._early if one.group_id not in group_ids]
        self._schedule()
        return 0.0, None

    def do_score(self, _: Sequence[np.ndarray]) -> tuple[float, Any]:
        return self._pause(self._queue.version, self._costs.probe_s * self._slowness), PROBE.logprobs

    def _submit(self, now_s: float, request: GenerationRequest) -> None:
        if self._decoding_since_s is None:
            self._decoding_since_s = max(now_s, self._free_s)
        lengths = self._world.lengths.draw(request.group_id, request.group_size)
        attempts, prefilled = list[Attempt](), len(request.prompt_token_ids_T)
        for partial in request.starts():
            left, earlier = lengths[partial.index] - partial.num_tokens, partial.num_tokens
            now = min(left, request.segment_tokens or left)
            self._begun[request.group_id, partial.index] = partial
            attempts.append(Attempt(request.group_id, partial.index, now, earlier, left - now))
            prefilled += earlier
        self._queue.submit(now_s, attempts, self._costs.prefill_token_s * self._slowness * prefilled)

    def _pause(self, version: int, pause_s: float) -> float:
        """Seconds until decoding has stood still for `pause_s`."""
        start_s = max(self._loop.time(), self._free_s)
        end_s = self._queue.adopt(start_s, version, pause_s)
        if self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, end_s - pause_s))
            self._decoding_since_s = end_s
        self._schedule()
        return end_s - start_s

    def _schedule(self) -> None:
        """Sets the timer to the next moment at which something can be handed over, or at which the reply is overdue."""
        if self._reply is None:
            return
        now_s, due_s = self._loop.time(), self._queue.next_finish_s
        if due_s <= now_s < self._due_s():  # others may end, and the last one hands over at once
            due_s = min(self._due_s(), self._queue.next_end_s)
        if self._aborted:
            due_s = now_s
        due_s = max(min(due_s, self._reply_deadline_s), now_s)
        if self._timer is None or due_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due_s, self._wake)
            self._timer_s = due_s

    def _due_s(self) -> float:
        """When what has ended is handed over, as a generator does."""
        queue = self._queue
        if (self._num_wanted and queue.num_whole >= self._num_wanted) or not queue.has_work:
            return -math.inf
        if not self._num_wanted or queue.num_parked:
            return self._replied_s + REPLY_INTERVAL_S
        return self._replied_s + (GROUPS_INTERVAL_S if queue.num_whole else LATEST_S)

    def _wake(self) -> None:
        began_s = time.thread_time()
        self._timer = None
        if self._reply is not None:
            self._hand_over(self._reply, self._loop.time())
        self._world.executors_cpu_s += time.thread_time() - began_s

    def _hand_over(self, reply: asyncio.Future[Collected], now_s: float) -> None:
        """Answers the waiting `collect` with what has finished."""
        self._queue.advance(now_s)
        finished = self._queue.finished
        rollouts, self._aborted = self._aborted, []
        is_due = now_s >= self._due_s()
        while is_due and finished and finished[0].finished_s <= now_s:
            rollouts.append(self._rollout(finished.popleft()))
        if not self._queue.has_work and not finished and self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, now_s))
            self._decoding_since_s = None
        if rollouts:
            self._reply, self._replied_s = None, now_s
            queue = self._queue
            queue.num_whole = queue.num_parked = 0
            stats = GeneratorStats(queue.num_running, queue.num_waiting, queue.generated_tokens)
            reply.set_result(Collected(rollouts=rollouts, stats=stats))
        elif now_s >= self._reply_deadline_s:
            self._reply = None
            reply.set_exception(CallTimeout(self.name, "collect", self._reply_timeout_s, "is in work"))
        else:
            self._schedule()

    def _rollout(self, decoded: Decoded) -> Rollout:
        attempt = decoded.attempt
        before = self._begun.pop((attempt.group_id, attempt.index))
        self._world.counts["resumed_rollouts"] += decoded.last_version > decoded.first_version
        # Of the tokens only their number and the oldest version matter to the controller: one array stands for all.
        versions_T = repeated(decoded.first_version, attempt.num_tokens)
        return Rollout(
            group_id=attempt.group_id,
            index=attempt.index,
            columns=continued(before.columns, dict.fromkeys(before.columns, versions_T)),
            finish_reason=_finish_reason(attempt, self._world.lengths.limit_tokens),
        )

    def _current(self, now_s: float) -> tuple[str, float]:
        if now_s >= self._free_s and self._decoding_since_s is not None:
            return "work", self._decoding_since_s
        return super()._current(now_s)

    def _end(self, error: ExecutorError) -> None:
        super()._end(error)
        if self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, self._loop.time()))
            self._decoding_since_s = None
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
            self._reply = None


def _finish_reason(attempt: Attempt, limit_tokens: int) -> FinishReason:
    if attempt.later_tokens:
        return FinishReason.PARKED
    return FinishReason.LENGTH if attempt.earlier_tokens + attempt.num_tokens >= limit_tokens else FinishReason.STOP


class SimulatedTrainer(SimulatedHandle):
    """Steps take a fixed time and a share per token."""

    SPANS: ClassVar[dict[str, str]] = {"step": "train", "publish": "weight_sync", "save": "checkpoint"}

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self._groups = dict[int, tuple[int, int, int]]()
        """Rollouts, response tokens and computed tokens of each group that was sent ahead."""
        self._version = 0

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        result = await super().call(method, *args, timeout_s=timeout_s, **kwargs)
        if method == "save":  # copied; the answer comes when it is written
            await asyncio.sleep(self._costs.save_s(self._world.trainer_gpus)[1])
        return result

    def do_add_groups(self, groups: Sequence[RolloutGroup]) -> tuple[float, Any]:
        skips = self._costs.skips_equal_rewards
        self._groups.update((group.group_id, _size(group, skips)) for group in groups)
        return 0.0, None

    def do_set_layout(self, *_: Any) -> tuple[float, Any]:
        return 0.0, None

    def do_publish(self, version: int, _: tuple[int, ...]) -> tuple[float, Any]:
        every = self._world.config.weight_sync.probe_every_steps
        probe = PROBE if every and version % every == 0 else None
        return self._costs.publish_s, Published(version=version, addresses={"": NOWHERE}, probe=probe)

    def do_save(self, *_: Any) -> tuple[float, Any]:
        return self._costs.save_s(self._world.trainer_gpus)[0], None

    def do_commit(self) -> tuple[float, Any]:
        return 0.0, ""

    def do_step(self, group_ids: Sequence[int], groups: Sequence[RolloutGroup]) -> tuple[float, Any]:
        self.do_add_groups(groups)
        sizes = [self._groups.pop(group_id) for group_id in group_ids]
        loss_tokens = sum(tokens for _, tokens, _ in sizes)
        tokens = sum(computed for _, _, computed in sizes)
        self._version += 1
        result = PolicyStepResult(
            policy_version=self._version,
            skipped=False,
            update=UpdateMetrics(num_loss_tokens=loss_tokens),
            advantages={group_id: np.zeros(size[0]) for group_id, size in zip(group_ids, sizes, strict=True)},
        )
        return self._costs.train_s(tokens, self._world.trainer_gpus), result


def _size(group: RolloutGroup, skips_equal_rewards: bool) -> tuple[int, int, int]:
    prompt: Prompt = group.prompt
    tokens = sum(rollout.num_tokens for rollout in group.rollouts)
    is_skipped = skips_equal_rewards and len({result.value for result in group.results}) == 1
    # The last token of a response predicts nothing, so it is no input.
    return len(group.rollouts), tokens, 0 if is_skipped else len(prompt.token_ids_T) + tokens - len(group.rollouts)
