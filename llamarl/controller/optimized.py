"""`OptimizedExecutors`: trainer and critic, and how new processes of theirs learn again what the dead ones had learnt.

The journal keeps the groups of all steps since the newest checkpoint. New processes begin at that checkpoint, or
later where a copy in memory is left (`checkpoint.mirror`), and take the steps after it again: the same groups in the
same order, which gives the same weights. So the versions that tokens carry stay true, and generators need not hear.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from llamarl.cluster.api import ExecutorError, ExecutorHandle
from llamarl.cluster.port import port
from llamarl.config import RunConfig
from llamarl.controller.journal import Journal
from llamarl.controller.lives import RestartableHandle
from llamarl.controller.parcels import group_bytes, groups_of
from llamarl.controller.ports import CriticPort, Executors, TrainerPort
from llamarl.controller.saving import Checkpoints
from llamarl.controller.steps import OptimizerStep, retake
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.executors.replies import ControllerState
from llamarl.training.result import PolicyStepResult, StepResult
from llamarl.types import RolloutGroup

RIDING_BYTES = 4 << 20
"""Size of groups from which on they go ahead of their step: a call has a limit, and a step waits for its own."""


class StepsLost(ExecutorError):
    """Steps that an executor had learnt since the newest checkpoint are not there any more."""

    def __init__(self, executor: str, text: str) -> None:
        super().__init__(executor, text)
        self.executor, self.text = executor, text

    def __str__(self) -> str:
        return self.text


class OptimizedExecutors:
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
        self.takes = self._checkpoints.takes
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
