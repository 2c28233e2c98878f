"""`Steps`: the optimizer step that the trainer takes now, and the last completed one until it is on record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from llamarl.controller.supervision import Supervisor
from llamarl.controller.sync import CallTrainer
from llamarl.controller.sync_report import SyncReport
from llamarl.controller.telemetry import StepMark, Telemetry
from llamarl.training.result import StepResult
from llamarl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class _Completed:
    """A step that is not reported yet."""

    groups: list[RolloutGroup]
    result: StepResult
    critic: asyncio.Task[StepResult] | None
    """The same step of the critic, once it has learnt."""
    sync: asyncio.Task[SyncReport] | None
    """None when the run was interrupted before."""
    mark: StepMark


class Steps:
    """At most one step is under way and one unreported: `begin`, `report`, `end`, `begin`, ..."""

    def __init__(
        self,
        version: int,
        call_trainer: CallTrainer,
        call_critic: CallTrainer | None,
        supervisor: Supervisor,
        telemetry: Telemetry,
    ) -> None:
        self.version = version
        """Completed optimizer steps."""
        self._call_trainer = call_trainer
        self._call_critic = call_critic
        self._supervisor = supervisor
        self._telemetry = telemetry
        self._under_way: tuple[list[RolloutGroup], asyncio.Future[StepResult]] | None = None
        self._learning: asyncio.Task[StepResult] | None = None
        """The critic's share of the step under way."""
        self._unreported: _Completed | None = None

    @property
    def is_under_way(self) -> bool:
        """The trainer works on a step, or is just about to."""
        return self._under_way is not None

    def has_weights(self, version: int) -> bool:
        """Whether the trainer's weights are those of `version` and stay so for a call that leaves now."""
        return self.version == version and not self.is_under_way

    def begin(self, groups: list[RolloutGroup]) -> None:
        """The trainer is asked for a step on these groups, which it has."""
        assert self._under_way is None, "one step at a time"
        ids = [group.group_id for group in groups]
        step = self._supervisor.start(self._call_trainer("step", ids), f"step {self.version + 1}")
        step.add_done_callback(_retrieve)
        self._under_way = groups, step
        if self._call_critic:
            learning = self._learn(self._call_critic, self.version + 1, ids)
            self._learning = self._supervisor.start(learning, f"the critic's step {self.version + 1}")
            self._learning.add_done_callback(_retrieve)

    async def _learn(self, call_critic: CallTrainer, step: int, group_ids: list[int]) -> StepResult:
        """A microbatch per call: between them the critic values new rollouts, on all of its ranks at the same place."""
        result = await call_critic("learn", step, group_ids)
        while result is None:
            result = await call_critic("learn_on", step)
        return result

    async def end(self, sync: Callable[[int, int], Coroutine[Any, Any, SyncReport]] | None) -> None:
        """Waits for the step under way; then `sync`, if given, starts with the new version and the groups behind it."""
        assert self._under_way is not None
        assert self._unreported is None, "the step before must be reported first"
        groups, step = self._under_way
        result = await asyncio.shield(step)  # an interrupted run still wants it
        self._under_way = None
        self.version = result.policy_version
        mark, task = self._telemetry.mark(), None
        if sync is not None:
            task = self._supervisor.start(sync(self.version, len(groups)), f"sync version {self.version}")
        self._unreported = _Completed(groups=groups, result=result, critic=self._learning, sync=task, mark=mark)

    async def report(self, ready_groups: Callable[[], int]) -> None:
        """Records the last completed step, once its weights have been released and the critic has learnt from it: the
        critic may be one step behind the trainer, no more."""
        if self._unreported is not None:
            done = self._unreported
            sync = await done.sync if done.sync and not done.sync.cancelled() else SyncReport()
            learnt = await asyncio.shield(done.critic) if done.critic else None
            self._unreported = None
            result = replace(done.result, metrics=done.result.metrics | learnt.metrics) if learnt else done.result
            self._telemetry.step(done.groups, result, done.mark, sync, ready_groups())
            if learnt and learnt.skipped:
                self._telemetry.skipped(learnt.policy_version, learnt.cause, "of the critic ")


def _retrieve(step: asyncio.Future[Any]) -> None:
    # When the run fails first, nobody asks for this step's error any more.
    if not step.cancelled():
        step.exception()
