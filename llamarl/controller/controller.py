"""The loops of an asynchronous run.

::

    prompts -> [admission: at most (S+1)*P groups active] -> generators -> reward -> ready window -> trainer
                   ^                                             ^                                      |
                   +----- slots freed when generators adopt -----+----------- weight sync <-- publish --+

Every loop's docstring says what it consumes, waits for, produces, and what unblocks it. With S = 0 all slots are taken
until the generators have adopted the weights trained on them, so generation and training take turns: the synchronous
mode is this same code.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llamarl.channels.channel import Channel
from llamarl.cluster.api import ExecutorHandle, RemoteError, chunks
from llamarl.config import RunConfig
from llamarl.controller.evaluation import EvalResult
from llamarl.controller.generators import Generators
from llamarl.controller.pipeline import Pipeline
from llamarl.controller.recovery import Recovery, SpawnGenerator
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.telemetry import StepMark, Telemetry
from llamarl.data.sampler import PromptSampler
from llamarl.rollouts.buffer import RolloutBuffer
from llamarl.rollouts.pieces import pieces
from llamarl.training.result import StepResult
from llamarl.types import GenerationRequest, Outcome, Prompt, Rollout, RolloutGroup, SamplingParams
from llamarl.weight_sync.layout import SegmentAddress, TensorSpec


class StalenessViolated(AssertionError):
    """A group was older than the proved bound when it was consumed: a bug in the controller."""


class TooManyInvalid(RuntimeError):
    """Most rewards of a step could not be computed: the grader is broken, not the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executors:
    """Handles of a run's executors."""

    generators: Sequence[ExecutorHandle]
    reward: ExecutorHandle
    trainer: ExecutorHandle
    spawn_generator: SpawnGenerator | None = None
    """Replaces a dead generator; needed for `cluster.on_generator_failure = "respawn"`."""

    def __iter__(self) -> Iterator[ExecutorHandle]:
        return iter((*self.generators, self.reward, self.trainer))


@dataclass(frozen=True, kw_only=True, slots=True)
class Problems:
    """What a run trains and is evaluated on, and the tokens that end a response."""

    train: Sequence[Prompt]
    eval: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    """A completed optimizer step that is not reported yet."""

    groups: list[RolloutGroup]
    result: StepResult
    sync: asyncio.Task[float] | None
    """Seconds from publish to the last adoption; None when the run was interrupted before."""
    mark: StepMark


class Controller:
    """Orders generators, reward and trainer; holds groups and versions, never a tensor."""

    def __init__(
        self,
        config: RunConfig,
        problems: Problems,
        executors: Executors,
        supervisor: Supervisor,
        telemetry: Telemetry,
        state: dict[str, Any] | None = None,
    ) -> None:
        rollout, timeout_s = config.rollout, config.cluster.call_timeout_s
        self._config = config
        self._problems = problems
        self._trainer = executors.trainer
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._sampling = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=problems.stop_token_ids,
            seed=config.seed,
        )
        self._sampler = PromptSampler(len(problems.train), config.seed)
        self._readmit = list[int]()
        """Prompts that were in flight when the resumed checkpoint was written."""
        self.version = 0
        if state:
            self.version = state["step"]
            self._sampler.restore(state["sampler"])
            self._readmit += state["unconsumed_prompts"]
        first_group_id = state["next_group_id"] if state else 0
        self.buffer = RolloutBuffer(rollout.prompts_per_step, rollout.max_staleness, rollout.window, first_group_id)
        self._prompt_of = dict[int, int]()
        """Prompt index of each unconsumed group."""
        self._under_way: tuple[list[RolloutGroup], asyncio.Future[StepResult]] | None = None
        """The step that the trainer takes right now."""
        self._unreported: _Finished | None = None
        self._changed = asyncio.Condition()
        """Notified when the buffer changes."""
        self._watch = StallWatch(config.cluster.stall_timeout_s, self._who_waits)
        collected = Channel[Rollout]("collected rollouts", capacity=4 * self.buffer.capacity * rollout.group_size)
        policy = config.cluster.on_generator_failure
        self.generators = Generators(executors.generators, collected, timeout_s, survives_deaths=policy != "stop")
        self._pipeline = Pipeline(self.generators, collected, executors.reward, self._watch, timeout_s)
        self.recovery = Recovery(
            policy, self.generators, supervisor, telemetry, self.add_generator, executors.spawn_generator
        )
        self._specs: tuple[TensorSpec, ...] = ()
        self._syncing = asyncio.Lock()
        """Held while weights are adopted."""
        self._published: tuple[int, SegmentAddress] | None = None

    async def start(self) -> None:
        """Brings the generators to the trainer's version and starts the background loops."""
        for replica in self.generators.replicas:
            self.recovery.watch(replica)
        self._specs = await self.generators.weight_specs()
        await self._sync_weights(self.version)
        self._pipeline.start(self._supervisor, self._deliver)
        self._supervisor.start(self._watch.loop(), "stall watch")

    async def add_generator(self, handle: ExecutorHandle) -> None:
        """Brings a new generator to the weights that the others have, and into service."""
        async with self._syncing:  # no group may be admitted for weights that it does not have yet
            assert self._published is not None, "the generators have no weights yet"
            replica = await self.generators.join(handle, *self._published)
        self.recovery.watch(replica)
        self._pipeline.collect_from(replica, self._supervisor)
        self._telemetry.joined(handle)

    async def train(self) -> None:
        """The train loop: runs to `config.steps`.

        Consumes P scored groups; waits until the window holds them; produces a policy version, which a task of its own
        syncs to the generators while the next step may begin; unblocked by `_deliver`.
        """
        admission = self._supervisor.start(self._admission_loop(), "admission")
        evaluations = list[asyncio.Task[EvalResult]]()
        while self.version < self._config.steps:
            groups = await self._next_batch()
            ids = [group.group_id for group in groups]
            step = self._supervisor.start(self._call_trainer("step", ids), f"step {self.version + 1}")
            step.add_done_callback(_retrieve)
            self._under_way = groups, step
            await self._report()  # bookkeeping of the last step, while the trainer works on this one
            await asyncio.shield(step)  # an interrupted run still wants its result
            self._step_ended(sync=True)
            saves = self._is_due(self._config.checkpoint.every_steps)
            evaluates = bool(self._problems.eval) and self._is_due(self._config.eval.every_steps)
            if saves or evaluates:
                await self._report()  # a step that is saved is on record, and one that is evaluated has been adopted
            if saves:
                await self._save_and_go_on()
            if evaluates:
                evaluations.append(self._supervisor.start(self.evaluate(), f"evaluation at step {self.version}"))
        await self._report()
        await asyncio.gather(admission, *evaluations)

    def _step_ended(self, *, sync: bool) -> None:
        """The trainer has completed the step under way; with `sync`, its weights go to the generators."""
        assert self._under_way is not None
        groups, step = self._under_way
        self._under_way = None
        self.version = step.result().policy_version
        self._watch.progress()
        mark, task = self._telemetry.mark(), None
        if sync:
            task = self._supervisor.start(self._sync_and_release(len(groups)), f"sync version {self.version}")
        self._unreported = _Finished(groups=groups, result=step.result(), sync=task, mark=mark)

    async def wind_down(self) -> None:
        """After an interruption: ends and reports the step under way, without syncing it, and saves a checkpoint."""
        await self._report()
        if self._under_way is not None:
            await self._under_way[1]
            self._step_ended(sync=False)
            await self._report()
        await self.save()

    async def _admission_loop(self) -> None:
        """Consumes free slots and prompts; waits for slots; produces requests to generators; unblocked by releases."""
        remaining = (self._config.steps - self.version) * self._config.rollout.prompts_per_step
        while remaining:
            async with self._changed:
                await self._changed.wait_for(lambda: self.buffer.num_free > 0)
                ids = self.buffer.admit(min(self.buffer.num_free, remaining))
            remaining -= len(ids)
            await self._pipeline.submit([self._request(group_id) for group_id in ids])

    def _request(self, group_id: int) -> tuple[GenerationRequest, Prompt]:
        self._prompt_of[group_id] = index = self._readmit.pop(0) if self._readmit else self._sampler.next()
        prompt = self._problems.train[index]
        request = GenerationRequest(
            group_id=group_id,
            prompt_token_ids_T=prompt.token_ids_T,
            group_size=self._config.rollout.group_size,
            sampling=self._sampling,
        )
        return request, prompt

    async def _deliver(self, groups: Sequence[RolloutGroup]) -> None:
        """Scored groups go to the trainer ahead of the step, which then only needs their names, and into the window.

        Nobody waits for the trainer to take them, as it may be busy with a step; calls reach it in order.
        """
        for part in chunks(piece for group in groups for piece in pieces(group)):
            self._supervisor.start(self._call_trainer("add_groups", part), "add groups")
        async with self._changed:
            for group in groups:
                self.buffer.put(group)
            self._changed.notify_all()
        self._telemetry.groups_ready(self.buffer.num_ready)

    async def _next_batch(self) -> list[RolloutGroup]:
        async with self._changed:
            while (groups := self.buffer.take()) is None:
                await self._changed.wait()
        for group in groups:
            del self._prompt_of[group.group_id]
            staleness = self.version - group.oldest_version
            if group.oldest_version >= 0 and staleness > self.buffer.staleness_limit:
                raise StalenessViolated(
                    f"group {group.group_id} is {staleness} steps old, the bound is {self.buffer.staleness_limit}"
                )
        self._check_invalid(groups)
        return groups

    def _check_invalid(self, groups: Sequence[RolloutGroup]) -> None:
        results = [result for group in groups for result in group.results]
        reasons = [result.reason for result in results if result.outcome is Outcome.INVALID]
        limit = self._config.reward.max_invalid_share
        if len(reasons) > limit * len(results):
            raise TooManyInvalid(
                f"{len(reasons)} of {len(results)} rewards of step {self.version + 1} are invalid "
                f"(reward.max_invalid_share = {limit:g}); the first says: {reasons[0]}"
            )

    async def _sync_and_release(self, num_groups: int) -> float:
        """Brings the new version to the generators, then frees the slots of the groups that it was trained on."""
        seconds = await self._sync_weights(self.version)
        async with self._changed:
            self.buffer.release(num_groups)
            self._changed.notify_all()
        return seconds

    async def _sync_weights(self, version: int) -> float:
        """Seconds from publish to the last adoption."""
        clock = asyncio.get_running_loop()
        start_s = clock.time()
        # Before the lock: the next step may begin while a new generator joins, and would change the weights.
        address = await self._call_trainer("publish", version, self._specs)
        async with self._syncing:
            stall_s = await self.generators.adopt(version, address)
            self._published = version, address
        self._telemetry.adopted(stall_s)
        self._watch.progress()
        return clock.time() - start_s

    async def _report(self) -> None:
        """Records the last completed step, once its weights have arrived."""
        if self._unreported is not None:
            finished = self._unreported
            sync_s = await finished.sync if finished.sync and not finished.sync.cancelled() else math.nan
            self._unreported = None
            self._telemetry.step(finished.groups, finished.result, finished.mark, sync_s, self.buffer.num_ready)

    async def evaluate(self) -> EvalResult:
        """Answers the held-out prompts with the generators' current weights; training goes on meanwhile."""
        result = await self._pipeline.evaluate(
            self._config.eval, self._sampling, self._problems.eval, self.version, self._telemetry.eval_progress
        )
        self._telemetry.evaluated(result)
        return result

    async def save(self) -> str:
        """Saves trainer and data position together: after a resume nothing is trained twice or skipped."""
        state = {
            "step": self.version,
            "sampler": self._sampler.state(),
            "next_group_id": self.buffer.next_group_id,
            "unconsumed_prompts": [self._prompt_of[group_id] for group_id in self.buffer.unconsumed] + self._readmit,
        }
        return await self._call_trainer("save", state)

    async def _save_and_go_on(self) -> None:
        """A periodic checkpoint that the disk refuses costs a warning, not the run; the last good one stands."""
        try:
            await self.save()
        except RemoteError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self._telemetry.warn(f"no checkpoint at step {self.version}: {error.__cause__}; the run goes on")

    async def _call_trainer(self, method: str, *args: Any) -> Any:
        return await self._trainer.call(method, *args, timeout_s=self._config.cluster.call_timeout_s)

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.version % every_steps == 0 and self.version < self._config.steps

    async def _who_waits(self) -> str:
        """What everybody is doing, for the stall report."""
        buffer = self.buffer
        facts = [
            f"step {self.version + 1} takes {buffer.prompts_per_step} groups (window {buffer.window}, oldest first)",
            f"{buffer.num_ready} are ready",
            f"{self._pipeline.describe_pending()}, {buffer.num_free} slots are free",
        ]
        return "; ".join([*facts, *self.generators.debts(), *(await self._telemetry.describe_executors())])


def _retrieve(step: asyncio.Future[StepResult]) -> None:
    # When the run fails first, nobody asks for this step's error any more.
    if not step.cancelled():
        step.exception()
