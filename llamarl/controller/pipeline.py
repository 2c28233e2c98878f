"""`Pipeline`: requests in, scored groups out.

::

    submit -> generators -> [collected rollouts] -> whole groups -> [groups to score] -> reward -> deliver | evaluation
                                                                        (reward model, reference, critic)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llamarl.channels.channel import Channel
from llamarl.cluster.api import ExecutorHandle, chunks
from llamarl.config.schema import EvalConfig
from llamarl.controller.evaluation import EVAL_GROUPS, EvalResult, Evaluation
from llamarl.controller.generators import Generators
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.executors.replies import Scored
from llamarl.rewards._weighted import weighted_sum
from llamarl.rollouts.pieces import slices
from llamarl.rollouts.segments import ids_only
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    SamplingParams,
)

EVERYTHING = 1 << 30
"""As many items as are there."""
GREEDY_GROUPS = 1 << 41
"""The greedy response to the prompt of group i is asked for as a group of one with the id `GREEDY_GROUPS` + i."""
NO_MODELS: Mapping[str, ExecutorHandle] = {}
FIELDS = {"reference": "reference_logprobs_T", "critic": "values_T"}
"""Of `Rollout`, that a model fills."""

Work = tuple[Prompt, list[Rollout]]
"""Rollouts of a group that are scored in one call."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A group whose rollouts are still coming in."""

    prompt: Prompt
    group_size: int
    """Rollouts that are to come, a greedy one included."""
    has_greedy: bool = False
    """The last one is greedy: a baseline, and no part of the group."""
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """By index."""
    scored: list[Scored] = field(default_factory=list)
    """In the order of the indices."""
    per_token: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """What reference and critic say of each token, float32 [T], by the field of `Rollout`; in the same order."""

    def in_order(self) -> list[Rollout]:
        return [self.rollouts[index] for index in range(self.group_size)]

    def group(self) -> RolloutGroup:
        """All rollouts, scored."""
        rollouts, size = self.in_order(), self.group_size - self.has_greedy
        for name, arrays in self.per_token.items():
            fields: list[dict[str, Any]] = [{name: array} for array in arrays]
            rollouts = [replace(one, **new) for one, new in zip(rollouts, fields, strict=True)]
        return RolloutGroup(
            group_id=rollouts[0].group_id,
            prompt=self.prompt,
            rollouts=tuple(rollouts[:size]),
            results=tuple(one.result for one in self.scored[:size]),
            responses=tuple(one.response for one in self.scored[:size]),
            baseline=self._baseline(rollouts[-1], self.scored[-1].result) if self.has_greedy else None,
        )

    def _baseline(self, greedy: Rollout, result: RewardResult) -> RewardResult:
        if greedy.finish_reason is not FinishReason.FAILED:
            return result
        return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=greedy.error)


class Pipeline:
    """Generators and reward as one: every submitted request comes out as one scored group."""

    def __init__(
        self,
        generators: Generators,
        collected: Channel[Rollout],
        reward: ExecutorHandle,
        watch: StallWatch,
        timeout_s: float,
        *,
        models: Mapping[str, ExecutorHandle] = NO_MODELS,
        model_weight: float = 0.0,
        needs_greedy: bool = False,
    ) -> None:
        """
        Args:
            models: `reward-model`, `reference` and `critic`, as far as there are any; evaluations need none of them.
            model_weight: factor of the reward model's score.
            needs_greedy: groups that are trained on come with the reward of a greedy response.
        """
        self._needs_greedy = needs_greedy
        self.generators = generators
        self._collected = collected
        self._reward = reward
        self._watch = watch
        self._timeout_s = timeout_s
        self._models = models
        self._model_weight = model_weight
        self._pending = dict[int, _Pending]()
        self._to_score = Channel[_Pending]("groups to score", collected.capacity)
        self._evaluations = dict[int, Evaluation]()

    def describe_pending(self) -> str:
        """Groups that are being generated or scored, for a stall report."""
        if not self._pending:
            return "none is in flight"
        oldest = min(self._pending)
        arrived, size = len(self._pending[oldest].rollouts), self._pending[oldest].group_size
        return f"{len(self._pending)} are in flight, the oldest is group {oldest} with {arrived} of {size} rollouts"

    def start(self, supervisor: Supervisor, deliver: Callable[[Sequence[RolloutGroup]], Awaitable[None]]) -> None:
        """Starts the loops; scored groups that belong to no evaluation go to `deliver`."""
        for replica in self.generators.replicas:
            self.generators.collect_from(replica)
        supervisor.start(self._group_loop(), "group")
        supervisor.start(self._score_loop(deliver), "score")

    async def submit(self, requests: Sequence[tuple[GenerationRequest, Prompt]]) -> None:
        """Sends requests to the generators."""
        greedy = list[GenerationRequest]()
        for request, prompt in requests:
            if self._needs_greedy and request.group_id < EVAL_GROUPS:
                greedy.append(_greedy(request))
                self._pending[request.group_id] = _Pending(prompt, request.group_size + 1, has_greedy=True)
            else:
                self._pending[request.group_id] = _Pending(prompt, request.group_size)
        await self.generators.submit([request for request, _ in requests])
        if greedy:
            await self.generators.submit(greedy)

    async def evaluate(
        self,
        config: EvalConfig,
        sampling: SamplingParams,
        prompts: Sequence[Prompt],
        version: int,
        progress: Callable[[int, int], None],
    ) -> EvalResult:
        """Answers held-out prompts with the generators' current weights, beside whatever else they do."""
        # A later evaluation that overlaps an earlier one needs ids of its own.
        first = max(self._evaluations, default=EVAL_GROUPS - 1) + 1
        evaluation = Evaluation(config, sampling, prompts, version, progress, first)
        self._evaluations.update((request.group_id, evaluation) for request, _ in evaluation.requests)
        await self.submit(evaluation.requests)
        return await evaluation.result()

    async def _group_loop(self) -> None:
        """Consumes collected rollouts; produces whole groups to score; unblocked by the generators."""
        while True:
            for collected in await self._collected.get_batch(EVERYTHING):
                rollout = self._in_its_group(collected)
                pending = self._pending[rollout.group_id]
                assert rollout.index not in pending.rollouts, "generated twice"
                pending.rollouts[rollout.index] = rollout
                if len(pending.rollouts) == pending.group_size:
                    await self._to_score.put(pending)

    def _in_its_group(self, rollout: Rollout) -> Rollout:
        """A greedy response is the last one of the group that it belongs to."""
        if rollout.group_id < GREEDY_GROUPS:
            return rollout
        group_id = rollout.group_id - GREEDY_GROUPS
        return replace(rollout, group_id=group_id, index=self._pending[group_id].group_size - 1)

    async def _score_loop(self, deliver: Callable[[Sequence[RolloutGroup]], Awaitable[None]]) -> None:
        """Consumes whole groups; waits for reward and models; produces scored groups; unblocked by the group loop."""
        while True:
            batch = await self._to_score.get_batch(EVERYTHING)
            work = [
                (item.prompt, [ids_only(rollout) for rollout in item.in_order()[part]])
                for item in batch
                for part in slices(item.in_order())
            ]
            for part in chunks(work):
                for group in (groups := await self._score(part)):
                    del self._pending[group.group_id]
                    if group.group_id in self._evaluations:
                        self._evaluations.pop(group.group_id).add(group)
                if trained := [group for group in groups if group.group_id < EVAL_GROUPS]:
                    await deliver(trained)
            self._watch.progress()

    async def _score(self, part: Sequence[Work]) -> list[RolloutGroup]:
        """Asks everybody at once; the groups that are now complete."""
        trained = [one for one in part if one[1][0].group_id < EVAL_GROUPS]
        models = self._models if trained else NO_MODELS
        answers, *said = await asyncio.gather(
            self._reward.call("score", part, timeout_s=self._timeout_s),
            *(model.call("score", trained, timeout_s=self._timeout_s) for model in models.values()),
        )
        scored: dict[int, list[Scored]] = {id(one): answer for one, answer in zip(part, answers, strict=True)}
        for name, answer in zip(models, said, strict=True):
            for one, per_rollout in zip(trained, answer, strict=True):
                if name in FIELDS:
                    self._pending[one[1][0].group_id].per_token.setdefault(FIELDS[name], []).extend(per_rollout)
                else:
                    scored[id(one)] = [
                        replace(by_rules, result=self._with_model(by_rules.result, by_model))
                        for by_rules, by_model in zip(scored[id(one)], per_rollout, strict=True)
                    ]
        groups = list[RolloutGroup]()
        for one in part:
            item = self._pending[one[1][0].group_id]
            item.scored.extend(scored[id(one)])
            if len(item.scored) == item.group_size:
                groups.append(item.group())
        return groups

    def _with_model(self, by_rules: RewardResult, by_model: RewardResult) -> RewardResult:
        return weighted_sum(("rules", "reward model"), (1.0, self._model_weight), (by_rules, by_model))


def _greedy(request: GenerationRequest) -> GenerationRequest:
    """For one greedy response to the same prompt."""
    sampling = replace(request.sampling, temperature=0.0)
    return replace(request, group_id=GREEDY_GROUPS + request.group_id, group_size=1, sampling=sampling)
