"""The loops of an asynchronous run, in the order in which data meets them.

::

    prompts -> [1 admission: at most (S+1)*P groups active] -> generators -> [2 collect] -> [3 score] -> ready window
                   ^                                             ^    |    (reward, models)                |
                   |                                             +----+                                    v
                   |                                     parked rollouts go on                      [4 train, critic]
                   |                                                                                       |
                   +--- slots freed when a version is made;    [6 adopt, one per generator] <- [5 sync] <- publish

Loops 5 and 6 are in `weights.py`. Every loop's docstring says what it consumes, waits for, produces, and what unblocks
it; docs/index.md lists those of other files, too. With S = 0 all slots are taken until the weights trained on them are
made, and what follows waits for these at its generator, so generation and training take turns: the synchronous mode is
this same code. Without a trainer it evaluates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llamarl.cluster.api import ExecutorError
from llamarl.config import RunConfig
from llamarl.controller.admission import Admission, Problems
from llamarl.controller.causes import scored_by_generator
from llamarl.controller.evaluation import IDS_PER_SET, EvalResult, Evaluation, HeldOutSet, due
from llamarl.controller.flight import Flight, PendingGroup, RolloutState, requests_for
from llamarl.controller.journal import UNWRITTEN_S, Journal
from llamarl.controller.lives import Deaths, lasting
from llamarl.controller.optimized import OptimizedExecutors
from llamarl.controller.ports import Executors
from llamarl.controller.recovery import Recovery, policy_of_generators
from llamarl.controller.replica import Replica
from llamarl.controller.replicas import Replicas
from llamarl.controller.scoring import SCORED_TOKENS, Scorers
from llamarl.controller.steps import REQUESTS_FIRST_S, OptimizerStep
from llamarl.controller.supervision import Signal, StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.controller.turns import open_turns
from llamarl.controller.weights import WeightSync
from llamarl.executors.replies import ControllerState
from llamarl.training.probe import CauseProbe
from llamarl.types import GenerationRequest, Prompt, RolloutGroup


class Controller:
    """Orders the executors; never touches a tensor."""

    def __init__(
        self,
        config: RunConfig,
        problems: Problems,
        executors: Executors,
        supervisor: Supervisor,
        telemetry: Telemetry,
        state: ControllerState | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._journal = journal or Journal()
        timeout_s = config.cluster.call_timeout_s
        self._config, self._problems = config, problems
        self._supervisor, self._telemetry = supervisor, telemetry
        self.version = state["step"] if state else 0
        """Completed optimizer steps."""
        self._watch = StallWatch(config.cluster.stall_timeout_s, self._who_waits)
        deaths = Deaths(config.cluster, len(executors.generators), telemetry.warn)
        self.executors = executors = lasting(executors, config.cluster, supervisor, deaths)
        """Executors of the run; one that is started again when it dies is a `RestartableHandle`."""
        self._trains = executors.trainer is not None
        self._admission = Admission(config, problems, state, telemetry.flow)
        self._buffer = self._admission.buffer
        self._groups_changed = Signal()
        """The buffer has changed."""
        policy = policy_of_generators(config.cluster, executors)
        self.flight = flight = Flight(config, self._journal)
        survives_deaths = policy != "stop"
        self.replicas = Replicas(executors.generators, flight, supervisor, timeout_s, survives_deaths=survives_deaths)
        self._turns = open_turns(
            config, executors, supervisor, flight, self.replicas, self._rollouts_ended, telemetry.waited
        )
        """None: a response is one turn."""
        self._to_score = asyncio.Queue[PendingGroup]()
        """Whole groups."""
        self._score = Scorers(executors.reward, executors.models, config.reward.model, timeout_s)
        self._evaluations = dict[int, Evaluation]()
        """Evaluations under way, by the ids of their groups."""
        self._under_way: OptimizerStep | None = None
        self._unreported = deque[OptimizerStep]()
        """Completed steps that are not on record, the oldest first."""
        if executors.trainer:
            self._optimized = OptimizedExecutors(
                config, executors, supervisor, telemetry, self._watch, self.version, self._journal
            )
            self._weights = WeightSync(
                config, self._optimized, self.replicas, supervisor, telemetry, self._watch, self._journal
            )
        follow = self._weights.adoption_loop if self._trains else None
        self.recovery = Recovery(policy, self.replicas, supervisor, telemetry, follow, self._collect, executors, deaths)

    async def start(self) -> None:
        """Brings the generators to the trainer's version and starts the background loops."""
        replicas = list(self.replicas.alive)
        for replica in replicas:
            self.recovery.watch(replica)
        if self._trains:
            await self._weights.begin()
        self._watch.progress()
        for replica in replicas:
            self._collect(replica)
        self._supervisor.start(self._score_loop(), "score")
        if self._turns:
            self._supervisor.start(self._turns.loop(), "episodes")
        self._supervisor.start(self._watch.loop(), "stall watch")
        self._supervisor.start(self.recovery.silence_loop(), "silence watch")

    # 1. Admission

    async def _admission_loop(self) -> None:
        """Consumes free slots and prompts; waits for slots; produces requests to generators; unblocked by releases, and
        by groups that are dropped."""
        admission = self._admission
        while admission.num_left:
            await self._groups_changed.until(lambda: admission.num_admissible > 0 or not admission.num_left)
            if requests := admission.admit():  # none when the last step has what it needs
                await self._submit(requests)

    async def _submit(self, requests: Sequence[tuple[GenerationRequest, Prompt]]) -> None:
        """Sends requests to the generators, of which one is in service or will be; but not for what the journal has."""
        scored, begun = list[RolloutGroup](), list[PendingGroup]()
        for request, prompt in requests:
            group, held = self._journal.kept(request.group_id)
            if group is None:
                begun.append(self.flight.begin(request, prompt, held))
            else:
                scored.append(group)
        if scored:
            self._deliver(scored)
        for pending in begun:
            self._rollouts_ended(pending)
        rows = [row for pending in begun for row in pending.rows]
        if self._turns:
            self._turns.take([row.rollout for row in rows if row.state is RolloutState.TURN])
        for is_greedy in (False, True):
            part = requests_for(row for row in rows if (row.request.purpose == "greedy") == is_greedy)
            if part:
                await (self._turns or self.replicas).submit(part)

    # 2. Rollouts

    def _collect(self, replica: Replica) -> None:
        self._supervisor.start(self._collect_loop(replica), f"collect {replica.name}")

    async def _collect_loop(self, replica: Replica) -> None:
        """Consumes what `replica` finishes or parks while it is there; waits for requests to be owed, then for the
        replica; produces whole groups to score, and requests to go on with what is parked; unblocked by `submit`."""
        while True:
            await replica.busy.wait()
            await self.replicas.changed.until(lambda: self.flight.may_answer(replica))  # no call stands open meanwhile
            reply = None if replica.is_gone else replica.port.collect(*self._lacking(replica))
            collected = await self.replicas.unless_dead(replica, reply) if reply else None
            if collected is None or replica.is_gone:
                return
            for step in self._unreported:
                step.enter(self._journal)  # before tokens of its version
            replica.stats = collected.stats
            finished, to_go_on = self.flight.answer(replica, collected.rollouts)
            self.replicas.num_resumed += sum(len(request.partials) for request in to_go_on)
            self.replicas.resume(to_go_on)
            if not to_go_on:
                self.replicas.relieve(replica)
            self.replicas.changed.notify()
            ended = self._turns.take(finished) if self._turns else finished
            for pending in self.flight.groups_of(ended):
                self._rollouts_ended(pending)
            self._watch.progress()

    def _lacking(self, replica: Replica) -> tuple[int, list[int]]:
        """Requests of a generator that a step lacks: how many at least, 0 where somebody waits for each rollout, and
        which surely."""
        if self._turns or not self._trains:
            return 0, []
        number, end = self._buffer.lacking()
        return -(-number // len(self.replicas.alive)), [one for one in self.flight.asked(replica) if one < end]

    def _rollouts_ended(self, pending: PendingGroup) -> None:
        """Rollouts of this group have ended, all or some."""
        if pending.is_whole:
            self._telemetry.flow.mark("generated", [pending.group_id])
            self._buffer.generated(pending.group_id)
            self._to_score.put_nowait(pending)

    # 3. Rewards

    async def _score_loop(self) -> None:
        """Consumes whole groups, as many as are there up to `SCORED_TOKENS`; waits for reward and models; produces
        scored groups, for the window or for an evaluation; unblocked by the collect loops."""
        while True:
            batch = [await self._to_score.get()]
            num_tokens = batch[0].num_tokens
            while not self._to_score.empty() and num_tokens < SCORED_TOKENS:
                batch.append(self._to_score.get_nowait())
                num_tokens += batch[-1].num_tokens
            groups = await self._score(batch)
            for pending, group in zip(batch, groups, strict=True):
                self.flight.remove(pending)
                if not pending.is_trained_on:
                    self._evaluations.pop(group.group_id).add(group)
            self._deliver([group for pending, group in zip(batch, groups, strict=True) if pending.is_trained_on])
            self._watch.progress()

    def _deliver(self, groups: Sequence[RolloutGroup]) -> None:
        """Scored groups go into the window, and ahead of the step to trainer and critic."""
        self._journal.groups(groups, self._admission.prompt_of)
        asyncio.get_running_loop().call_later(UNWRITTEN_S, self._journal.write_late)
        ready, num_dropped = self._admission.put(groups)
        if ready:
            self._optimized.add(ready)
        self._groups_changed.notify()
        self._telemetry.groups_ready(self._buffer.num_ready, num_dropped)

    async def evaluate(self, sets: Sequence[HeldOutSet] | None = None) -> list[EvalResult]:
        """Answers the prompts of some sets (None: all) together, with the generators' current weights; training goes on
        meanwhile. Results in the order of the sets."""
        evaluations = [self._begin_evaluation(one) for one in (self._problems.eval if sets is None else sets)]
        total = sum(len(one.requests) for one in evaluations)

        def progress() -> None:
            self._telemetry.eval_progress(sum(one.num_done for one in evaluations), total)

        for one in evaluations:
            one.progress = progress
        await self._submit([request for one in evaluations for request in one.requests])
        results = list[EvalResult]()
        for one in evaluations:
            results.append(await one.result())
            self._telemetry.evaluated(results[-1])
        return results

    def _begin_evaluation(self, held_out: HeldOutSet) -> Evaluation:
        first_id = held_out.first_id
        # A later evaluation that overlaps an earlier one needs ids of its own.
        under_way = (one for one in self._evaluations if first_id <= one < first_id + IDS_PER_SET)
        first_id = max(under_way, default=first_id - 1) + 1
        evaluation = Evaluation(held_out, self._admission.sampling, self.version, first_id)
        self._evaluations.update((request.group_id, evaluation) for request, _ in evaluation.requests)
        return evaluation

    # 4. Optimizer steps

    async def train(self) -> None:
        """The train loop: runs to `config.steps`.

        Consumes P scored groups; waits until the window holds them; produces a policy version, which a task of its own
        syncs to the generators while the next step may begin; unblocked by `_deliver`.
        """
        admission = self._supervisor.start(self._admission_loop(), "admission")
        evaluations = list[asyncio.Task[list[EvalResult]]]()
        while self.version < self._config.steps:
            groups = await self._next_batch()
            causes = self._ask_for_causes(groups)
            if self._config.generators_sleep:
                await asyncio.gather(*evaluations, *([causes[1]] if causes else []))  # which need the generators
                await self._weights.sleep()
            # From here on a step has them, and no wait comes before it begins: an interrupted run may save its state.
            self._admission.consumed(groups, self.version)
            self._groups_changed.notify()
            self._under_way = self._optimized.begin(self.version + 1, groups)
            self._under_way.causes = causes
            # Bookkeeping of steps before, while the trainer works on this one.
            await self._report(beside=self._under_way)
            await self._end_step(syncs=True)
            saves = await self._optimized.takes(self._is_due(self._config.checkpoint.every_steps))
            sets = due(self._problems.eval, self.version, self._config.steps)
            if saves or sets:
                await self._report()  # a step that is saved is on record, and one that is evaluated has been adopted
            if saves:
                self._optimized.save_beside(self._admission.state(self.version))
            if sets:
                evaluations.append(self._supervisor.start(self.evaluate(sets), f"evaluation at step {self.version}"))
        await self._report()
        await asyncio.gather(admission, *evaluations)

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.version % every_steps == 0 and self.version < self._config.steps

    async def _next_batch(self) -> list[RolloutGroup]:
        while (groups := self._buffer.take()) is None:
            await self._groups_changed.wait()
        if warning := self._admission.check(groups, self.version + 1):
            self._telemetry.warn(warning)
        return groups

    def _ask_for_causes(self, groups: Sequence[RolloutGroup]) -> tuple[CauseProbe, asyncio.Task[Any]] | None:
        if (probe := CauseProbe.of(groups, self._config.rollout.temperature)) is None:
            return None
        scored = scored_by_generator(probe, self.replicas, self.version)
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
        step.state = self._admission.state(self.version)
        if syncs:
            step.sync = self._supervisor.start(self._weights.sync(self.version), f"sync version {self.version}")
            self._admission.made(self.version, len(step.groups))
            self._groups_changed.notify()
        asyncio.get_running_loop().call_later(REQUESTS_FIRST_S, step.enter, self._journal)
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
            await step.record(self._telemetry, self._journal, self._buffer.num_ready)
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
                await step.record(self._telemetry, self._journal, self._buffer.num_ready)

    async def wind_down(self) -> None:
        """The run ends early: ends and reports the step under way, without syncing it, and saves a checkpoint."""
        await asyncio.gather(*(step.end_sync() for step in self._unreported))
        await self._report()
        if self._under_way:
            await self._end_step(syncs=False)
            await self._report()
        await self.save()

    async def _who_waits(self) -> str:
        """Text for the stall report: what everybody is doing."""
        in_flight = f"{self.flight.describe()}, {self._buffer.num_free} slots are free"
        facts = [f"step {self.version + 1} {self._buffer.describe()}", in_flight]
        if self._turns and (wait := self._turns.describe()):
            facts.append(wait)
        return "; ".join([*facts, *self.replicas.debts(), *(await self._telemetry.describe_executors())])
