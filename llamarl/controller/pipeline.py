"""`Pipeline`: requests in, scored groups out.

::

    submit -> generators -> [collected rollouts] -> whole groups -> [groups to score] -> reward -> deliver | evaluation
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from llamarl.channels.channel import Channel
from llamarl.cluster.api import ExecutorHandle, chunks
from llamarl.config.schema import EvalConfig
from llamarl.controller.evaluation import EVAL_GROUPS, EvalResult, Evaluation
from llamarl.controller.generators import Generators
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.executors.replies import Scored
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

    def in_order(self) -> list[Rollout]:
        return [self.rollouts[index] for index in range(self.group_size)]

    def group(self) -> RolloutGroup:
        """All rollouts, scored."""
        rollouts, size = tuple(self.in_order()), self.group_size - self.has_greedy
        return RolloutGroup(
            group_id=rollouts[0].group_id,
            prompt=self.prompt,
            rollouts=rollouts[:size],
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
        needs_greedy: bool = False,
    ) -> None:
        """With `needs_greedy`, groups that are trained on come with the reward of a greedy response."""
        self._needs_greedy = needs_greedy
        self.generators = generators
        self._collected = collected
        self._reward = reward
        self._watch = watch
        self._timeout_s = timeout_s
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
        """Consumes whole groups; waits for the reward executor; produces scored groups; unblocked by the group loop."""
        while True:
            batch = await self._to_score.get_batch(EVERYTHING)
            work = [
                (item.prompt, [ids_only(rollout) for rollout in item.in_order()[part]])
                for item in batch
                for part in slices(item.in_order())
            ]
            for part in chunks(work):
                answers: list[list[Scored]] = await self._reward.call("score", part, timeout_s=self._timeout_s)
                groups = list[RolloutGroup]()
                for (_, rollouts), scored in zip(part, answers, strict=True):
                    item = self._pending[rollouts[0].group_id]
                    item.scored.extend(scored)
                    if len(item.scored) == item.group_size:
                        groups.append(item.group())
                for group in groups:
                    del self._pending[group.group_id]
                    if group.group_id in self._evaluations:
                        self._evaluations.pop(group.group_id).add(group)
                if trained := [group for group in groups if group.group_id < EVAL_GROUPS]:
                    await deliver(trained)
            self._watch.progress()


def _greedy(request: GenerationRequest) -> GenerationRequest:
    """For one greedy response to the same prompt."""
    sampling = replace(request.sampling, temperature=0.0)
    return replace(request, group_id=GREEDY_GROUPS + request.group_id, group_size=1, sampling=sampling)
