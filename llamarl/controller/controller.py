"""The loops of an asynchronous run.

::

    prompts -> [admission: at most (S+1)*P groups active] -> generators -> reward -> ready window -> trainer
                   ^                                           ^    |    (reward model,         |       |
                   |                                           +----+  reference, critic <------+)      |
                   |                                     parked rollouts go on   learns the same steps  |
                   +----- slots freed when generators adopt ----------------- weight sync <-- publish --+

Every loop's docstring says what it consumes, waits for, produces, and what unblocks it. With S = 0 all slots are taken
until the generators have adopted the weights trained on them, so generation and training take turns: the synchronous
mode is this same code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llamarl.algorithms.advantages._base import Advantage
from llamarl.channels.channel import Channel
from llamarl.cluster.api import ExecutorError, ExecutorHandle, RemoteError, chunks
from llamarl.config import RunConfig, build
from llamarl.controller.admission import Admission
from llamarl.controller.evaluation import EvalResult
from llamarl.controller.generators import Generators
from llamarl.controller.pipeline import Pipeline
from llamarl.controller.recovery import Recovery, SpawnGenerator
from llamarl.controller.steps import Steps
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.sync import WeightSync
from llamarl.controller.sync_report import SyncReport
from llamarl.controller.telemetry import Telemetry
from llamarl.rollouts.pieces import pieces
from llamarl.types import Outcome, Prompt, Rollout, RolloutGroup


class NotSaved(RuntimeError):
    """The disk refuses a checkpoint; the last good one stands."""


class TooManyInvalid(RuntimeError):
    """Most rewards of a step could not be computed: the grader is broken, not the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executors:
    """Handles of a run's executors."""

    generators: Sequence[ExecutorHandle]
    reward: ExecutorHandle
    trainer: ExecutorHandle
    models: Mapping[str, ExecutorHandle] = field(default_factory=dict)
    """`reward-model`, `reference` and `critic`, those that the config asks for."""
    spawn_generator: SpawnGenerator | None = None
    """Replaces a dead generator; needed for `cluster.on_generator_failure = "respawn"`."""

    def __iter__(self) -> Iterator[ExecutorHandle]:
        return iter((*self.generators, *self.irreplaceable))

    @property
    def irreplaceable(self) -> Sequence[ExecutorHandle]:
        """Those whose death ends the run."""
        return (self.reward, *self.models.values(), self.trainer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problems:
    """What a run trains and is evaluated on, and the tokens that end a response."""

    train: Sequence[Prompt]
    eval: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]


class Controller:
    """Runs the admission and the train loop over the parts that do the work; never touches a tensor."""

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
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._call_trainer = partial(executors.trainer.call, timeout_s=timeout_s)
        self._admission = Admission(config, problems.train, problems.stop_token_ids, state)
        self._buffer = self._admission.buffer
        self._changed = asyncio.Condition()
        """Notified when the buffer changes."""
        self._told_of_flat_groups = False
        self._watch = StallWatch(config.cluster.stall_timeout_s, self._who_waits)
        collected = Channel[Rollout]("collected rollouts", capacity=4 * self._buffer.capacity * rollout.group_size)
        policy = config.cluster.on_generator_failure
        self.generators = Generators(
            executors.generators,
            collected,
            supervisor,
            timeout_s,
            segment_tokens=rollout.segment_tokens,
            survives_deaths=policy != "stop",
            progress=self._watch.progress,
        )
        advantage: Advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
        model = config.reward.model
        self._pipeline = Pipeline(
            self.generators,
            collected,
            executors.reward,
            self._watch,
            timeout_s,
            models=executors.models,
            model_weight=model.weight if model else 0.0,
            needs_greedy=advantage.NEEDS_GREEDY,
        )
        critic = executors.models.get("critic")
        self._call_critic = partial(critic.call, timeout_s=timeout_s) if critic else None
        version = state["step"] if state else 0
        self._steps = Steps(version, self._call_trainer, self._call_critic, supervisor, telemetry)
        self._saving: asyncio.Task[None] | None = None
        """A periodic checkpoint, beside the next steps; the trainer copies its weights before it begins with them."""
        self._sync = WeightSync(
            config.weight_sync, self.generators, self._call_trainer, supervisor, telemetry, self._steps.has_weights,
            is_inline=config.cluster.kind == "inline",
        )  # fmt: skip
        self.recovery = Recovery(
            policy, self.generators, supervisor, telemetry, self.add_generator, executors.spawn_generator
        )

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self._steps.version

    async def start(self) -> None:
        """Brings the generators to the trainer's version and starts the background loops."""
        for replica in self.generators.replicas:
            self.recovery.watch(replica)
        await self._sync.start(self.version, self._config.cluster.call_timeout_s)
        self._watch.progress()
        self._pipeline.start(self._supervisor, self._deliver)
        self._supervisor.start(self._watch.loop(), "stall watch")
        self._supervisor.start(self.recovery.silence_loop(), "silence watch")

    async def add_generator(self, handle: ExecutorHandle) -> None:
        """Brings a new generator to the newest weights, and into service. Raises MeshFailed when it dies before."""
        self._telemetry.joined(handle)
        try:
            replica = await self._sync.bring(handle)
        except ExecutorError:
            self._telemetry.left(handle)
            raise
        self.recovery.watch(replica)
        self._sync.follow(replica)
        self.generators.collect_from(replica)

    async def remove_generator(self, name: str) -> None:
        """Stops a generator; the others go on with its unfinished rollouts.

        Raises:
            ValueError: no generator that is up has this name, or it is the only one.
            ExecutorError: it does not give its rollouts back, or fails while it stops.
        """
        staying = [one for one in self.generators.replicas if one.follower is not None and not one.is_leaving]
        replica = next((one for one in staying if one.handle.name == name), None)
        if replica is None or len(staying) == 1:
            reason = "unknown" if replica is None else "the only generator"
            raise ValueError(f"{name} cannot be removed: it is {reason}")
        await self.generators.drain(replica)
        if not replica.is_gone:
            self.generators.lose(replica)
            self._telemetry.left(replica.handle)
            await replica.handle.stop(self._config.cluster.shutdown_timeout_s)

    async def train(self) -> None:
        """The train loop: runs to `config.steps`.

        Consumes P scored groups; waits until the window holds them; produces a policy version, which a task of its own
        syncs to the generators while the next step may begin; unblocked by `_deliver`.
        """
        admission = self._supervisor.start(self._admission_loop(), "admission")
        evaluations = list[asyncio.Task[EvalResult]]()
        while self.version < self._config.steps:
            self._steps.begin(await self._next_batch())
            await self._report()  # bookkeeping of the last step, while the trainer works on this one
            await self._steps.end(self._sync_and_release)
            self._watch.progress()
            saves = self._is_due(self._config.checkpoint.every_steps)
            evaluates = bool(self._problems.eval) and self._is_due(self._config.eval.every_steps)
            if saves or evaluates:
                await self._report()  # a step that is saved is on record, and one that is evaluated has been adopted
            if saves:
                await self._saved()
                saving = self._save_and_go_on(self.version, self._copies())
                self._saving = self._supervisor.start(saving, f"checkpoint of step {self.version}")
            if evaluates:
                evaluations.append(self._supervisor.start(self.evaluate(), f"evaluation at step {self.version}"))
        await self._report()
        await asyncio.gather(admission, *evaluations)

    async def wind_down(self) -> None:
        """After an interruption: ends and reports the step under way, without syncing it, and saves a checkpoint."""
        await self._report()
        if self._steps.is_under_way:
            await self._steps.end(sync=None)
            await self._report()
        await self.save()

    async def _admission_loop(self) -> None:
        """Consumes free slots and prompts; waits for slots; produces requests to generators; unblocked by releases, and
        by groups that are dropped."""
        while self._admission.num_left:
            async with self._changed:
                await self._changed.wait_for(lambda: self._admission.num_admissible or not self._admission.num_left)
                requests = self._admission.admit()
            if requests:  # none when the last step has what it needs
                await self._pipeline.submit(requests)

    async def _deliver(self, groups: Sequence[RolloutGroup]) -> None:
        """Scored groups go to trainer and critic ahead of the step, which then only needs their names, and into the
        window.

        Nobody waits for the trainer to take them, as it may be busy with a step; calls reach it in order.
        """
        async with self._changed:
            ready, num_dropped = self._admission.put(groups)
            for part in chunks(piece for group in ready for piece in pieces(group)):
                self._supervisor.start(self._call_trainer("add_groups", part), "add groups")
                if self._call_critic:
                    self._supervisor.start(self._call_critic("add_groups", part), "add groups to the critic")
            self._changed.notify_all()
        self._telemetry.groups_ready(self._buffer.num_ready, num_dropped)

    async def _next_batch(self) -> list[RolloutGroup]:
        async with self._changed:
            while (groups := self._buffer.take()) is None:
                await self._changed.wait()
            self._admission.consumed(groups, self.version)
            self._changed.notify_all()
        self._check_invalid(groups)
        self._tell_of_flat_groups(groups)
        return groups

    def _tell_of_flat_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Once: `rollout.max_attempts` did not fill a step, which takes what is there."""
        attempts = self._config.rollout.max_attempts
        if attempts == 1 or self._told_of_flat_groups or not (count := sum(map(self._admission.is_flat, groups))):
            return
        self._told_of_flat_groups = True
        self._telemetry.warn(
            f"step {self.version + 1} takes {count} groups whose rewards are all equal, as {attempts} attempts found "
            "no others (rollout.max_attempts); problems of another difficulty, or a larger group_size, teach more"
        )

    def _check_invalid(self, groups: Sequence[RolloutGroup]) -> None:
        results = [result for group in groups for result in group.results]
        reasons = [result.reason for result in results if result.outcome is Outcome.INVALID]
        limit = self._config.reward.max_invalid_share
        if len(reasons) > limit * len(results):
            raise TooManyInvalid(
                f"{len(reasons)} of {len(results)} rewards of step {self.version + 1} are invalid "
                f"(reward.max_invalid_share = {limit:g}); the first says: {reasons[0]}"
            )

    async def _sync_and_release(self, version: int, num_groups: int) -> SyncReport:
        """Brings a new version to the generators, then frees the slots of the groups that it was trained on."""
        report = await self._sync.sync(version)
        self._watch.progress()
        async with self._changed:
            self._buffer.release(num_groups)
            self._changed.notify_all()
        return report

    async def _report(self) -> None:
        await self._steps.report(lambda: self._buffer.num_ready)

    async def evaluate(self) -> EvalResult:
        """Answers the held-out prompts with the generators' current weights; training goes on meanwhile."""
        result = await self._pipeline.evaluate(
            self._config.eval,
            self._admission.sampling,
            self._problems.eval,
            self.version,
            self._telemetry.eval_progress,
        )
        self._telemetry.evaluated(result)
        return result

    async def save(self) -> None:
        """Saves trainer and data position together: after a resume nothing is trained twice or skipped.

        Rollouts in flight, partial ones included, start again from their prompts.

        Raises:
            NotSaved: the disk refuses.
        """
        await self._saved()
        await self._save(self.version, self._copies())

    def _copies(self) -> Sequence[asyncio.Future[Any]]:
        """Trainer and critic copy their weights before whatever they are asked for next, and write beside that."""
        calls = [self._call_trainer("save", self._state())]
        if self._call_critic:
            calls.append(self._call_critic("save", self.version))
        return [asyncio.ensure_future(call) for call in calls]

    def _state(self) -> dict[str, Any]:
        return {"step": self.version} | self._admission.state()

    async def _save(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        """The critic comes first: where there is a trainer's checkpoint, there is the critic's of the same step."""
        try:
            await asyncio.gather(*copies)
            if self._call_critic:
                await self._call_critic("commit")
            await self._call_trainer("commit")
        except RemoteError as error:
            if isinstance(error.__cause__, OSError):
                raise NotSaved(f"no checkpoint at step {step}: {error.__cause__}; make room on the disk") from None
            raise

    async def _save_and_go_on(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        """A periodic checkpoint that the disk refuses costs a warning, not the run; the last good one stands."""
        try:
            await self._save(step, copies)
        except NotSaved as error:
            self._telemetry.warn(f"{error}, the run goes on")

    async def _saved(self) -> None:
        """Waits for the checkpoint that is being written; its error is the supervisor's."""
        if self._saving is not None:
            await asyncio.wait({self._saving})

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.version % every_steps == 0 and self.version < self._config.steps

    async def _who_waits(self) -> str:
        """What everybody is doing, for the stall report."""
        buffer = self._buffer
        facts = [
            f"step {self.version + 1} takes {buffer.prompts_per_step} groups (window {buffer.window}, oldest first)",
            f"{buffer.num_ready} are ready",
            f"{self._pipeline.describe_pending()}, {buffer.num_free} slots are free",
        ]
        return "; ".join([*facts, *self.generators.debts(), *(await self._telemetry.describe_executors())])
