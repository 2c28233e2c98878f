"""`Collector`: asks the generators for groups, and takes what they answer. Loop 2 of a run, one per generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from llamarl.cluster.api import ExecutorHandle
from llamarl.cluster.port import port
from llamarl.config.roles import RewardModelConfig
from llamarl.controller.admission import Admission, RolloutBuffer
from llamarl.controller.flight import Flight, PendingGroup, Replica, Replicas, RolloutState, requests_for
from llamarl.controller.ports import ColumnPort, Responses, RewardModelPort, RewardPort, Turns
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.controller.train_loop import TrainedExecutors
from llamarl.executors.replies import ScoredResponse
from llamarl.journal.records import Key
from llamarl.journal.writer import UNWRITTEN_S, Journal
from llamarl.rewards._weighted import weighted_sum
from llamarl.types import COLUMNS, GenerationRequest, Prompt, RewardResult, Rollout, RolloutGroup

SCORED_TOKENS = 1 << 20
"""Response tokens from which on a call to the reward takes no more groups: the first need not wait for the last."""


def _columns_for_scoring(rollout: Rollout) -> Rollout:
    """The rollout with those columns alone that a reward reads."""
    of_agents = ("sequence", "policy_versions") if "sequence" in rollout.columns else ()
    return rollout.with_only("token_ids", *of_agents)


class Scorers:
    """Reward, reward model, and the executors that fill a column of `llamarl.types.COLUMNS`."""

    def __init__(
        self,
        reward: ExecutorHandle,
        models: Mapping[str, ExecutorHandle],
        judge: RewardModelConfig | None,
        timeout_s: float,
    ) -> None:
        """
        Args:
            models: by name; what is trained on goes to them, too.
            judge: settings of the reward model among them.
        """
        self._reward = port(RewardPort, reward, timeout_s)
        self._model = port(RewardModelPort, models["reward-model"], timeout_s) if "reward-model" in models else None
        self._columns = {
            column.name: port(ColumnPort, models[column.filled_by], timeout_s)
            for column in COLUMNS.values()
            if column.filled_by in models
        }
        self._model_weight = judge.weight if judge else 0.0

    async def __call__(self, batch: Sequence[PendingGroup]) -> list[RolloutGroup]:
        """Asks everybody at once."""
        responses = [(item.prompt, list(map(_columns_for_scoring, item.rollouts))) for item in batch]
        to_train = [one for one, item in zip(responses, batch, strict=True) if item.is_trained_on]
        said, by_model, columns = await asyncio.gather(
            self._reward.score(responses), self._by_model(to_train), self._filled(to_train)
        )
        trained = count()
        groups = list[RolloutGroup]()
        for item, by_rules in zip(batch, said, strict=True):
            rollouts, judged = item.rollouts, by_rules
            if any(row.result for row in item.rows):
                pairs = zip(item.rows, by_rules, strict=True)
                judged = [replace(one, result=row.result or one.result) for row, one in pairs]
            if item.is_trained_on:
                number = next(trained)
                if columns:
                    rollouts = [
                        replace(one, columns=one.columns | {name: of[number][n] for name, of in columns.items()})
                        for n, one in enumerate(rollouts)
                    ]
                if by_model is not None:
                    judged = list(map(self._with_model, judged, by_model[number]))
            groups.append(item.scored(rollouts, judged))
        return groups

    async def _by_model(self, responses: Responses) -> list[list[RewardResult]] | None:
        return await self._model.score(responses) if self._model and responses else None

    async def _filled(self, responses: Responses) -> dict[str, list[list[np.ndarray]]]:
        """Columns that executors fill for these responses, by name; nothing where there are no responses."""
        ports = self._columns if responses else {}
        return dict(zip(ports, await asyncio.gather(*(one.score(responses) for one in ports.values())), strict=True))

    def _with_model(self, by_rules: ScoredResponse, by_model: RewardResult) -> ScoredResponse:
        parts = by_rules.result, by_model
        return replace(by_rules, result=weighted_sum(("rules", "reward model"), (1.0, self._model_weight), parts))


class ScoreLoop:
    """Scores groups, and gives them to who waits for them."""

    def __init__(
        self,
        scorers: Scorers,
        flight: Flight,
        admission: Admission,
        optimized: TrainedExecutors | None,
        evaluated: Callable[[RolloutGroup], None],
        journal: Journal,
        telemetry: Telemetry,
        watch: StallWatch,
    ) -> None:
        """`evaluated` gets the groups of evaluations; `optimized` is None where nothing is trained."""
        self._scorers, self._flight, self._admission, self._optimized = scorers, flight, admission, optimized
        self._evaluated, self._journal, self._telemetry, self._watch = evaluated, journal, telemetry, watch

    async def loop(self) -> None:
        """Consumes whole groups, as many as are there up to `SCORED_TOKENS`; waits for reward and models; produces
        scored groups, for the window or for an evaluation; unblocked by the collect loops."""
        whole = self._flight.whole
        while True:
            batch = [await whole.get()]
            num_tokens = batch[0].num_tokens
            while not whole.empty() and num_tokens < SCORED_TOKENS:
                batch.append(whole.get_nowait())
                num_tokens += batch[-1].num_tokens
            groups = await self._scorers(batch)
            for pending, group in zip(batch, groups, strict=True):
                self._flight.remove(pending)
                if not pending.is_trained_on:
                    self._evaluated(group)
            self.deliver([group for pending, group in zip(batch, groups, strict=True) if pending.is_trained_on])
            self._watch.progress()

    def deliver(self, groups: Sequence[RolloutGroup]) -> None:
        """Scored groups go into the window, and ahead of the step to trainer and critic."""
        self._journal.groups(groups, self._admission.prompt_of)
        asyncio.get_running_loop().call_later(UNWRITTEN_S, self._journal.write_overdue)
        ready, num_dropped = self._admission.add_scored(groups)
        if ready and self._optimized:
            self._optimized.add(ready)
        self._telemetry.groups_ready(self._admission.buffer.num_ready, num_dropped)


class Collector:
    """Rollouts from their request to their end."""

    def __init__(
        self,
        flight: Flight,
        replicas: Replicas,
        turns: Turns | None,
        buffer: RolloutBuffer | None,
        supervisor: Supervisor,
        watch: StallWatch,
    ) -> None:
        """
        Args:
            turns: None: a response is one turn.
            buffer: says what a step lacks; None: nothing is trained.
        """
        self._flight, self._replicas, self._turns, self._buffer = flight, replicas, turns, buffer
        self._supervisor, self._watch = supervisor, watch

    async def ask(
        self, requests: Sequence[tuple[GenerationRequest, Prompt]], held: Mapping[Key, Rollout] | None = None
    ) -> None:
        """Sends requests to the generators, of which one is in service or will be; but not for rollouts that are `held`
        and whole."""
        begun = [self._flight.begin(request, prompt, held or {}) for request, prompt in requests]
        rows = [row for pending in begun for row in pending.rows]
        if self._turns:
            self._turns.take([row.rollout for row in rows if row.state is RolloutState.TURN])
        for is_greedy in (False, True):
            part = requests_for(row for row in rows if (row.request.purpose == "greedy") == is_greedy)
            if part:
                await (self._turns or self._replicas).submit(part)

    def follow(self, replica: Replica) -> None:
        """Takes what a generator answers, from now on."""
        self._supervisor.start(self._collect_loop(replica), f"collect {replica.name}")

    async def _collect_loop(self, replica: Replica) -> None:
        """Consumes what `replica` finishes or parks while it is there; waits for requests to be owed, then for the
        replica; produces whole groups to score, and requests to go on with what is parked; unblocked by `submit`."""
        while True:
            await replica.busy.wait()
            # No call stands open meanwhile.
            await self._replicas.changed.until(lambda: self._flight.may_answer(replica))
            reply = None if replica.is_gone else replica.port.collect(*self._lacking(replica))
            collected = await self._replicas.unless_dead(replica, reply) if reply else None
            if collected is None or replica.is_gone:
                return
            replica.stats = collected.stats
            finished, to_go_on = self._flight.answer(replica, collected.rollouts)
            self._replicas.num_resumed += sum(len(request.partials) for request in to_go_on)
            self._replicas.resume(to_go_on)
            if not to_go_on:
                self._replicas.steal_waiting(replica)
            self._replicas.changed.notify()
            if self._turns:
                self._turns.take(finished)
            self._watch.progress()

    def _lacking(self, replica: Replica) -> tuple[int, list[int]]:
        """Requests of a generator that a step lacks: how many at least, 0 where somebody waits for each rollout, and
        which surely."""
        if self._turns or self._buffer is None:
            return 0, []
        number, end = self._buffer.lacking()
        return -(-number // len(self._replicas.alive)), [one for one in self._flight.asked(replica) if one < end]
