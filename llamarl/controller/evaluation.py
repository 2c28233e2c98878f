"""Evaluation on held-out prompts, by the same generators and the same reward as training."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from llamarl.config.schema import EvalConfig
from llamarl.observability.metrics import EvalMetrics
from llamarl.types import GenerationRequest, Outcome, Prompt, RolloutGroup, SamplingParams


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
        config: EvalConfig,
        sampling: Callable[[Prompt], SamplingParams],
        prompts: Sequence[Prompt],
        version: int,
        progress: Callable[[int, int], None],
        first_group_id: int,
    ) -> None:
        self._config = config
        self._version = version
        self._progress = progress
        self._clock = asyncio.get_running_loop()
        self._start_s = self._clock.time()
        self._prompts = list(itertools.islice(prompts, config.max_prompts))
        self._groups = dict[int, RolloutGroup]()
        self._done = asyncio.Event()
        self.requests = [
            (
                GenerationRequest(
                    group_id=first_group_id + number,
                    prompt_token_ids_T=prompt.token_ids_T,
                    group_size=config.samples,
                    sampling=replace(sampling(prompt), temperature=config.temperature),
                    purpose="eval",
                ),
                prompt,
            )
            for number, prompt in enumerate(self._prompts)
        ]

    def add(self, group: RolloutGroup) -> None:
        """One prompt is answered and scored."""
        self._groups[group.group_id] = group
        self._progress(len(self._groups), len(self._prompts))
        if len(self._groups) == len(self._prompts):
            self._done.set()

    async def result(self) -> EvalResult:
        """Waits until all prompts are answered."""
        await self._done.wait()
        groups = tuple(self._groups[group_id] for group_id in sorted(self._groups))
        return EvalResult(metrics=self._metrics(groups), groups=groups)

    def _metrics(self, groups: Sequence[RolloutGroup]) -> EvalMetrics:
        results = [result.first_part or result for group in groups for result in group.results]
        invalid = [one.reason for one in results if one.outcome is Outcome.INVALID]
        judged = [one for one in groups if any((r.first_part or r).outcome is not Outcome.INVALID for r in one.results)]
        right = [sum(result.is_right for result in group.results) for group in judged]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        versions = np.concatenate([rollout.policy_versions_T[rollout.is_sampled_T] for rollout in rollouts])
        k = self._config.samples
        return EvalMetrics(
            step=self._version,
            policy_version_min=int(versions.min(initial=self._version)),
            policy_version_max=int(versions.max(initial=self._version)),
            accuracy=sum(right) / (len(results) - len(invalid)) if judged else math.nan,
            pass_at_k=float(np.mean([pass_at_k(k, count, k) for count in right])) if judged else math.nan,
            k=k,
            mean_response_tokens=float(np.mean([rollout.is_sampled_T.sum() for rollout in rollouts])),
            num_prompts=len(groups),
            wall_s=self._clock.time() - self._start_s,
            num_invalid=len(invalid),
            invalid_reason=invalid[0] if invalid else None,
        )


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples, drawn from `num_samples` without replacement, is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)
