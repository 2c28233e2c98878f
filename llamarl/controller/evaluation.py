"""Evaluation on held-out prompts, with the generators and rewards of the training."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamarl.config.data import EvalConfig
from llamarl.controller.flight import FIRST_EVAL_ID, FIRST_GREEDY_ID
from llamarl.controller.telemetry import Telemetry
from llamarl.observability.metrics import EvalMetrics, chances, effective_num, pass_at_k, wilson
from llamarl.types import FinishReason, GenerationRequest, Outcome, Prompt, RolloutGroup, SamplingParams

IDS_PER_SET = 1 << 30
"""Group ids that are reserved for each set."""
MAX_SETS = (FIRST_GREEDY_ID - FIRST_EVAL_ID) // IDS_PER_SET
"""Number of sets with reserved ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutSet:
    """Prompts that a run is evaluated on, and the settings of the evaluation."""

    name: str | None = None
    """None means that it is the only set."""
    number: int = 0
    """Place among all sets of the run, which keys its sampling noise."""
    settings: EvalConfig
    prompts: Sequence[Prompt]
    """At least one, and at most `settings.max_prompts`."""

    @property
    def first_id(self) -> int:
        """Group id of its first prompt."""
        assert self.number < MAX_SETS, "settings have fewer"
        return FIRST_EVAL_ID + self.number * IDS_PER_SET


def due(sets: Iterable[HeldOutSet], version: int, steps: int) -> list[HeldOutSet]:
    """Returns the sets to evaluate after `version` of `steps`. The run itself evaluates after the last step."""
    every = ((held_out, held_out.settings.every_steps) for held_out in sets)
    return [held_out for held_out, interval in every if interval and version % interval == 0 and version < steps]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """A finished evaluation."""

    metrics: EvalMetrics
    groups: tuple[RolloutGroup, ...]
    """Scored groups, in the order of the prompts."""


class Evaluation:
    """One evaluation of one held-out set.

    Its group ids begin at the same number each time, so two evaluations draw the same sampling noise.

    Example::

        evaluation = Evaluation(held_out, sampling, version=8, first_group_id=held_out.first_id)
        await collector.ask(evaluation.requests)
        evaluation.add(group)                # for each scored group
        result = await evaluation.result()
    """

    def __init__(
        self,
        held_out: HeldOutSet,
        sampling: Mapping[str, SamplingParams],
        version: int,
        first_group_id: int,
    ) -> None:
        """
        Args:
            sampling: parameters of the training by `Prompt.source`; the temperature is that of the set.
        """
        self._set, self._version = held_out, version
        self.on_progress: Callable[[], None] = lambda: None
        """Called after each scored prompt."""
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
        """Scored prompts."""
        return len(self._groups)

    def add(self, group: RolloutGroup) -> None:
        """Adds the scored group of a prompt."""
        self._groups[group.group_id] = group
        self.on_progress()
        if self.num_done == len(self.requests):
            self._end_s = self._clock.time()
            self._done.set()

    async def result(self) -> EvalResult:
        """Waits until all prompts are scored. Returns the result."""
        await self._done.wait()
        groups = tuple(self._groups[group_id] for group_id in sorted(self._groups))
        return EvalResult(metrics=self._metrics(groups), groups=groups)

    def _metrics(self, groups: Sequence[RolloutGroup]) -> EvalMetrics:
        results = [result.first_part or result for group in groups for result in group.results]
        invalid = [result.reason for result in results if result.outcome is Outcome.INVALID]
        counts = [(num_right, num_judged) for num_right, num_judged in map(judged, groups) if num_judged]
        right, nums = [num_right for num_right, _ in counts], [num_judged for _, num_judged in counts]
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
            pass_at={str(num): chance for num, chance in pass_at.items()} if k > 1 else {},
            truncated_share=float(np.mean([rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts])),
        )


class Evaluations:
    """The held-out sets of a run, and the evaluations under way. They share generators and reward with the training.

    Example::

        evaluations = Evaluations(problems.eval, admission.sampling, collector.ask, telemetry)
        results = await evaluations.run(evaluations.sets, version=0)
    """

    def __init__(
        self,
        sets: Sequence[HeldOutSet],
        sampling: Mapping[str, SamplingParams],
        ask: Callable[[Sequence[tuple[GenerationRequest, Prompt]]], Awaitable[None]],
        telemetry: Telemetry,
    ) -> None:
        """
        Args:
            sampling: by `Prompt.source`.
            ask: has groups generated and scored, and passes each to `add`.
        """
        self.sets, self._sampling, self._ask, self._telemetry = sets, sampling, ask, telemetry
        self._by_group = dict[int, Evaluation]()
        """Evaluations by the ids of their groups that are not scored yet."""

    def due(self, version: int, steps: int) -> list[HeldOutSet]:
        """Returns the sets to evaluate after `version` of `steps`."""
        return due(self.sets, version, steps)

    async def run(self, sets: Sequence[HeldOutSet], version: int) -> list[EvalResult]:
        """Evaluates these sets in parallel with the generators' current weights. Returns results in the order of the
        sets.

        Args:
            version: completed optimizer steps. The trainer may continue meanwhile.
        """
        evaluations = [self._begin(held_out, version) for held_out in sets]
        total = sum(len(evaluation.requests) for evaluation in evaluations)
        for evaluation in evaluations:
            evaluation.on_progress = lambda: self._telemetry.eval_progress(sum(e.num_done for e in evaluations), total)
        await self._ask([request for evaluation in evaluations for request in evaluation.requests])
        results = list[EvalResult]()
        for evaluation in evaluations:
            results.append(await evaluation.result())
            self._telemetry.evaluated(results[-1].metrics)
        return results

    def add(self, group: RolloutGroup) -> None:
        """Adds a scored group to its evaluation."""
        self._by_group.pop(group.group_id).add(group)

    def _begin(self, held_out: HeldOutSet, version: int) -> Evaluation:
        first_id = held_out.first_id
        # An evaluation that overlaps an earlier one of the same set needs other ids.
        under_way = (group_id for group_id in self._by_group if first_id <= group_id < first_id + IDS_PER_SET)
        first_id = max(under_way, default=first_id - 1) + 1
        evaluation = Evaluation(held_out, self._sampling, version, first_id)
        self._by_group.update((request.group_id, evaluation) for request, _ in evaluation.requests)
        return evaluation


def judged(group: RolloutGroup) -> tuple[int, int]:
    """Returns the number of right responses to a prompt, and the number of responses that the reward could judge."""
    outcomes = [(result.first_part or result).outcome for result in group.results]
    num_judged = sum(outcome is not Outcome.INVALID for outcome in outcomes)
    return sum(result.is_right for result in group.results), num_judged


def _pass_at(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Returns the mean of pass@k over prompts, given the right and the judged samples of each. A prompt with fewer than
    k judged samples counts with all of them."""
    chance = [pass_at_k(num_judged, right, min(k, num_judged)) for right, num_judged in counts]
    return float(np.mean(chance)) if chance else math.nan
