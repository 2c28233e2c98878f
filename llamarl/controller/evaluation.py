"""Evaluation on held-out prompts, by the same generators and the same rewards as training."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamarl.config.data import EvalConfig
from llamarl.controller.flight import FIRST_EVAL_ID, FIRST_GREEDY_ID
from llamarl.observability.intervals import chances, effective_num, pass_at_k, wilson
from llamarl.observability.metrics import EvalMetrics
from llamarl.types import FinishReason, GenerationRequest, Outcome, Prompt, RolloutGroup, SamplingParams

IDS_PER_SET = 1 << 30
"""Group ids of one set; those of the next one begin there."""
MAX_SETS = (FIRST_GREEDY_ID - FIRST_EVAL_ID) // IDS_PER_SET
"""Sets that have ids of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutSet:
    """Prompts that a run is evaluated on, and how."""

    name: str | None = None
    """Name among several sets; None: it is the only one."""
    number: int = 0
    """Place among all sets of the run, which keys its sampling noise."""
    settings: EvalConfig
    """Settings of this set."""
    prompts: Sequence[Prompt]
    """Prompts of the set, `settings.max_prompts` at most; at least one."""

    @property
    def first_id(self) -> int:
        """Group id of its first prompt."""
        assert self.number < MAX_SETS, "settings have fewer"
        return FIRST_EVAL_ID + self.number * IDS_PER_SET


def due(sets: Iterable[HeldOutSet], version: int, steps: int) -> list[HeldOutSet]:
    """Sets to evaluate beside training after `version` of all steps; after the last one the run does it itself."""
    every = ((one, one.settings.every_steps) for one in sets)
    return [one for one, steps_between in every if steps_between and version % steps_between == 0 and version < steps]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """One finished evaluation."""

    metrics: EvalMetrics
    groups: tuple[RolloutGroup, ...]
    """Scored groups, in the order of the prompts."""


class Evaluation:
    """Collects the answers to one set of held-out prompts.

    Group ids start at the same number each time, so two evaluations draw the same sampling noise.
    """

    def __init__(
        self,
        held_out: HeldOutSet,
        sampling: Mapping[str, SamplingParams],
        version: int,
        first_group_id: int,
    ) -> None:
        """`sampling` has the parameters of training by the prompts' source; the temperature is the set's."""
        self._set, self._version = held_out, version
        self.progress: Callable[[], None] = lambda: None
        """Hears of each prompt that is answered."""
        self._clock = asyncio.get_running_loop()
        self._start_s = self._end_s = self._clock.time()
        self._groups = dict[int, RolloutGroup]()
        self._done = asyncio.Event()
        settings = held_out.settings
        self.requests = [
            (
                GenerationRequest(
                    group_id=first_group_id + number,
                    prompt_token_ids_T=prompt.token_ids_T,
                    group_size=settings.samples,
                    sampling=replace(sampling[prompt.source], temperature=settings.temperature),
                    purpose="eval",
                ),
                prompt,
            )
            for number, prompt in enumerate(held_out.prompts)
        ]

    @property
    def num_done(self) -> int:
        """Prompts that are answered."""
        return len(self._groups)

    def add(self, group: RolloutGroup) -> None:
        """One prompt is answered and scored."""
        self._groups[group.group_id] = group
        self.progress()
        if self.num_done == len(self.requests):
            self._end_s = self._clock.time()
            self._done.set()

    async def result(self) -> EvalResult:
        """Waits until all prompts are answered."""
        await self._done.wait()
        groups = tuple(self._groups[group_id] for group_id in sorted(self._groups))
        return EvalResult(metrics=self._metrics(groups), groups=groups)

    def _metrics(self, groups: Sequence[RolloutGroup]) -> EvalMetrics:
        results = [result.first_part or result for group in groups for result in group.results]
        invalid = [one.reason for one in results if one.outcome is Outcome.INVALID]
        counts = [found for found in map(judged, groups) if found[1]]
        right, nums = [one for one, _ in counts], [num for _, num in counts]
        accuracy, num_effective = sum(right) / sum(nums) if nums else math.nan, effective_num(right, nums)
        low, high = wilson(accuracy, num_effective)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        versions = np.concatenate([rollout.policy_versions_T[rollout.is_sampled_T] for rollout in rollouts])
        k = self._set.settings.samples
        pass_at = {num: _pass_at(counts, num) if num > 1 else accuracy for num in chances(k)}
        return EvalMetrics(
            step=self._version,
            policy_version_min=int(versions.min(initial=self._version)),
            policy_version_max=int(versions.max(initial=self._version)),
            accuracy=accuracy,
            pass_at_k=pass_at[k],
            k=k,
            mean_response_tokens=float(np.mean([rollout.is_sampled_T.sum() for rollout in rollouts])),
            num_prompts=len(groups),
            wall_s=self._end_s - self._start_s,
            num_invalid=len(invalid),
            invalid_reason=invalid[0] if invalid else None,
            name=self._set.name,
            accuracy_low=low,
            accuracy_high=high,
            num_effective=num_effective,
            pass_at={str(num): one for num, one in pass_at.items()} if k > 1 else {},
            truncated_share=float(np.mean([one.finish_reason is FinishReason.LENGTH for one in rollouts])),
        )


class Evaluations:
    """Evaluations under way, which share generators and reward with the training."""

    def __init__(
        self,
        sampling: Mapping[str, SamplingParams],
        ask: Callable[[Sequence[tuple[GenerationRequest, Prompt]]], Awaitable[None]],
        progress: Callable[[int, int], None],
        evaluated: Callable[[EvalResult], None],
    ) -> None:
        """
        Args:
            sampling: by the prompts' source.
            ask: has groups generated and scored, each of which `add` gets.
            progress: hears how many prompts of how many are answered.
            evaluated: hears of each set that is done.
        """
        self._sampling, self._ask, self._progress, self._evaluated = sampling, ask, progress, evaluated
        self._of_group = dict[int, Evaluation]()
        """Evaluations by the ids of their groups that are to come."""

    async def run(self, sets: Sequence[HeldOutSet], version: int) -> list[EvalResult]:
        """Answers the prompts of these sets together, with the generators' current weights, while the trainer is at
        `version` or goes on. Results in the order of the sets."""
        evaluations = [self._begin(one, version) for one in sets]
        total = sum(len(one.requests) for one in evaluations)
        for one in evaluations:
            one.progress = lambda: self._progress(sum(each.num_done for each in evaluations), total)
        await self._ask([request for one in evaluations for request in one.requests])
        results = list[EvalResult]()
        for one in evaluations:
            results.append(await one.result())
            self._evaluated(results[-1])
        return results

    def add(self, group: RolloutGroup) -> None:
        """One prompt is answered and scored."""
        self._of_group.pop(group.group_id).add(group)

    def _begin(self, held_out: HeldOutSet, version: int) -> Evaluation:
        first_id = held_out.first_id
        # A later evaluation that overlaps an earlier one needs ids of its own.
        under_way = (one for one in self._of_group if first_id <= one < first_id + IDS_PER_SET)
        first_id = max(under_way, default=first_id - 1) + 1
        evaluation = Evaluation(held_out, self._sampling, version, first_id)
        self._of_group.update((request.group_id, evaluation) for request, _ in evaluation.requests)
        return evaluation


def judged(group: RolloutGroup) -> tuple[int, int]:
    """Right responses of a prompt, and those that the reward could judge."""
    outcomes = [(result.first_part or result).outcome for result in group.results]
    num_judged = sum(outcome is not Outcome.INVALID for outcome in outcomes)
    return sum(result.is_right for result in group.results), num_judged


def _pass_at(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Mean of pass@k over prompts, by right and judged samples of each; of one with fewer judged, all of them."""
    chance = [pass_at_k(judged, right, min(k, judged)) for right, judged in counts]
    return float(np.mean(chance)) if chance else math.nan
