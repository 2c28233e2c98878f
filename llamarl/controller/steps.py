"""`OptimizerStep`: an optimizer step: under way, then completed, then on record; and steps that are taken again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from llamarl.controller.causes import by_cause
from llamarl.controller.journal import Journal
from llamarl.controller.parcels import groups_of
from llamarl.controller.ports import CriticPort, TrainerPort
from llamarl.controller.sync import SyncReport
from llamarl.controller.telemetry import StepMark, Telemetry
from llamarl.training.probe import CauseProbe
from llamarl.training.result import PolicyStepResult, StepResult
from llamarl.types import RolloutGroup

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
