"""Loops 2 and 3 of a run: `Collector` takes rollouts from the generators, and `ScoreLoop` has whole groups scored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from llamarl.cluster.api import ExecutorHandle, port
from llamarl.config.roles import RewardModelConfig
from llamarl.controller.admission import Admission, RolloutBuffer
from llamarl.controller.flight import Flight, PendingGroup, Replica, Replicas, RolloutState, requests_for
from llamarl.controller.ports import ColumnPort, Responses, RewardModelPort, RewardPort, Turns
from llamarl.controller.services import Services
from llamarl.controller.train_loop import TrainedExecutors
from llamarl.executors.replies import ScoredResponse
from llamarl.journal.records import Key
from llamarl.journal.writer import UNWRITTEN_S
from llamarl.rewards._weighted import weighted_sum
from llamarl.types import COLUMNS, GenerationRequest, Outcome, Prompt, RewardResult, Rollout, RolloutGroup

SCORED_TOKENS = 1 << 20
"""Response tokens from which on a call to the reward gets no more groups, so that the first ones do not wait long."""


class Collector:
    """Sends requests to the generators, and collects their rollouts.

    Example::

        collector = Collector(flight, replicas, turns=None, buffer=admission.buffer, services=services)
        collector.follow(replica)                    # starts loop 2 for this generator
        await collector.ask([(request, prompt)])     # its rollouts arrive in `flight.whole`
    """

    def __init__(
        self,
        flight: Flight,
        replicas: Replicas,
        turns: Turns | None,
        buffer: RolloutBuffer | None,
        services: Services,
    ) -> None:
        """
        Args:
            turns: None means that each response is one turn.
            buffer: knows what the next step is missing; None means that the run only evaluates.
        """
        self._flight, self._replicas, self._turns, self._buffer = flight, replicas, turns, buffer
        self._supervisor, self._watch = services.supervisor, services.watch

    async def ask(
        self, requests: Sequence[tuple[GenerationRequest, Prompt]], held: Mapping[Key, Rollout] | None = None
    ) -> None:
        """Sends requests to generators. Waits while none is in service.

        Args:
            held: rollouts from the journal. Finished ones are not requested again.
        """
        groups = [self._flight.begin(request, prompt, held or {}) for request, prompt in requests]
        rows = [row for pending in groups for row in pending.rows]
        if self._turns:
            self._turns.take([row.rollout for row in rows if row.state is RolloutState.TURN])
        for is_greedy in (False, True):
            part = requests_for(row for row in rows if (row.request.purpose == "greedy") == is_greedy)
            if part:
                await (self._turns or self._replicas).submit(part)

    def follow(self, replica: Replica) -> None:
        """Starts the loop that collects from this generator."""
        self._supervisor.start(self._collect_loop(replica), f"collect {replica.name}")

    async def _collect_loop(self, replica: Replica) -> None:
        """Consumes rollouts that `replica` finishes or parks, until it is gone; waits for requests to be owed, then for
        the replica, which answers once it has the rollouts that the next step is missing, or after a delay; produces
        whole groups to score, and requests to continue parked rollouts; unblocked by `Flight.assign` and by the
        replica."""
        while True:
            await replica.busy.wait()
            # No call is open while the replica waits for newer weights.
            await self._replicas.changed.until(lambda: self._flight.can_answer(replica))
            reply = None if replica.is_gone else replica.port.collect(*self._missing(replica))
            collected = await self._replicas.unless_dead(replica, reply) if reply else None
            if collected is None or replica.is_gone:
                return
            replica.stats = collected.stats
            finished, to_resume = self._flight.receive(replica, collected.rollouts)
            self._replicas.num_resumed += sum(len(request.partials) for request in to_resume)
            self._replicas.resume(to_resume)
            if not to_resume:
                self._replicas.steal_waiting(replica)
            self._replicas.changed.notify()
            if self._turns:
                self._turns.take(finished)
            self._watch.progress()

    def _missing(self, replica: Replica) -> tuple[int, list[int]]:
        """Returns what a step is missing from a generator: the least number of requests, and ids of required ones. 0
        means that each rollout is awaited."""
        if self._turns or self._buffer is None:
            return 0, []
        number, end = self._buffer.missing()
        required = [request_id for request_id in self._flight.requests_at(replica) if request_id < end]
        return -(-number // len(self._replicas.alive)), required


def _columns_for_scoring(rollout: Rollout) -> Rollout:
    agent_columns = ("sequence", "policy_versions") if "sequence" in rollout.columns else ()
    return rollout.with_only("token_ids", *agent_columns)


class Scorers:
    """The reward, the reward model, and the executors that fill a column of `llamarl.types.COLUMNS`.

    Example::

        scorers = Scorers(executors.reward, executors.models, config.reward.model, timeout_s=600)
        groups = await scorers(pending_groups)
    """

    def __init__(
        self,
        reward: ExecutorHandle,
        models: Mapping[str, ExecutorHandle],
        model_config: RewardModelConfig | None,
        timeout_s: float,
    ) -> None:
        """
        Args:
            models: by name. They get only groups that are trained on.
            model_config: settings of the reward model, if it is one of the models.
        """
        self._reward = port(RewardPort, reward, timeout_s)
        self._model = port(RewardModelPort, models["reward-model"], timeout_s) if "reward-model" in models else None
        self._columns = {
            column.name: port(ColumnPort, models[column.filled_by], timeout_s)
            for column in COLUMNS.values()
            if column.filled_by in models
        }
        self._model_weight = model_config.weight if model_config else 0.0

    async def __call__(self, batch: Sequence[PendingGroup]) -> list[RolloutGroup]:
        """Scores whole groups: calls reward and models in parallel."""
        responses = [(pending.prompt, list(map(_columns_for_scoring, pending.rollouts))) for pending in batch]
        trained = [pair for pair, pending in zip(responses, batch, strict=True) if pending.is_trained_on]
        by_rules, by_model, columns = await asyncio.gather(
            self._reward.score(responses), self._score_by_model(trained), self._fill_columns(trained)
        )
        numbers = count()
        groups = list[RolloutGroup]()
        for pending, scores in zip(batch, by_rules, strict=True):
            rollouts, merged = pending.rollouts, scores
            if any(row.result for row in pending.rows):
                pairs = zip(pending.rows, scores, strict=True)
                merged = [replace(score, result=row.result or score.result) for row, score in pairs]
            if pending.is_trained_on:
                number = next(numbers)
                if columns:
                    rollouts = [
                        replace(
                            rollout,
                            columns=rollout.columns | {name: filled[number][n] for name, filled in columns.items()},
                        )
                        for n, rollout in enumerate(rollouts)
                    ]
                if by_model is not None:
                    merged = list(map(self._with_model, merged, by_model[number]))
            merged = list(map(_with_turns, merged, rollouts))
            groups.append(pending.scored(rollouts, merged))
        return groups

    async def _score_by_model(self, responses: Responses) -> list[list[RewardResult]] | None:
        return await self._model.score(responses) if self._model and responses else None

    async def _fill_columns(self, responses: Responses) -> dict[str, list[list[np.ndarray]]]:
        ports = self._columns if responses else {}
        calls = (column_port.score(responses) for column_port in ports.values())
        return dict(zip(ports, await asyncio.gather(*calls), strict=True))

    def _with_model(self, by_rules: ScoredResponse, by_model: RewardResult) -> ScoredResponse:
        parts = by_rules.result, by_model
        return replace(by_rules, result=weighted_sum(("rules", "reward model"), (1.0, self._model_weight), parts))


def _with_turns(scored: ScoredResponse, rollout: Rollout) -> ScoredResponse:
    """Returns a score with the rewards of the episode's turns."""
    result = scored.result
    if "turn_rewards" not in rollout.columns or result.outcome is Outcome.INVALID:
        return scored
    value = result.value + float(rollout.turn_rewards_T.sum(dtype=np.float64))
    return replace(scored, result=replace(result, outcome=Outcome.SCORE, value=value))


class ScoreLoop:
    """Has whole groups scored, and delivers them to the next step or to an evaluation.

    Example::

        scoring = ScoreLoop(scorers, flight, admission, trained, evaluations.add, services)
        supervisor.start(scoring.loop(), "score")
    """

    def __init__(
        self,
        scorers: Scorers,
        flight: Flight,
        admission: Admission,
        trained: TrainedExecutors | None,
        on_evaluated: Callable[[RolloutGroup], None],
        services: Services,
    ) -> None:
        """
        Args:
            trained: None means that the run only evaluates.
            on_evaluated: called with each scored group of an evaluation.
        """
        self._scorers, self._flight, self._admission, self._trained = scorers, flight, admission, trained
        self._on_evaluated, self._journal = on_evaluated, services.journal
        self._telemetry, self._watch = services.telemetry, services.watch

    async def loop(self) -> None:
        """Consumes whole groups, as many as have arrived up to `SCORED_TOKENS`; waits for reward and models; produces
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
                    self._on_evaluated(group)
            self.deliver([group for pending, group in zip(batch, groups, strict=True) if pending.is_trained_on])
            self._watch.progress()

    def deliver(self, groups: Sequence[RolloutGroup]) -> None:
        """Adds scored groups to the journal and the window, and hands ready groups to `TrainedExecutors`. The
        trainer gets them with a step, large ones earlier."""
        self._journal.groups(groups, self._admission.prompt_of)
        asyncio.get_running_loop().call_later(UNWRITTEN_S, self._journal.write_overdue)
        ready, num_dropped = self._admission.add_scored(groups)
        if ready and self._trained:
            self._trained.add(ready)
        self._telemetry.groups_ready(self._admission.buffer.num_ready, num_dropped)
