"""Simulated executors: handles that answer as the real ones do, after the time that the real ones would take.

They take calls in the order of their arrival and one at a time, as an `ExecutorHost` does; only `collect` waits aside.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, HostStatus, MeshFailed
from llamarl.executors.replies import REPLY_INTERVAL_S, Adoption, Collected, GeneratorStats, Probe, Published
from llamarl.forecast.costs import Costs
from llamarl.forecast.simulator.decoding import Attempt, Decoded, DecodeQueue
from llamarl.forecast.simulator.draws import ResponseLengths
from llamarl.forecast.simulator.records import repeated
from llamarl.observability.metrics import UpdateMetrics
from llamarl.observability.spans import Span
from llamarl.training.result import PolicyStepResult
from llamarl.types import FinishReason, GenerationRequest, Prompt, Rollout, RolloutGroup, continued
from llamarl.weight_sync.layout import Address

NOWHERE = Address(transport="simulated", publisher="", num_writers=0, places={})
NOTHING_T = np.zeros(1, np.float32)
PROBE = Probe(sequences=[NOTHING_T], logprobs=[NOTHING_T])


class Stopwatch:
    """What time passes for beside the work of executors."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Processor time inside simulated executors: in a real run it passes elsewhere, not in the controller."""
        self.messages = list[tuple[float, float]]()
        """When the controller sent or got something, and its processor seconds."""


class SimulatedHandle(ExecutorHandle):
    """One executor that only takes time."""

    SPANS: ClassVar[dict[str, str]] = {}
    """Span name of each method that is work."""

    def __init__(self, name: str, watch: Stopwatch, costs: Costs) -> None:
        self._loop = asyncio.get_running_loop()
        self._costs = costs
        self._watch = watch
        self.name = name
        self.pids = [0]
        self.failed: asyncio.Future[ExecutorError] = self._loop.create_future()
        self._ended: ExecutorError | None = None
        self.alive_s = (self._loop.time(), math.inf)
        """Virtual seconds of its birth and of its death."""
        self._free_s = 0.0
        """When the calls that were taken so far are done."""
        self._doing = "idle"
        self._doing_since_s = 0.0
        self._calls = set[asyncio.Future[None]]()
        self._spans = list[Span]()

    @property
    def is_alive(self) -> bool:
        return self._ended is None

    @abstractmethod
    def _answer(self, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        """Seconds that the call takes, and its result."""

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        if self._ended:
            raise self._ended
        self.num_calls += 1
        start_s = max(self._loop.time(), self._free_s)
        self._message()
        began_s = time.thread_time()
        duration_s, result = self._answer(method, args)
        self._watch.seconds += time.thread_time() - began_s
        await self._busy_until(start_s, start_s + duration_s, method, timeout_s)
        await self._under_way()
        return result

    def _message(self) -> None:
        """One to the executor or from it costs the controller time."""
        if self._costs.cores:
            self._watch.messages.append((self._loop.time(), self._costs.controller_call_s / 2))

    async def _under_way(self) -> None:
        """While a call and its answer are under way the executor may do other work."""
        self._message()
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
        return HostStatus(
            pid=0, doing=doing, doing_age_s=now_s - since_s, busy_s={}, queued_calls=0, spans=spans, rss_bytes=0
        )

    def _current(self, now_s: float) -> tuple[str, float]:
        """What it does, and since when."""
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

    def __init__(
        self,
        name: str,
        watch: Stopwatch,
        costs: Costs,
        lengths: ResponseLengths,
        max_running: int,
        slowness: float,
    ) -> None:
        super().__init__(name, watch, costs)
        self._lengths = lengths
        self._slowness = slowness
        self._queue = DecodeQueue(
            base_s=costs.decode_base_s * slowness,
            per_rollout_s=costs.decode_per_rollout_s * slowness,
            max_running=max_running,
        )
        self._begun = dict[tuple[int, int], Rollout]()
        """What unfinished rollouts began with, by group and index."""
        self._reply: asyncio.Future[Collected] | None = None
        self._reply_deadline_s = self._reply_timeout_s = 0.0
        self._replied_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._decoding_since_s: float | None = None
        self.num_resumed = 0
        """Rollouts that went on under newer weights than they began with."""

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
        reply = self._reply = self._loop.create_future()
        self._reply_timeout_s, self._reply_deadline_s = timeout_s, self._loop.time() + timeout_s
        self._schedule()
        self._message()
        collected = await reply
        await self._under_way()
        return collected

    def _answer(self, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        now_s = self._loop.time()
        match method:
            case "weight_specs":
                return 0.0, ()
            case "submit":
                for request in args[0]:
                    self._submit(now_s, request)
                self._schedule()
                return 0.0, None
            case "adopt":
                return self._pause(now_s, args[0], self._costs.adopt_s)
            case "score":
                return self._pause(now_s, self._queue.version, self._costs.probe_s)[0], PROBE.logprobs
        raise AssertionError(f"{self.name} has no method {method}")

    def _submit(self, now_s: float, request: GenerationRequest) -> None:
        if self._decoding_since_s is None:
            self._decoding_since_s = max(now_s, self._free_s)
        lengths = self._lengths.draw(request.group_id, request.group_size)
        attempts, prefilled = list[Attempt](), len(request.prompt_token_ids_T)
        for partial in request.starts():
            left, earlier = lengths[partial.index] - partial.num_tokens, partial.num_tokens
            now = min(left, request.segment_tokens or left)
            self._begun[request.group_id, partial.index] = partial
            attempts.append(Attempt(request.group_id, partial.index, now, earlier, left - now))
            prefilled += earlier
        self._queue.submit(now_s, attempts, self._costs.prefill_token_s * self._slowness * prefilled)

    def _pause(self, now_s: float, version: int, seconds: float) -> tuple[float, Adoption]:
        pause_s = seconds * self._slowness
        end_s = self._queue.adopt(max(now_s, self._free_s), version, pause_s)
        if self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, end_s - pause_s))
            self._decoding_since_s = end_s
        self._schedule()
        return end_s - max(now_s, self._free_s), Adoption(version=version, stall_s=pause_s)

    def _schedule(self) -> None:
        """Sets the timer to the next moment at which something can be handed over, or at which the reply is overdue."""
        if self._reply is None:
            return
        now_s, due_s = self._loop.time(), self._queue.next_finish_s
        if due_s <= now_s < self._replied_s + REPLY_INTERVAL_S:  # others may end, and the last one hands over at once
            due_s = min(self._replied_s + REPLY_INTERVAL_S, self._queue.next_end_s)
        due_s = max(min(due_s, self._reply_deadline_s), now_s)
        if self._timer is None or due_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due_s, self._wake)
            self._timer_s = due_s

    def _wake(self) -> None:
        began_s = time.thread_time()
        self._timer = None
        if self._reply is not None:
            self._hand_over(self._reply, self._loop.time())
        self._watch.seconds += time.thread_time() - began_s

    def _hand_over(self, reply: asyncio.Future[Collected], now_s: float) -> None:
        """Answers the waiting `collect` with what has finished."""
        self._queue.advance(now_s)
        finished = self._queue.finished
        rollouts = list[Rollout]()
        is_due = now_s >= self._replied_s + REPLY_INTERVAL_S or not self._queue.has_work
        while is_due and finished and finished[0].finished_s <= now_s:
            rollouts.append(self._rollout(finished.popleft()))
        if not self._queue.has_work and not finished and self._decoding_since_s is not None:
            self._spans.append(Span("generate", self._decoding_since_s, now_s))
            self._decoding_since_s = None
        if rollouts:
            self._reply, self._replied_s = None, now_s
            reply.set_result(
                Collected(
                    rollouts=rollouts,
                    stats=GeneratorStats(
                        num_running=self._queue.num_running,
                        num_waiting=self._queue.num_waiting,
                        generated_tokens=self._queue.generated_tokens,
                    ),
                )
            )
        elif now_s >= self._reply_deadline_s:
            self._reply = None
            reply.set_exception(CallTimeout(self.name, "collect", self._reply_timeout_s, "is in work"))
        else:
            self._schedule()

    def _rollout(self, decoded: Decoded) -> Rollout:
        attempt = decoded.attempt
        before = self._begun.pop((attempt.group_id, attempt.index))
        self.num_resumed += decoded.last_version > decoded.first_version
        # Of the tokens only their number and the oldest version matter to the controller: one array stands for all.
        versions_T = repeated(decoded.first_version, attempt.num_tokens)
        return Rollout(
            group_id=attempt.group_id,
            index=attempt.index,
            columns=continued(before.columns, dict.fromkeys(before.columns, versions_T)),
            finish_reason=_finish_reason(attempt, self._lengths.limit_tokens),
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

    def __init__(self, name: str, watch: Stopwatch, costs: Costs, num_gpus: int, probe_every_steps: int) -> None:
        super().__init__(name, watch, costs)
        self._num_gpus = num_gpus
        self._probe_every_steps = probe_every_steps
        self._groups = dict[int, tuple[int, int, int]]()
        """Rollouts, response tokens and computed tokens of each group that was sent ahead."""
        self._version = 0

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        result = await super().call(method, *args, timeout_s=timeout_s, **kwargs)
        if method == "save":  # copied; the answer comes when it is written
            await asyncio.sleep(self._costs.save_s(self._num_gpus)[1])
        return result

    def _answer(self, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        match method:
            case "add_groups":
                for group in args[0]:
                    self._groups[group.group_id] = _size(group, self._costs.skips_equal_rewards)
                return 0.0, None
            case "step":
                return self._step(args[0])
            case "set_layout":
                return 0.0, None
            case "publish":
                probe = PROBE if self._probe_every_steps and args[0] % self._probe_every_steps == 0 else None
                return self._costs.publish_s, Published(version=args[0], address=NOWHERE, probe=probe)
            case "save":
                return self._costs.save_s(self._num_gpus)[0], None
            case "commit":
                return 0.0, ""
        raise AssertionError(f"{self.name} has no method {method}")

    def _step(self, group_ids: Sequence[int]) -> tuple[float, PolicyStepResult]:
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
        return self._costs.train_s(tokens, self._num_gpus), result


def _size(group: RolloutGroup, skips_equal_rewards: bool) -> tuple[int, int, int]:
    prompt: Prompt = group.prompt
    tokens = sum(rollout.num_tokens for rollout in group.rollouts)
    is_skipped = skips_equal_rewards and len({result.value for result in group.results}) == 1
    # The last token of a response predicts nothing, so it is no input.
    return len(group.rollouts), tokens, 0 if is_skipped else len(prompt.token_ids_T) + tokens - len(group.rollouts)
