"""Simulated executors: handles that answer like the real ones, after the duration of the real operation.

They process calls in order of arrival and one at a time, like an `ExecutorRank`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
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
from llamarl.training.probe import is_probed
from llamarl.training.result import PolicyStepResult
from llamarl.types import Columns, FinishReason, GenerationRequest, Prompt, Rollout, RolloutGroup, continued
from llamarl.weight_sync.layout import Address

NOWHERE = Address(transport="simulated", publisher="", num_writers=0, places={})
NOTHING_T = np.zeros(1, np.float32)
PROBE = Probe(sequences=[NOTHING_T], logprobs=[NOTHING_T], is_compared_N=np.ones(1, bool))


@dataclass(kw_only=True, slots=True)
class World:
    """Common state of all executors of a simulation."""

    config: RunConfig
    costs: Costs
    faults: Faults
    trainer_gpus: int
    lengths: ResponseLengths
    counts: Counter[str] = field(default_factory=Counter)
    """Number of events, by the names in `COUNTS`."""
    executors_cpu_s: float = 0.0
    """CPU time inside simulated executors. In a real run it is not spent in the controller."""
    controller: list[tuple[float, float]] = field(default_factory=list)
    """Times at which the controller works, and the CPU seconds of each."""

    def message(self, now_s: float) -> None:
        """Records a message between the controller and an executor."""
        if self.costs.cores:
            self.controller.append((now_s, self.costs.controller_call_s / 2))


class SimulatedHandle(ExecutorHandle):
    """One executor that only consumes time: `do_METHOD` returns the seconds and the result of a call.

    A future as a result is answered when it is done, concurrently with later calls.
    """

    SPANS: ClassVar[dict[str, str]] = {}
    """Span name of each method that counts as work."""

    def __init__(self, name: str, world: World) -> None:
        self._loop = asyncio.get_running_loop()
        self._world, self._costs = world, world.costs
        self.name = name
        self.pids = [0]
        self.failed: asyncio.Future[ExecutorError] = self._loop.create_future()
        self._ended: ExecutorError | None = None
        self.alive_s = (self._loop.time(), math.inf)
        """Virtual times of start and death."""
        self._free_s = 0.0
        """Virtual time when the current call is done."""
        self._doing, self._doing_since_s = "idle", 0.0
        self._line = deque[tuple[str, tuple[Any, ...], asyncio.Future[Any]]]()
        """Unfinished calls in order of arrival. The first one is running."""
        self._unanswered = set[asyncio.Future[Any]]()
        self._spans = list[Span]()

    @property
    def is_alive(self) -> bool:
        return self._ended is None

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        if self._ended:
            raise self._ended
        self.num_calls += 1
        self._world.message(self._loop.time())
        answer = self._loop.create_future()
        self._line.append((method, args, answer))
        if len(self._line) == 1:
            self._begin()
        if not answer.done():
            await self._wait(answer, method, timeout_s)
        self._world.message(self._loop.time())
        if self._costs.call_s:  # latency, during which the executor may do other work
            await asyncio.sleep(self._costs.call_s)
        return answer.result()

    async def _wait(self, answer: asyncio.Future[Any], method: str, timeout_s: float) -> None:
        """Waits at most `timeout_s` for an answer. The executor continues in either case."""
        timer = self._loop.call_later(timeout_s, self._expire, answer, method, timeout_s)
        self._unanswered.add(answer)
        try:
            await answer
        finally:
            timer.cancel()
            self._unanswered.discard(answer)

    def _expire(self, answer: asyncio.Future[Any], method: str, timeout_s: float) -> None:
        if not answer.done():
            doing, _ = self._current(self._loop.time())
            answer.set_exception(CallTimeout(self.name, method, timeout_s, f"is in {doing}"))

    def _begin(self) -> None:
        """Runs queued calls, up to the first call that takes time."""
        while self._line:
            method, args, answer = self._line[0]
            if answer.done() and not answer.cancelled():  # timed out, so it is dropped
                self._line.popleft()
                continue
            seconds, result = self._run(method, args)
            if seconds > 0:
                self._doing, self._doing_since_s = method, self._loop.time()
                self._free_s = self._doing_since_s + seconds
                if method in self.SPANS:
                    self._spans.append(Span(self.SPANS[method], self._doing_since_s, self._free_s))
                self._loop.call_at(self._free_s, self._finish, answer, result)
                return
            self._line.popleft()
            self._answer(answer, result)

    def _run(self, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        """Runs a call. Returns its seconds and its result."""
        began_s = time.thread_time()
        seconds, result = getattr(self, f"do_{method}")(*args)
        self._world.executors_cpu_s += time.thread_time() - began_s
        return seconds, result

    def _finish(self, answer: asyncio.Future[Any], result: Any) -> None:
        """Finishes the current call and starts the next one."""
        if self._ended is None:
            self._line.popleft()
            self._answer(answer, result)
            self._begin()

    def _answer(self, answer: asyncio.Future[Any], result: Any) -> None:
        """Answers a caller that is still waiting."""
        if isinstance(result, asyncio.Future):
            result.add_done_callback(lambda done: done.cancelled() or self._answer(answer, done.result()))
        elif not answer.done():
            answer.set_result(result)

    def _later(self, seconds: float) -> asyncio.Future[None]:
        """Returns a future that is done after `seconds` seconds."""
        done = self._loop.create_future()
        self._loop.call_later(seconds, done.set_result, None)
        return done

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
        """Returns the current method, or `idle`, and its start in virtual seconds."""
        return (self._doing, self._doing_since_s) if now_s < self._free_s else ("idle", self._free_s)

    async def status_each(self, timeout_s: float) -> list[HostStatus]:
        return [await self.status(timeout_s)]

    async def stop(self, timeout_s: float) -> None:
        stopped = MeshFailed(self.name, (0,), "stopped by the controller")
        self._end(self.failed.result() if self.failed.done() else stopped)

    def die(self, error: MeshFailed | None = None) -> None:
        """Ends the process, as `kill -9` does or as `error` says."""
        if self._ended is None:
            error = error or MeshFailed(self.name, (0,), "was killed by SIGKILL")
            self._end(error)
            self.failed.set_result(error)

    def _end(self, error: ExecutorError) -> None:
        if self._ended is None:
            self._ended, self.alive_s = error, (self.alive_s[0], self._loop.time())
        self._line.clear()
        for answer in self._unanswered:
            if not answer.done():
                answer.set_exception(error)


class SimulatedGenerator(SimulatedHandle):
    """Decodes with a `DecodeQueue`. One timer represents its next event."""

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
        """Initial state of unfinished rollouts, by group and index."""
        self._reply: asyncio.Future[Collected] | None = None
        self._replied_s, self._num_wanted, self._needed = 0.0, 0, set[int]()
        self._early = list[GenerationRequest]()
        """Requests that wait for a future version."""
        self._ended_rollouts = list[Decoded]()
        """Ended rollouts that have not been returned."""
        self._num_whole = self._num_parked = 0
        """Complete groups among them, and parked segments."""
        self._aborted = list[Rollout]()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._decoding_since_s: float | None = None

    @property
    def num_unfinished(self) -> int:
        """Rollouts that would be lost with this generator."""
        queue = self._queue
        return queue.num_running + queue.num_waiting + len(queue.finished) + len(self._ended_rollouts)

    def do_collect(self, num_wanted: int, needed: Sequence[int] = ()) -> tuple[float, Any]:
        self._num_wanted, self._reply = num_wanted, self._loop.create_future()
        here = {group_id for group_id, _ in self._begun} | {one.group_id for one in self._early}
        self._needed = here.intersection(needed) - {one.attempt.group_id for one in self._ended_rollouts if one.is_last}
        self._schedule()
        return 0.0, self._reply

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
        """Aborts all unfinished rollouts of these groups, which are returned with their tokens."""
        for request in (one for one in self._early if one.group_id in group_ids):
            self._aborted += [replace(one, finish_reason=FinishReason.ABORTED) for one in request.starts()]
        self._early = [one for one in self._early if one.group_id not in group_ids]
        for decoded in self._queue.withdraw(self._loop.time(), group_ids):
            self._aborted.append(self._rollout(decoded, FinishReason.ABORTED))
        self._schedule()
        return 0.0, None

    def do_score(self, _: Sequence[np.ndarray]) -> tuple[float, Any]:
        return self._pause(self._queue.version, self._costs.probe_s * self._slowness), PROBE.logprobs

    def _submit(self, now_s: float, request: GenerationRequest) -> None:
        if self._decoding_since_s is None:
            self._decoding_since_s = now_s
        attempts, prefilled = list[Attempt](), len(request.prompt_token_ids_T)
        for partial, length in self._starts(request):
            left, earlier = length - partial.num_tokens, partial.num_tokens
            now = min(left, request.segment_tokens or left)
            self._begun[request.group_id, partial.index] = partial
            attempts.append(Attempt(request.group_id, partial.index, now, earlier, left - now))
            prefilled += earlier
        self._queue.submit(now_s, attempts, self._costs.prefill_token_s * self._slowness * prefilled)

    def _starts(self, request: GenerationRequest) -> Iterable[tuple[Rollout, int]]:
        """Yields the requested rollouts in their initial state, and their final number of tokens."""
        lengths = self._world.lengths.draw(request.group_id, request.group_size)
        return ((partial, lengths[partial.index]) for partial in request.starts())

    def _pause(self, version: int, pause_s: float) -> float:
        """Returns the seconds until a pause of `pause_s` in decoding is over."""
        start_s = self._loop.time()
        end_s = self._queue.adopt(start_s, version, pause_s)
        if self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, end_s - pause_s))
            self._decoding_since_s = end_s
        self._schedule()
        return end_s - start_s

    def _schedule(self) -> None:
        """Sets the timer to the next end of a rollout, or the next time when ended rollouts are returned."""
        if self._reply is None:
            return
        due_s = min(self._queue.next_finish_s, self._due_s() if self._ended_rollouts else math.inf)
        due_s = self._loop.time() if self._aborted else max(due_s, self._loop.time())
        if due_s < math.inf and (self._timer is None or due_s < self._timer_s):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due_s, self._wake)
            self._timer_s = due_s

    def _due_s(self) -> float:
        """Returns the time when ended rollouts are returned, as in a real generator."""
        is_all = not (self._queue.has_work or self._queue.finished)
        if is_all or (self._num_wanted and self._num_whole >= self._num_wanted and not self._needed):
            return -math.inf
        if not self._num_wanted or self._num_parked:
            return self._replied_s + REPLY_INTERVAL_S
        return self._replied_s + (GROUPS_INTERVAL_S if self._num_whole else LATEST_S)

    def _wake(self) -> None:
        began_s = time.thread_time()
        self._timer = None
        if self._reply is not None:
            self._hand_over(self._reply, self._loop.time())
        self._world.executors_cpu_s += time.thread_time() - began_s

    def _hand_over(self, reply: asyncio.Future[Collected], now_s: float) -> None:
        """Answers the waiting `collect` with ended rollouts, when they are due."""
        queue = self._queue
        queue.advance(now_s)
        while queue.finished and queue.finished[0].finished_s <= now_s:
            self._ended_rollouts.append(decoded := queue.finished.popleft())
            self._num_whole += decoded.is_last
            self._needed.difference_update([decoded.attempt.group_id] * decoded.is_last)
            self._num_parked += decoded.attempt.later_tokens > 0
        if not queue.has_work and not queue.finished and self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, now_s))
            self._decoding_since_s = None
        rollouts, self._aborted = self._aborted, []
        if self._ended_rollouts and now_s >= self._due_s():
            rollouts += [self._rollout(one, _finish_reason(one.attempt, self._world.lengths.limit_tokens))
                         for one in self._ended_rollouts]  # fmt: skip
            self._ended_rollouts, self._num_whole, self._num_parked = [], 0, 0
        if rollouts:
            self._reply, self._replied_s = None, now_s
            stats = GeneratorStats(queue.num_running, queue.num_waiting, queue.generated_tokens)
            reply.set_result(Collected(rollouts=rollouts, stats=stats))
        else:
            self._schedule()

    def _rollout(self, decoded: Decoded, reason: FinishReason) -> Rollout:
        attempt = decoded.attempt
        before = self._begun.pop((attempt.group_id, attempt.index))
        self._world.counts["resumed_rollouts"] += decoded.last_version > decoded.first_version
        columns = continued(before.columns, self._sampled(decoded, before)) if attempt.num_tokens else before.columns
        return replace(before, columns=columns, finish_reason=reason)

    def _sampled(self, decoded: Decoded, before: Rollout) -> Columns:
        """Returns the columns of its tokens. Only their number and the oldest version matter, so all share one
        array."""
        return dict.fromkeys(before.columns, repeated(decoded.first_version, decoded.attempt.num_tokens))

    def _current(self, now_s: float) -> tuple[str, float]:
        if now_s >= self._free_s and self._decoding_since_s is not None:
            return "work", self._decoding_since_s
        return super()._current(now_s)

    def _end(self, error: ExecutorError) -> None:
        super()._end(error)
        if self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, self._loop.time()))
            self._decoding_since_s = None
        self._reply = None


def _finish_reason(attempt: Attempt, limit_tokens: int) -> FinishReason:
    if attempt.later_tokens:
        return FinishReason.PARKED
    return FinishReason.LENGTH if attempt.earlier_tokens + attempt.num_tokens >= limit_tokens else FinishReason.STOP


class SimulatedTrainer(SimulatedHandle):
    """Steps take a constant time plus a time per token."""

    SPANS: ClassVar[dict[str, str]] = {"step": "train", "publish": "weight_sync", "save": "checkpoint"}

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name, world)
        self._groups = dict[int, tuple[int, int, int]]()
        """Rollouts, response tokens and computed tokens of each group that was sent in advance."""
        self.version = 0

    def do_add_groups(self, groups: Sequence[RolloutGroup]) -> tuple[float, Any]:
        skips = self._costs.skips_equal_rewards
        self._groups.update((group.group_id, _size(group, skips)) for group in groups)
        return 0.0, None

    def do_set_layout(self, *_: Any) -> tuple[float, Any]:
        return 0.0, None

    def do_publish(self, version: int, _: tuple[int, ...]) -> tuple[float, Any]:
        probe = PROBE if is_probed(self._world.config.weight_sync.probe_every_steps, version) else None
        return self._costs.publish_s, Published(version=version, addresses={"": NOWHERE}, probe=probe)

    def do_save(self, *_: Any) -> tuple[float, Any]:
        copied_s, written_s = self._costs.save_s(self._world.trainer_gpus)
        return copied_s, self._later(copied_s + written_s)

    def do_commit(self) -> tuple[float, Any]:
        return 0.0, ""

    def do_step(self, group_ids: Sequence[int], groups: Sequence[RolloutGroup]) -> tuple[float, Any]:
        self.do_add_groups(groups)
        sizes = [self._groups.pop(group_id) for group_id in group_ids]
        loss_tokens = sum(tokens for _, tokens, _ in sizes)
        tokens = sum(computed for _, _, computed in sizes)
        self.version += 1
        result = PolicyStepResult(
            policy_version=self.version,
            skipped=False,
            update=UpdateMetrics(num_loss_tokens=loss_tokens),
            advantages={group_id: np.zeros(size[0]) for group_id, size in zip(group_ids, sizes, strict=True)},
        )
        return self._costs.train_s(tokens, self._world.trainer_gpus), result


def _size(group: RolloutGroup, skips_equal_rewards: bool) -> tuple[int, int, int]:
    prompt: Prompt = group.prompt
    tokens = sum(rollout.num_tokens for rollout in group.rollouts)
    is_skipped = skips_equal_rewards and len({result.value for result in group.results}) == 1
    # The last token of a response predicts nothing, so it is not an input.
    return len(group.rollouts), tokens, 0 if is_skipped else len(prompt.token_ids_T) + tokens - len(group.rollouts)
