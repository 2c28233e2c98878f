"""`TrainLoop`: optimizer steps, each from its batch to its record. Loop 4 of a run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from llamarl.cluster.api import ExecutorError
from llamarl.config import RunConfig
from llamarl.controller.admission import Admission
from llamarl.controller.causes import scored_by_generator
from llamarl.controller.evaluation import EvalResult, HeldOutSet, due
from llamarl.controller.journal import Journal
from llamarl.controller.optimized import OptimizedExecutors
from llamarl.controller.replicas import Replicas
from llamarl.controller.steps import REQUESTS_FIRST_S, OptimizerStep
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.controller.weights import WeightSync
from llamarl.training.probe import CauseProbe
from llamarl.types import RolloutGroup


class TrainLoop:
    """Takes steps, and brings the weights of each to the generators."""

    def __init__(
        self,
        config: RunConfig,
        held_out: Sequence[HeldOutSet],
        admission: Admission,
        replicas: Replicas,
        optimized: OptimizedExecutors,
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
            self._admission.consumed(groups, self.version)
            self._under_way = self._optimized.begin(self.version + 1, groups)
            self._under_way.causes = causes
            # Bookkeeping of steps before, while the trainer works on this one.
            await self._report(beside=self._under_way)
            await self._end_step(syncs=True)
            saves = await self._optimized.takes(self._is_due(self._config.checkpoint.every_steps))
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
        self._journal.step_soon(group_ids, self._admission.state(self.version), step.result.result())
        if syncs:
            step.sync = self._supervisor.start(self._weights.sync(self.version), f"sync version {self.version}")
            self._admission.made(self.version, len(step.groups))
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
