"""Loop 4 of a run: optimizer steps, each from its batch to its row in the metrics.

`TrainLoop` takes steps, and starts the sync of each version. `TrainedExecutors` are the trainer and the critic, with
their checkpoints (`Checkpoints`) and their restarts: new processes train again on the steps since their checkpoint.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl.cluster.api import ExecutorError, ExecutorHandle, RemoteError, port
from llamarl.config import RunConfig
from llamarl.controller.admission import Admission
from llamarl.controller.causes import by_cause
from llamarl.controller.evaluation import EvalResult, Evaluations
from llamarl.controller.ports import CriticPort, Executors, TrainerPort, group_bytes, split_groups
from llamarl.controller.progress import SyncReport
from llamarl.controller.restart import RestartableHandle, Restarted
from llamarl.controller.services import Services
from llamarl.controller.telemetry import StepMark
from llamarl.controller.weights import WeightSync
from llamarl.executors.replies import ControllerState
from llamarl.journal.writer import to_disk
from llamarl.observability.files import remedy
from llamarl.training.probe import CauseProbe
from llamarl.training.result import PolicyStepResult, StepResult
from llamarl.types import RolloutGroup

PATIENCE_S = 5.0
"""Longest wait of a step, once per run, for a checkpoint that is still being written when another is due."""
AHEAD_BYTES = 4 << 20
"""Size of groups from which on they are sent ahead of their step, which would otherwise wait for them."""
WEIGHTS_S = 1.0
"""Longest wait for a sync that is under way when the run ends, and for a generator's log-probabilities once the next
version is released."""


class NotSaved(RuntimeError):
    """The disk refuses a checkpoint. The previous one is intact."""


class StepsLost(ExecutorError):
    """Steps since the newest checkpoint cannot be trained again."""

    def __init__(self, executor: str, text: str) -> None:
        super().__init__(executor, text)
        self.executor, self.text = executor, text

    def __str__(self) -> str:
        return self.text


@dataclass(kw_only=True, slots=True)
class OptimizerStep:
    """An optimizer step: under way, then completed, then recorded. At most one is under way."""

    groups: list[RolloutGroup]
    result: asyncio.Task[PolicyStepResult]
    critic: asyncio.Task[StepResult] | None
    """The critic's step; None means that there is no critic."""
    causes: tuple[CauseProbe, asyncio.Task[tuple[np.ndarray, float] | None]] | None = None
    """Sequences that show causes of the importance ratio, and a generator's scores of them."""
    sync: asyncio.Task[SyncReport] | None = None
    """None while the step is under way, and if the run ends before the sync."""
    mark: StepMark | None = None
    """None while the step is under way."""

    async def critic_result(self) -> StepResult | None:
        """Waits for the critic's step. Returns None if there is no critic."""
        return await asyncio.shield(self.critic) if self.critic else None

    async def end_sync(self) -> None:
        """Ends the sync after a short wait: at the end of a run, generators may be dead."""
        if self.sync:
            await asyncio.wait({self.sync}, timeout=WEIGHTS_S)
            self.sync.cancel()
            await asyncio.wait({self.sync})


class TrainLoop:
    """Takes optimizer steps, and brings the weights of each to the generators while the next one runs.

    Example::

        training = TrainLoop(config, admission, trained, weights, evaluations, services)
        await training.run()    # to config.steps
        await training.save()   # the last checkpoint
    """

    def __init__(
        self,
        config: RunConfig,
        admission: Admission,
        trained: TrainedExecutors,
        weights: WeightSync,
        evaluations: Evaluations,
        services: Services,
    ) -> None:
        self._config, self._admission, self._trained = config, admission, trained
        self._weights, self._evaluations = weights, evaluations
        self._supervisor, self._telemetry, self._watch = services.supervisor, services.telemetry, services.watch
        self._journal, self._progress = services.journal, services.progress
        self._under_way: OptimizerStep | None = None
        self._unrecorded = deque[OptimizerStep]()
        """Completed steps that are not recorded, the oldest first."""

    @property
    def version(self) -> int:
        """Completed optimizer steps."""
        return self._progress.trained

    async def run(self) -> None:
        """Runs to `config.steps`.

        Consumes P scored groups; waits until the window holds them; produces a policy version, which a separate task
        syncs to the generators while the next step may begin; unblocked by `deliver`.
        """
        evaluations = list[Awaitable[Sequence[EvalResult]]]()
        while self.version < self._config.steps:
            groups = await self._next_batch()
            causes = self._score_causes(groups)
            if self._config.generators_sleep:
                # Evaluations and scores need the generators, whose memory the trainer is about to use.
                await asyncio.gather(*evaluations, *([causes[1]] if causes else []))
                await self._weights.sleep()

            # The step begins without a wait after the groups are marked: an interrupted run saves a consistent state.
            self._admission.mark_consumed(groups, self.version)
            self._under_way = self._trained.begin(self.version + 1, groups)
            self._under_way.causes = causes
            await self._record_completed(during=self._under_way)  # while the trainer works
            await self._end_step(syncs=True)

            should_save = await self._trained.should_save(self._is_due(self._config.checkpoint.every_steps))
            due_sets = self._evaluations.due(self.version, self._config.steps)
            if should_save or due_sets:
                await self._record_completed()  # a saved step is on record, and an evaluated one is adopted
            if should_save:
                self._trained.save_in_background(self._admission.state(self.version))
            if due_sets:
                evaluation = self._evaluations.run(due_sets, self.version)
                evaluations.append(self._supervisor.start(evaluation, f"evaluation at step {self.version}"))
        await self._record_completed()
        await asyncio.gather(*evaluations)

    async def _next_batch(self) -> list[RolloutGroup]:
        groups = await self._admission.batch()
        if warning := self._admission.check(groups, self.version + 1):
            self._telemetry.warn(warning)
        return groups

    def _score_causes(self, groups: Sequence[RolloutGroup]) -> tuple[CauseProbe, asyncio.Task[Any]] | None:
        """Has a generator score a few of the sequences. Returns None if none was rescored when it was sampled."""
        if (probe := CauseProbe.of(groups, self._config.rollout.temperature)) is None:
            return None
        scored = self._weights.score(probe, self.version)
        return probe, self._supervisor.start(scored, f"causes of step {self.version + 1}")

    async def _end_step(self, syncs: bool) -> None:
        """Waits for the step under way, then starts the sync of its version and frees the slots of its groups."""
        step = self._under_way
        assert step is not None
        result = await asyncio.shield(step.result)  # an interrupted run still needs the result
        if syncs:
            await self._weights.until_few_held()
        self._under_way, step.mark = None, self._telemetry.mark(self._journal.seconds)
        self._unrecorded.append(step)
        group_ids = [group.group_id for group in step.groups]
        self._journal.queue_step(group_ids, self._admission.state(self.version), result)
        if syncs:
            step.sync = self._supervisor.start(self._weights.sync(self.version), f"sync version {self.version}")
            self._admission.version_trained(self.version, len(step.groups))
        self._supervisor.start(self._write_step(), f"journal of step {self.version}")
        self._watch.progress()

    async def _write_step(self) -> None:
        """Writes a completed step to the journal once the requests for its slots have been sent: writing takes longer
        than generators need to begin."""
        await self._admission.dispatched.wait()
        await asyncio.sleep(0)  # the tasks that send them run first
        self._journal.write_steps()

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.version % every_steps == 0 and self.version < self._config.steps

    async def _record_completed(self, during: OptimizerStep | None = None) -> None:
        """Records completed steps, the oldest first, each once its version is released and the critic has trained on
        it.

        Args:
            during: record only the steps that are ready when this step ends. None means all.
        """
        while self._unrecorded:
            step = self._unrecorded[0]
            if during and step.sync:
                await asyncio.wait({step.sync, during.result}, return_when=asyncio.FIRST_COMPLETED)
                if not step.sync.done():
                    break
            await self._record(step)
            self._unrecorded.popleft()
        for step in self._unrecorded:  # the critic is at most one step behind
            await step.critic_result()

    async def _record(self, step: OptimizerStep) -> None:
        sync = await step.sync if step.sync and not step.sync.cancelled() else SyncReport()
        await asyncio.sleep(0)  # requests that waited for the release leave first
        self._journal.write_steps()
        critic, result = await step.critic_result(), step.result.result()
        metrics = await self._metrics_by_cause(step, result) | (critic.metrics if critic else {})
        result = replace(result, metrics=result.metrics | metrics)
        assert step.mark is not None, "it is still under way"
        self._telemetry.step(step.groups, result, step.mark, sync, self._admission.buffer.num_ready)
        if critic and critic.skipped:
            self._telemetry.skipped(critic.policy_version, critic.cause, "of the critic ")

    async def _metrics_by_cause(self, step: OptimizerStep, result: PolicyStepResult) -> dict[str, float]:
        """Returns metrics of causes. A generator that has not answered by now is too slow."""
        if step.causes is None or result.causes is None:
            return {}
        probe, scored = step.causes
        await asyncio.wait({scored}, timeout=WEIGHTS_S)
        has_answered = not scored.cancel() and not scored.cancelled()
        return by_cause(probe, result.causes, scored.result() if has_answered else None)

    async def save(self) -> None:
        """Saves trainer, critic and the position in the data. Raises NotSaved."""
        await self._trained.save(self._admission.state(self.version))

    async def record_completed(self) -> None:
        """Records completed steps of a run that ends with a failed step, with the warnings that led to the failure."""
        while self._unrecorded:
            step = self._unrecorded.popleft()
            await step.end_sync()
            with suppress(ExecutorError):  # the critic's step failed
                await self._record(step)

    async def wind_down(self) -> None:
        """Ends a run early: waits for the step under way, records it without a sync, and saves a checkpoint."""
        await asyncio.gather(*(step.end_sync() for step in self._unrecorded))
        await self._record_completed()
        if self._under_way:
            await self._end_step(syncs=False)
            await self._record_completed()
        await self.save()


class TrainedExecutors:
    """The trainer and, if there is one, the critic.

    The journal holds the groups of all steps since the newest checkpoint. New processes begin at that checkpoint, or
    later if a copy in memory is left (`checkpoint.mirror`). They train again on the same groups in the same order,
    which gives the same weights. So the versions of sampled tokens stay true, and generators need no message.

    Example::

        trained = TrainedExecutors(config, executors, services)
        trained.on_trainer_restart(weights.trainer_died, weights.trainer_restarted)
        trained.add(ready_groups)
        step = trained.begin(1, groups)
        result = await step.result
    """

    def __init__(self, config: RunConfig, executors: Executors, services: Services) -> None:
        assert executors.trainer is not None
        self._timeout_s = config.cluster.timeout_s
        self.trainer, critic = port(TrainerPort, executors.trainer, self._timeout_s), executors.models.get("critic")
        self._handles = executors.trainer, critic
        self.critic = port(CriticPort, critic, self._timeout_s) if critic else None
        self._supervisor, self._watch, self._journal = services.supervisor, services.watch, services.journal
        self._progress = services.progress
        self._checkpoints = Checkpoints(self.trainer, self.critic, services, self._saved)
        self._ready = dict[int, RolloutGroup]()
        """Groups for later steps, by id."""
        self._unsent, self._unsent_bytes = list[RolloutGroup](), 0
        """Groups of `_ready` that the trainer does not have yet. The next step carries them."""
        self._steps = deque[tuple[int, list[RolloutGroup]]]()
        """Steps with their groups that began since the newest checkpoint and are not in the journal."""
        self._on_restored: Callable[[TrainerPort], Awaitable[None]] | None = None
        if isinstance(critic, RestartableHandle):
            critic.restore = self._restore_critic

    def on_trainer_restart(self, died: Callable[[], None], restored: Callable[[TrainerPort], Awaitable[None]]) -> None:
        """Sets what happens when the trainer's processes die and are replaced, if they are.

        Args:
            died: called at the death.
            restored: called with the new trainer once it has the old one's weights.
        """
        trainer, _ = self._handles
        if isinstance(trainer, RestartableHandle):
            trainer.on_death, trainer.restore, self._on_restored = died, self._restore_trainer, restored

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Adds scored groups for later steps.

        The trainer gets them with the call of its next step, which names the groups that it takes. Large groups are
        sent ahead of that call. A critic gets all groups at once. Nothing waits for these calls, since trainer and
        critic may be busy; calls arrive in order.
        """
        self._ready.update((group.group_id, group) for group in groups)
        self._unsent += groups
        self._unsent_bytes += sum(map(group_bytes, groups))
        if self._unsent_bytes > AHEAD_BYTES:
            for batch in split_groups(self._pop_unsent()):
                self._supervisor.start(self.trainer.add_groups(batch), "add groups")
        if self.critic:
            for batch in split_groups(groups):
                self._supervisor.start(self.critic.add_groups(batch), "add groups to the critic")

    def begin(self, step: int, groups: list[RolloutGroup]) -> OptimizerStep:
        """Starts a step of trainer and critic on groups that were added."""
        while self._steps and self._journal.has(self._steps[0][0]):
            self._steps.popleft()
        self._steps.append((step, groups))
        ids = [group.group_id for group in groups]
        for group_id in ids:
            del self._ready[group_id]
        self._progress.begun = step
        result = self._supervisor.start(self._train(ids, self._pop_unsent()), f"step {step}")
        critic = None
        if self.critic:
            critic = self._supervisor.start(self._train_critic(self.critic, step, ids), f"the critic's step {step}")
        return OptimizerStep(groups=groups, result=result, critic=critic)

    def _pop_unsent(self) -> list[RolloutGroup]:
        groups, self._unsent, self._unsent_bytes = self._unsent, [], 0
        return groups

    async def _train(self, group_ids: list[int], groups: list[RolloutGroup]) -> PolicyStepResult:
        result = await self.trainer.step(group_ids, groups)
        self._progress.trained = result.policy_version
        return result

    async def _train_critic(self, critic: CriticPort, step: int, group_ids: list[int]) -> StepResult:
        """Consumes a step's groups, one microbatch per call; between these calls the critic values new rollouts, on all
        of its ranks at the same place; produces the critic's step, at most one behind the trainer's; unblocked by the
        train loop."""
        await critic.learn(step, group_ids)
        self._progress.critic_begun = step
        while (result := await critic.learn_on(step)) is None:
            pass
        self._progress.critic = step
        return result

    async def should_save(self, is_due: bool) -> bool:
        """Returns whether a checkpoint should start now (`Checkpoints.should_save`)."""
        return await self._checkpoints.should_save(is_due)

    async def save(self, state: ControllerState) -> None:
        """Saves trainer and critic with the state of the newest step. Raises NotSaved."""
        await self._checkpoints.save(state)

    def save_in_background(self, state: ControllerState) -> None:
        """Saves trainer and critic during the next steps. If the disk refuses, it warns."""
        self._checkpoints.save_in_background(state)

    def _saved(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step:
            self._steps.popleft()

    async def _restore_trainer(self, handle: ExecutorHandle) -> str:
        """Brings a new trainer to the version and the groups of the old one. Returns text on where it began."""
        trainer, version = port(TrainerPort, handle, self._timeout_s), self._progress.trained
        origin = await self._catch_up(handle.name, trainer, version, trainer=trainer)
        if self._on_restored:
            await self._on_restored(trainer)
        return origin

    async def _restore_critic(self, handle: ExecutorHandle) -> str:
        """Brings a new critic to the state of the old one, and begins the step under way again. Returns text on where
        it began."""
        critic, progress = port(CriticPort, handle, self._timeout_s), self._progress
        begun = progress.critic_begun  # later steps are begun by calls that are repeated
        return await self._catch_up(handle.name, critic, progress.critic, critic=critic, begun=begun)

    async def _catch_up(self, name: str, new: TrainerPort | CriticPort, version: int, **roles: Any) -> str:
        """Has a new trainer or critic train again up to `version`, and sends it the groups of later steps.

        Calls of later steps wait for the restart, and find these groups. Returns text on where it began. Raises
        StepsLost.
        """
        held, ready = dict(self._steps), list(self._ready.values())
        start = await new.restore(version)
        steps = self._steps_since(name, held, start, version)
        await train_again(steps, **roles, last=version, progress=self._watch.progress)
        for batch in split_groups(ready):
            await new.add_groups(batch)
        return f"step {start}, {version - start} steps were trained again"

    def _steps_since(
        self, name: str, held: Mapping[int, list[RolloutGroup]], start: int, version: int
    ) -> Iterator[tuple[int, list[RolloutGroup]]]:
        """Yields steps that began after `start`, in order: those in the journal, then those in `held`.

        Raises StepsLost if a step up to `version` is missing.
        """
        last = start
        for step, groups in self._journal.steps_after(start):
            if step in held:
                break
            yield step, groups
            last = step
        for step in sorted(step for step in held if step > last):
            if step > last + 1:
                break
            yield step, held[step]
            last = step
        if last < version:
            lost = f"steps {last + 1} to {version} cannot be trained again"
            raise StepsLost(name, f"a new {name} begins at step {start}, and {lost}; --resume continues from there")


async def train_again(
    steps: Iterable[tuple[int, list[RolloutGroup]]],
    trainer: TrainerPort | None = None,
    critic: CriticPort | None = None,
    *,
    last: float = math.inf,
    begun: float = -math.inf,
    on_step: Callable[[int, list[RolloutGroup], PolicyStepResult | None], None] = lambda step, groups, result: None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Takes steps again that followed a checkpoint, on the same groups, with the executors that returned to it.

    Args:
        steps: numbers and groups, in order (`Journal.steps_after`).
        last: last step to take. Groups of later steps are only sent, for calls that will name them.
        begun: step that the critic must have begun, since no call will begin it.
        on_step: called after each step.
        progress: called after each call.
    """
    for step, groups in steps:
        ids = [group.group_id for group in groups]
        *ahead, with_step = list(split_groups(groups)) or [[]]
        await _add(trainer, ahead)
        await _add(critic, [*ahead, with_step])
        if critic and step <= max(last, begun):
            await critic.learn(step, ids)
        if step > last:
            if trainer:
                await trainer.add_groups(with_step)
            continue
        result = await trainer.step(ids, with_step) if trainer else None
        progress()
        assert result is None or result.policy_version == step, f"step {step} became {result.policy_version}"
        critic_result = None
        while critic and critic_result is None:
            critic_result = await critic.learn_on(step)
            progress()
        if result and critic_result:
            result = replace(result, metrics=result.metrics | critic_result.metrics)
        on_step(step, groups, result)


async def _add(executor: TrainerPort | CriticPort | None, batches: Iterable[list[RolloutGroup]]) -> None:
    if executor:
        for groups in batches:
            await executor.add_groups(groups)


@contextmanager
def refusals_named(when: str) -> Iterator[None]:
    """Raises NotSaved in place of an OSError that an executor's call raised."""
    try:
        yield
    except RemoteError as error:
        if isinstance(error.__cause__, OSError):
            raise NotSaved(f"no checkpoint {when}: {error.__cause__}; {remedy(error.__cause__)}") from None
        raise


class Checkpoints:
    """Saves trainer and critic at the same step. At most one checkpoint is being written.

    Example::

        checkpoints = Checkpoints(trainer, critic, services, on_saved)
        if await checkpoints.should_save(is_due):
            checkpoints.save_in_background(state)
    """

    def __init__(
        self,
        trainer: TrainerPort,
        critic: CriticPort | None,
        services: Services,
        on_saved: Callable[[int], None],
    ) -> None:
        """
        Args:
            on_saved: called with the step of each complete checkpoint.
        """
        self._trainer, self._critic, self._on_saved = trainer, critic, on_saved
        self._supervisor, self._telemetry, self._journal = services.supervisor, services.telemetry, services.journal
        self._writing: asyncio.Task[None] | None = None
        self._is_late = self._has_waited = False

    async def should_save(self, is_due: bool) -> bool:
        """Returns whether a checkpoint should start now. If the previous one is still being written, waits up to
        PATIENCE_S once, then postpones."""
        if is_due and self._writing is not None and not self._has_waited:
            await asyncio.wait({self._writing}, timeout=PATIENCE_S)
        is_busy = self._writing is not None and not self._writing.done()
        if is_due and is_busy and not self._has_waited:
            self._has_waited = True
            self._telemetry.warn(
                "a checkpoint is due while the previous one is still being written, so it comes later; raise "
                "checkpoint.every_steps or use a faster disk"
            )
        self._is_late |= is_due
        starts = self._is_late and not is_busy
        self._is_late &= is_busy
        return starts

    async def save(self, state: ControllerState) -> None:
        """Saves a checkpoint from which a resumed run neither repeats nor skips a step. Raises NotSaved."""
        await self._previous_written()
        while True:
            try:
                await self._commit(state["step"], self._start_copies(state))
                return
            except Restarted:
                continue

    def save_in_background(self, state: ControllerState) -> None:
        """Saves during the next steps, after `should_save` returned True. If the disk refuses, it warns."""
        step = state["step"]
        writing = self._commit_or_warn(step, self._start_copies(state))
        self._writing = self._supervisor.start(writing, f"checkpoint of step {step}")

    def _start_copies(self, state: ControllerState) -> Sequence[asyncio.Future[Any]]:
        """Has trainer and critic copy their weights before their next call, and write them afterwards; and has the
        journal so far written to the disk."""
        state = self._journal.with_position(state)
        synced = asyncio.to_thread(to_disk, self._journal.next_segment())
        calls = [self._trainer.save(state), *([self._critic.save(state["step"])] if self._critic else [])]
        return [asyncio.ensure_future(call) for call in (*calls, self._or_without_journal(synced))]

    async def _or_without_journal(self, synced: Awaitable[None]) -> None:
        try:
            await synced
        except OSError as error:
            self._journal.fail(error)

    async def _commit(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        """Commits the critic before the trainer: a trainer's checkpoint implies the critic's of the same step."""
        with refusals_named(f"at step {step}"):
            await asyncio.gather(*copies)
            if self._critic:
                await self._critic.commit()
            await self._trainer.commit()
        self._journal.committed(step)
        self._on_saved(step)

    async def _commit_or_warn(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        try:
            await self._commit(step, copies)
        except NotSaved as error:
            self._telemetry.warn(f"{error}, the run continues")
        except Restarted as error:
            self._telemetry.warn(f"no checkpoint at step {step}, as {error.executor} died meanwhile")

    async def _previous_written(self) -> None:
        """Waits for the checkpoint that is being written. The supervisor handles its error."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
