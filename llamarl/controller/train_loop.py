"""`TrainLoop`: optimizer steps, each from its batch to its record. Loop 4 of a run."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl.cluster.api import ExecutorError, ExecutorHandle, RemoteError
from llamarl.cluster.port import port
from llamarl.config import RunConfig
from llamarl.controller.admission import Admission
from llamarl.controller.causes import by_cause, scored_by_generator
from llamarl.controller.evaluation import EvalResult, HeldOutSet, due
from llamarl.controller.flight import Replicas
from llamarl.controller.ports import CriticPort, Executors, TrainerPort, group_bytes, groups_of
from llamarl.controller.progress import SyncReport
from llamarl.controller.restart import RestartableHandle, Restarted
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.telemetry import StepMark, Telemetry
from llamarl.controller.weights import WeightSync
from llamarl.executors.replies import ControllerState
from llamarl.journal.writer import Journal, to_disk
from llamarl.observability.files import remedy
from llamarl.training.probe import CauseProbe
from llamarl.training.result import PolicyStepResult, StepResult
from llamarl.types import RolloutGroup

PATIENCE_S = 5.0
"""Longest wait of the next step for a checkpoint that is still written when another is due; once."""


class NotSaved(RuntimeError):
    """The disk refuses a checkpoint; the last good one stands."""


@contextmanager
def refusals_named(when: str) -> Iterator[None]:
    """Raises NotSaved instead of what the disk says to the call of an executor."""
    try:
        yield
    except RemoteError as error:
        if isinstance(error.__cause__, OSError):
            raise NotSaved(f"no checkpoint {when}: {error.__cause__}; {remedy(error.__cause__)}") from None
        raise


class Checkpoints:
    """Saves of trainer and critic; at most one is being written."""

    def __init__(
        self,
        trainer: TrainerPort,
        critic: CriticPort | None,
        supervisor: Supervisor,
        telemetry: Telemetry,
        journal: Journal,
        saved: Callable[[int], None],
    ) -> None:
        """`saved` hears of each step that has a checkpoint."""
        self._trainer, self._critic, self._journal, self._saved = trainer, critic, journal, saved
        self._supervisor, self._telemetry = supervisor, telemetry
        self._writing: asyncio.Task[None] | None = None
        self._is_late = self._told_of_late = False

    async def should_save(self, is_due: bool) -> bool:
        """Whether to save now: what is due while the one before is written waits a bit for it, or comes after it where
        the disk has been found to be slow."""
        if is_due and self._writing is not None and not self._told_of_late:
            await asyncio.wait({self._writing}, timeout=PATIENCE_S)
        is_busy = self._writing is not None and not self._writing.done()
        if is_due and is_busy and not self._told_of_late:
            self._told_of_late = True
            self._telemetry.warn(
                "a checkpoint is due while the one before it is still written, so it comes later; raise "
                "checkpoint.every_steps or use a faster disk"
            )
        self._is_late |= is_due
        takes = self._is_late and not is_busy
        self._is_late &= is_busy
        return takes

    async def save(self, state: ControllerState) -> None:
        """Saves a checkpoint with which, after a resume, nothing is trained twice or skipped.

        Raises:
            NotSaved: the disk refuses.
        """
        await self._written()
        while True:
            try:
                await self._commit(state["step"], self._copies(state))
                return
            except Restarted:
                continue

    def save_beside(self, state: ControllerState) -> None:
        """Saves beside the next steps, where `takes` says so; if the disk refuses, that costs a warning."""
        step = state["step"]
        writing = self._commit_or_warn(step, self._copies(state))
        self._writing = self._supervisor.start(writing, f"checkpoint of step {step}")

    def _copies(self, state: ControllerState) -> Sequence[asyncio.Future[Any]]:
        """Trainer and critic copy their weights before whatever they are asked for next, and write beside that; what
        the journal has so far comes to the disk."""
        located = self._journal.with_position(state)
        synced = asyncio.to_thread(to_disk, self._journal.next_segment())
        calls = [self._trainer.save(located), *([self._critic.save(state["step"])] if self._critic else [])]
        return [asyncio.ensure_future(call) for call in (*calls, self._or_without(synced))]

    async def _or_without(self, synced: Awaitable[None]) -> None:
        try:
            await synced
        except OSError as error:
            self._journal.fail(error)

    async def _commit(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        """The critic comes first: where there is a trainer's checkpoint, there is the critic's of the same step."""
        with refusals_named(f"at step {step}"):
            await asyncio.gather(*copies)
            if self._critic:
                await self._critic.commit()
            await self._trainer.commit()
        self._journal.committed(step)
        self._saved(step)

    async def _commit_or_warn(self, step: int, copies: Sequence[asyncio.Future[Any]]) -> None:
        try:
            await self._commit(step, copies)
        except NotSaved as error:
            self._telemetry.warn(f"{error}, the run goes on")
        except Restarted as error:
            self._telemetry.warn(f"no checkpoint at step {step}, as {error.executor} died meanwhile")

    async def _written(self) -> None:
        """Waits for the checkpoint that is being written; its error is the supervisor's."""
        if self._writing is not None:
            await asyncio.wait({self._writing})


REQUESTS_FIRST_S = 0.003
"""A step that is completed lets weights and new requests out: they leave before it is recorded, which takes longer than
the generators need to begin."""

WEIGHTS_S = 1.0
"""Seconds that weights still on their way when the run ends, and log-probabilities of a generator once the next weights
are released, have to arrive."""


@dataclass(kw_only=True, slots=True)
class OptimizerStep:
    """Optimizer step. At most one is under way; others are completed, and on record once their weights are released."""

    groups: list[RolloutGroup]
    result: asyncio.Task[PolicyStepResult]
    critic: asyncio.Task[StepResult] | None
    """The same step of the critic."""
    causes: tuple[CauseProbe, asyncio.Task[tuple[np.ndarray, float] | None]] | None = None
    """Sequences that tell causes of its importance ratio, and what a generator says of them; None: there are none."""
    sync: asyncio.Task[SyncReport] | None = None
    """None while it is under way, and when the run was interrupted before."""
    mark: StepMark | None = None
    """None while it is under way."""

    async def end_sync(self) -> None:
        """Nobody waits for its weights any more: who was to take them may be dead."""
        if self.sync:
            await asyncio.wait({self.sync}, timeout=WEIGHTS_S)
            self.sync.cancel()
            await asyncio.wait({self.sync})

    async def learnt(self) -> StepResult | None:
        """The critic's, once it has ended; None: there is none."""
        return await asyncio.shield(self.critic) if self.critic else None

    async def record(self, telemetry: Telemetry, journal: Journal, num_ready: int) -> None:
        """Once its weights have been released and the critic has learnt from it."""
        sync = await self.sync if self.sync and not self.sync.cancelled() else SyncReport()
        await asyncio.sleep(REQUESTS_FIRST_S)
        journal.write_steps()
        learnt, result = await self.learnt(), self.result.result()
        more = await self._by_cause(result) | (learnt.metrics if learnt else {})
        result = replace(result, metrics=result.metrics | more)
        assert self.mark is not None, "it is still under way"
        telemetry.step(self.groups, result, self.mark, sync, num_ready)
        if learnt and learnt.skipped:
            telemetry.skipped(learnt.policy_version, learnt.cause, "of the critic ")

    async def _by_cause(self, result: PolicyStepResult) -> dict[str, float]:
        """Metrics of causes; the generator that was asked before the step has answered, or is too slow."""
        if self.causes is None or result.causes is None:
            return {}
        probe, scored = self.causes
        await asyncio.wait({scored}, timeout=WEIGHTS_S)
        has_come = not scored.cancel() and not scored.cancelled()
        return by_cause(probe, result.causes, scored.result() if has_come else None)


async def _add(one: TrainerPort | CriticPort | None, calls: Iterable[list[RolloutGroup]]) -> None:
    if one:
        for groups in calls:
            await one.add_groups(groups)


async def retake(
    steps: Iterable[tuple[int, list[RolloutGroup]]],
    trainer: TrainerPort | None = None,
    critic: CriticPort | None = None,
    *,
    last: float = math.inf,
    begun: float = -math.inf,
    told: Callable[[int, list[RolloutGroup], PolicyStepResult | None], None] = lambda step, groups, result: None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Takes steps again that were completed after a checkpoint, on the same groups, with those who came back to it.

    Args:
        steps: each with its groups, in order; `Journal.steps_after`.
        last: steps after it are not taken; their groups are there for the calls that ask for them.
        begun: step that the critic has to have under way, which nobody tells it again.
        told: hears of each step that is taken.
        progress: hears of each call of a step that has ended.
    """
    for step, groups in steps:
        ids = [group.group_id for group in groups]
        *ahead, riding = list(groups_of(groups)) or [[]]
        await _add(trainer, ahead)
        await _add(critic, [*ahead, riding])
        if critic and step <= max(last, begun):
            await critic.learn(step, ids)
        if step > last:
            if trainer:
                await trainer.add_groups(riding)
            continue
        result = await trainer.step(ids, riding) if trainer else None
        progress()
        assert result is None or result.policy_version == step, f"step {step} became {result.policy_version}"
        learnt = None
        while critic and learnt is None:
            learnt = await critic.learn_on(step)
            progress()
        if result and learnt:
            result = replace(result, metrics=result.metrics | learnt.metrics)
        told(step, groups, result)


RIDING_BYTES = 4 << 20
"""Size of groups from which on they go ahead of their step: a call has a limit, and a step waits for its own."""


class StepsLost(ExecutorError):
    """Steps that an executor had learnt since the newest checkpoint are not there any more."""

    def __init__(self, executor: str, text: str) -> None:
        super().__init__(executor, text)
        self.executor, self.text = executor, text

    def __str__(self) -> str:
        return self.text


class TrainedExecutors:
    """The trainer, and the critic where there is one."""

    def __init__(
        self,
        config: RunConfig,
        executors: Executors,
        supervisor: Supervisor,
        telemetry: Telemetry,
        watch: StallWatch,
        version: int,
        journal: Journal,
    ) -> None:
        assert executors.trainer is not None
        self._timeout_s = config.cluster.call_timeout_s
        self.trainer, critic = port(TrainerPort, executors.trainer, self._timeout_s), executors.models.get("critic")
        self._handles = executors.trainer, critic
        self.critic = port(CriticPort, critic, self._timeout_s) if critic else None
        self.version = self._critic_version = self._critic_begun = version
        """Optimizer steps whose results have come, and the step that the critic has been told to begin."""
        self._supervisor, self._watch, self._journal = supervisor, watch, journal
        self._checkpoints = Checkpoints(self.trainer, self.critic, supervisor, telemetry, journal, self._saved)
        self.should_save = self._checkpoints.should_save
        self._ready = dict[int, RolloutGroup]()
        """Groups for steps to come."""
        self._unsent, self._unsent_bytes = list[RolloutGroup](), 0
        """Groups among them that the trainer has not got yet: they come with the next step."""
        self._result: asyncio.Task[PolicyStepResult] | None = None
        """The newest step's."""
        self._steps = deque[tuple[int, list[RolloutGroup]]]()
        """Steps that have begun since the newest checkpoint and are not in the journal, with their groups."""

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Scored groups ride in the call of the next step, which names those that it takes. Many tokens go ahead of it,
        and a critic gets all at once.

        Nobody waits for them to be taken, as trainer and critic may be busy with a step; calls reach them in order.
        """
        self._ready.update((group.group_id, group) for group in groups)
        self._unsent += groups
        self._unsent_bytes += sum(map(group_bytes, groups))
        if self._unsent_bytes > RIDING_BYTES:
            for parcel in groups_of(self._taken()):
                self._supervisor.start(self.trainer.add_groups(parcel), "add groups")
        if self.critic:
            for parcel in groups_of(groups):
                self._supervisor.start(self.critic.add_groups(parcel), "add groups to the critic")

    def begin(self, step: int, groups: list[RolloutGroup]) -> OptimizerStep:
        """Trainer and critic are asked for a step on these groups, which have been added."""
        while self._steps and self._journal.has(self._steps[0][0]):
            self._steps.popleft()
        self._steps.append((step, groups))
        ids = [group.group_id for group in groups]
        for group_id in ids:
            del self._ready[group_id]
        self._result = result = self._supervisor.start(self._train(ids, self._taken()), f"step {step}")
        learnt = None
        if self.critic:
            learnt = self._supervisor.start(self._learn(self.critic, step, ids), f"the critic's step {step}")
        return OptimizerStep(groups=groups, result=result, critic=learnt)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way."""
        return self._result is not None and not self._result.done()

    @property
    def trainer_hosts(self) -> Sequence[str]:
        """Hosts of the trainer's ranks."""
        return self._handles[0].hosts

    def _taken(self) -> list[RolloutGroup]:
        """Groups that are on their way to the trainer from now on."""
        taken, self._unsent, self._unsent_bytes = self._unsent, [], 0
        return taken

    async def _train(self, group_ids: list[int], groups: list[RolloutGroup]) -> PolicyStepResult:
        result = await self.trainer.step(group_ids, groups)
        self.version = result.policy_version
        return result

    async def _learn(self, critic: CriticPort, step: int, group_ids: list[int]) -> StepResult:
        """Consumes a step's groups, a microbatch per call: between them the critic values new rollouts, on all of its
        ranks at the same place; produces the critic's step, at most one behind the trainer's; unblocked by the train
        loop."""
        await critic.learn(step, group_ids)
        self._critic_begun = step
        while (result := await critic.learn_on(step)) is None:
            pass
        self._critic_version = step
        return result

    async def save(self, state: ControllerState) -> None:
        """Saves both with the state of the newest step. Raises NotSaved."""
        await self._checkpoints.save(state)

    def save_beside(self, state: ControllerState) -> None:
        """Saves trainer and critic beside the next steps; if the disk refuses, that costs a warning."""
        self._checkpoints.save_beside(state)

    def _saved(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step:
            self._steps.popleft()

    def restore_on_restart(self, died: Callable[[], None], again: Callable[[TrainerPort], Awaitable[None]]) -> None:
        """Has trainer and critic, where they are started again, brought to where they were.

        Args:
            died: hears that the trainer is dead.
            again: what else a new trainer needs.
        """
        trainer, critic = self._handles
        if isinstance(trainer, RestartableHandle):
            trainer.died, trainer.restore = died, self._restore_trainer
            self._again = again
        if isinstance(critic, RestartableHandle):
            critic.restore = self._restore_critic

    async def _restore_trainer(self, life: ExecutorHandle) -> str:
        """Brings a new trainer to the version of the old one, with the groups that it had; what it began from."""
        trainer = port(TrainerPort, life, self._timeout_s)
        origin = await self._retaken(life.name, trainer, self.version, trainer=trainer)
        await self._again(trainer)
        return origin

    async def _restore_critic(self, life: ExecutorHandle) -> str:
        """Brings a new critic to where the old one was; what it began from. A step under way begins again."""
        critic = port(CriticPort, life, self._timeout_s)
        begun = self._critic_begun  # not a step that it is told of after other calls
        return await self._retaken(life.name, critic, self._critic_version, critic=critic, begun=begun)

    async def _retaken(self, name: str, one: TrainerPort | CriticPort, version: int, **who: Any) -> str:
        """Has a new trainer or critic take the steps up to `version` again, and gives it the groups of those to come,
        as they are now: whatever is asked for later waits for the new life, and finds them there. What it began from.

        Raises StepsLost.
        """
        held, ready = dict(self._steps), list(self._ready.values())
        start = await one.restore(version)
        steps = self._since(name, held, start, version)
        await retake(steps, **who, last=version, progress=self._watch.progress)
        for parcel in groups_of(ready):
            await one.add_groups(parcel)
        return f"step {start}, {version - start} steps were taken again"

    def _since(
        self, name: str, held: Mapping[int, list[RolloutGroup]], start: int, version: int
    ) -> Iterator[tuple[int, list[RolloutGroup]]]:
        """Steps that have begun after `start`, in their order: from the journal, and those that are `held`.

        Raises StepsLost: up to `version` one is not there.
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
            gone = f"steps {last + 1} to {version} are not there to be taken again"
            raise StepsLost(name, f"a new {name} begins at step {start}, and {gone}; --resume goes on from there")


class TrainLoop:
    """Takes steps, and brings the weights of each to the generators."""

    def __init__(
        self,
        config: RunConfig,
        held_out: Sequence[HeldOutSet],
        admission: Admission,
        replicas: Replicas,
        optimized: TrainedExecutors,
        weights: WeightSync,
        evaluate: Callable[[Sequence[HeldOutSet], int], Coroutine[Any, Any, Sequence[EvalResult]]],
        supervisor: Supervisor,
        telemetry: Telemetry,
        watch: StallWatch,
        journal: Journal,
    ) -> None:
        """
        Args:
            held_out: sets to evaluate on every so many steps, by `evaluate`, which also takes the version that is
                trained.
        """
        self._config, self._held_out, self._admission, self._replicas = config, held_out, admission, replicas
        self._optimized, self._weights, self._evaluate = optimized, weights, evaluate
        self._supervisor, self._telemetry, self._watch, self._journal = supervisor, telemetry, watch, journal
        self.version = optimized.version
        """Completed optimizer steps."""
        self._under_way: OptimizerStep | None = None
        self._unreported = deque[OptimizerStep]()
        """Completed steps that are not on record, the oldest first."""

    async def run(self) -> None:
        """The train loop: runs to `config.steps`.

        Consumes P scored groups; waits until the window holds them; produces a policy version, which a task of its own
        syncs to the generators while the next step may begin; unblocked by `deliver`.
        """
        evaluations = list[Awaitable[Sequence[EvalResult]]]()
        while self.version < self._config.steps:
            groups = await self._next_batch()
            causes = self._ask_for_causes(groups)
            if self._config.generators_sleep:
                await asyncio.gather(*evaluations, *([causes[1]] if causes else []))  # which need the generators
                await self._weights.sleep()
            # From here on a step has them, and no wait comes before it begins: an interrupted run may save its state.
            self._admission.mark_consumed(groups, self.version)
            self._under_way = self._optimized.begin(self.version + 1, groups)
            self._under_way.causes = causes
            # Bookkeeping of steps before, while the trainer works on this one.
            await self._report(beside=self._under_way)
            await self._end_step(syncs=True)
            saves = await self._optimized.should_save(self._is_due(self._config.checkpoint.every_steps))
            sets = due(self._held_out, self.version, self._config.steps)
            if saves or sets:
                await self._report()  # a step that is saved is on record, and one that is evaluated has been adopted
            if saves:
                self._optimized.save_beside(self._admission.state(self.version))
            if sets:
                evaluation = self._evaluate(sets, self.version)
                evaluations.append(self._supervisor.start(evaluation, f"evaluation at step {self.version}"))
        await self._report()
        await asyncio.gather(*evaluations)

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.version % every_steps == 0 and self.version < self._config.steps

    async def _next_batch(self) -> list[RolloutGroup]:
        groups = await self._admission.batch()
        if warning := self._admission.check(groups, self.version + 1):
            self._telemetry.warn(warning)
        return groups

    def _ask_for_causes(self, groups: Sequence[RolloutGroup]) -> tuple[CauseProbe, asyncio.Task[Any]] | None:
        if (probe := CauseProbe.of(groups, self._config.rollout.temperature)) is None:
            return None
        scored = scored_by_generator(probe, self._replicas, self.version)
        return probe, self._supervisor.start(scored, f"causes of step {self.version + 1}")

    async def _end_step(self, syncs: bool) -> None:
        """Waits for the step under way; then the sync of its version starts."""
        step = self._under_way
        assert step is not None
        self.version = (await asyncio.shield(step.result)).policy_version  # an interrupted run still wants it
        if syncs:
            await self._weights.until_few()
        self._under_way, step.mark = None, self._telemetry.mark(self._journal.seconds)
        self._unreported.append(step)
        group_ids = [group.group_id for group in step.groups]
        self._journal.queue_step(group_ids, self._admission.state(self.version), step.result.result())
        if syncs:
            step.sync = self._supervisor.start(self._weights.sync(self.version), f"sync version {self.version}")
            self._admission.version_trained(self.version, len(step.groups))
        asyncio.get_running_loop().call_later(REQUESTS_FIRST_S, self._journal.write_steps)
        self._watch.progress()

    async def _report(self, beside: OptimizerStep | None = None) -> None:
        """Records completed steps, the oldest first, each once its weights have been released and the critic has learnt
        from it: all of them, or those that are so far when the one `beside` them ends."""
        while self._unreported:
            step = self._unreported[0]
            if beside and step.sync:
                await asyncio.wait({step.sync, beside.result}, return_when=asyncio.FIRST_COMPLETED)
                if not step.sync.done():
                    break
            await step.record(self._telemetry, self._journal, self._admission.buffer.num_ready)
            self._unreported.popleft()
        for step in self._unreported:  # the critic is at most one behind
            await step.learnt()

    async def save(self) -> None:
        """Saves trainer, critic and data position. Raises NotSaved."""
        await self._optimized.save(self._admission.state(self.version))

    async def record_completed(self) -> None:
        """The run ends with a step that failed: those before it go on record, with the warnings that led up to it."""
        while self._unreported:
            step = self._unreported.popleft()
            await step.end_sync()
            with suppress(ExecutorError):  # the critic's part of it
                await step.record(self._telemetry, self._journal, self._admission.buffer.num_ready)

    async def wind_down(self) -> None:
        """The run ends early: ends and reports the step under way, without syncing it, and saves a checkpoint."""
        await asyncio.gather(*(step.end_sync() for step in self._unreported))
        await self._report()
        if self._under_way:
            await self._end_step(syncs=False)
            await self._report()
        await self.save()
