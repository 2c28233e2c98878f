"""Ways of rollouts into scored groups: `PendingGroup` collects them one by one, `Scorers` asks reward and models."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from llamarl.cluster.api import ExecutorHandle
from llamarl.cluster.port import port
from llamarl.config import RunConfig, build
from llamarl.config.roles import RewardModelConfig
from llamarl.controller.journal import Journal
from llamarl.controller.ports import ColumnPort, Responses, RewardModelPort, RewardPort
from llamarl.controller.records import Key
from llamarl.executors.replies import ScoredResponse
from llamarl.rewards._weighted import weighted_sum
from llamarl.types import (
    COLUMNS,
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
)

FIRST_EVAL_ID, FIRST_GREEDY_ID = 1 << 40, 1 << 41
"""Group ids key the sampling noise, so those of evaluations and greedy responses begin far from the training's."""
SCORED_TOKENS = 1 << 20
"""Response tokens from which on a call to the reward takes no more groups: the first need not wait for the last."""


def greedy_request(request: GenerationRequest) -> GenerationRequest:
    """The request for one greedy response to the same prompt."""
    sampling, group_id = replace(request.sampling, temperature=0.0), FIRST_GREEDY_ID + request.group_id
    return replace(request, group_id=group_id, group_size=1, sampling=sampling, purpose="greedy")


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group whose rollouts are still coming in, and its greedy response, if it has one."""

    requests: tuple[GenerationRequest, ...]
    """Requests for the group, and perhaps for the greedy response."""
    prompt: Prompt
    judged: dict[Key, RewardResult] = field(default_factory=dict)
    """Results of the environment for episodes, in place of the reward's, by group and index."""
    environment_s: dict[Key, float] = field(default_factory=dict)
    """Seconds that replies to the episodes that have ended took."""
    _rollouts: dict[Key, Rollout] = field(default_factory=dict)

    @property
    def group_id(self) -> int:
        return self.requests[0].group_id

    @property
    def is_trained_on(self) -> bool:
        return self.requests[0].purpose == "train"

    def request_of(self, rollout: Rollout) -> GenerationRequest:
        """The request that a rollout answers, without partials."""
        request = next(one for one in self.requests if one.group_id == rollout.group_id)
        return replace(request, partials=())

    @property
    def num_rollouts(self) -> int:
        """Rollouts that are asked for, the greedy one included."""
        return sum(request.group_size for request in self.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens of the rollouts that have come."""
        return sum(rollout.num_tokens for rollout in self._rollouts.values())

    @property
    def arrived(self) -> str:
        """Text: how many rollouts have come, of how many."""
        return f"{len(self._rollouts)} of {self.num_rollouts}"

    def add(self, rollout: Rollout) -> bool:
        """A rollout has come; whether it was the last one."""
        key = rollout.group_id, rollout.index
        assert key not in self._rollouts, "generated twice"
        self._rollouts[key] = rollout
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        """Nothing is to come any more."""
        return len(self._rollouts) == self.num_rollouts

    def rest(self, held: Mapping[Key, Rollout], turns: Sequence[Rollout] = ()) -> list[GenerationRequest]:
        """Requests for what is to be generated, where these rollouts are there: finished ones, some of which wait for
        the reply to their last turn, and some to go on with."""
        asked = {(one.group_id, one.index) for one in turns}
        self._rollouts.update((key, held[key]) for key in held.keys() - asked if held[key].finish_reason.is_final)
        requests = list[GenerationRequest]()
        for request in self.requests:
            starts = [held.get((one.group_id, one.index), one) for one in request.starts()]
            to_come = tuple(one for one in starts if not one.finish_reason.is_final)
            if to_come:
                requests.append(replace(request, partials=to_come) if held else request)
        return requests

    def in_order(self) -> list[Rollout]:
        """Rollouts by index; a greedy one comes last."""
        return [self._rollouts[key] for key in sorted(self._rollouts)]

    def scored(self, rollouts: Sequence[Rollout], said: Sequence[ScoredResponse]) -> RolloutGroup:
        """All of them, scored, in their order."""
        size = self.requests[0].group_size
        return RolloutGroup(
            group_id=self.group_id,
            prompt=self.prompt,
            rollouts=tuple(rollouts[:size]),
            results=tuple(one.result for one in said[:size]),
            responses=tuple(one.response for one in said[:size]),
            environment_s=tuple(self.environment_s.get((one.group_id, one.index), 0.0) for one in rollouts[:size])
            if self.environment_s
            else (),
            baseline=_baseline(rollouts[size], said[size].result) if len(rollouts) > size else None,
        )


def _baseline(greedy: Rollout, result: RewardResult) -> RewardResult:
    if greedy.finish_reason is not FinishReason.FAILED:
        return result
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=greedy.error)


class InFlight(dict[int, PendingGroup]):
    """Groups of which rollouts are still coming in, by the ids of their requests; what comes is in the journal."""

    def __init__(self, config: RunConfig, journal: Journal) -> None:
        super().__init__()
        advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
        self._journal, self._segment_tokens = journal, config.rollout.segment_tokens
        self._needs_greedy: bool = advantage.NEEDS_GREEDY
        self._has_turns = config.rollout.environment is not None
        """An environment says what follows a rollout that has stopped."""

    def begin(
        self, requests: Iterable[tuple[GenerationRequest, Prompt]]
    ) -> tuple[list[RolloutGroup], list[PendingGroup], list[Rollout], list[list[GenerationRequest]]]:
        """Groups that the journal has scored, those of which it has all rollouts, turns that it has, and what is to be
        asked for."""
        scored, whole, turns = list[RolloutGroup](), list[PendingGroup](), list[Rollout]()
        sent, greedy = list[GenerationRequest](), list[GenerationRequest]()
        for request, prompt in requests:
            group, held = self._journal.kept(request.group_id)
            if group is not None:
                scored.append(group)
                continue
            of_group = [replace(request, segment_tokens=self._segment_tokens, has_turns=self._has_turns)]
            if self._needs_greedy and request.purpose == "train":
                of_group.append(greedy_request(of_group[0]))
            pending = PendingGroup(tuple(of_group), prompt)
            self.update((one.group_id, pending) for one in of_group)
            stopped = [one for one in held.values() if self._has_turns and one.finish_reason is FinishReason.STOP]
            turns += stopped
            for one in pending.rest(held, stopped):
                (greedy if one.purpose == "greedy" else sent).append(one)
            self.record(held.values())
            if pending.is_whole:
                whole.append(pending)
        return scored, whole, turns, [part for part in (sent, greedy) if part]

    def record(self, rollouts: Iterable[Rollout], withdrawn: Container[Key] = ()) -> None:
        """Records rollouts that came, without those of evaluations and those `withdrawn`, which others generate."""
        pending = ((self.get(one.group_id), one) for one in rollouts if (one.group_id, one.index) not in withdrawn)
        self._journal.rollouts([(of.group_id, one) for of, one in pending if of and of.is_trained_on])

    def remove(self, pending: PendingGroup) -> None:
        """Removes a group that is complete."""
        for request in pending.requests:
            del self[request.group_id]

    def describe(self) -> str:
        """Text for a stall report: how many groups there are, and what the oldest lacks."""
        pending = {id(one): one for one in self.values()}.values()
        if not pending:
            return "none is in flight"
        oldest = min(pending, key=lambda one: one.group_id)
        return f"{len(pending)} are in flight, the oldest is group {oldest.group_id} with {oldest.arrived} rollouts"


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
        responses = [(item.prompt, list(map(_columns_for_scoring, item.in_order()))) for item in batch]
        to_train = [one for one, item in zip(responses, batch, strict=True) if item.is_trained_on]
        said, by_model, columns = await asyncio.gather(
            self._reward.score(responses), self._by_model(to_train), self._filled(to_train)
        )
        trained = count()
        groups = list[RolloutGroup]()
        for item, by_rules in zip(batch, said, strict=True):
            rollouts, judged = item.in_order(), by_rules
            if item.judged:
                judged = [
                    replace(one, result=item.judged.get((rollout.group_id, rollout.index), one.result))
                    for rollout, one in zip(rollouts, by_rules, strict=True)
                ]
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
