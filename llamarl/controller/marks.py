"""Marks at the end of steps: what a run has done by then, and the metrics of its episodes between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llamarl.executors.replies import GeneratorStats
from llamarl.types import RAISED, Rollout, RolloutGroup


class EnvironmentUse(NamedTuple):
    """Use of the environment by all episodes so far."""

    wait_s: float = 0.0
    """Seconds that rollouts have waited for replies, together."""
    calls: int = 0
    """Calls of tools."""
    errors: int = 0
    """Calls of tools that were malformed or failed."""

    def plus(self, waited_s: float, calls: tuple[int, int]) -> EnvironmentUse:
        """The use with one more reply: `calls` are calls of tools, and how many of these were errors."""
        return EnvironmentUse(self.wait_s + waited_s, self.calls + calls[0], self.errors + calls[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMark:
    """When a step ended, and what the generators had done by then."""

    ended_s: float
    resumed_segments: int
    """Partial rollouts that went on."""
    generators: GeneratorStats
    controller_cpu_s: float
    """Processor seconds of this process since its start."""
    calls: int
    """Calls made to executors so far."""
    environment: EnvironmentUse
    dropped_groups: int
    """Replaced by others, as their rewards were all equal."""
    journal_s: float
    """Seconds spent on the journal so far."""


def of_episodes(groups: Sequence[RolloutGroup], mark: StepMark, previous: StepMark) -> dict[str, float]:
    """Turns of the policy and tokens of the environment in a step, and how long rollouts waited for it meanwhile."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [rollout.num_turns for rollout in rollouts]
    num_tokens = sum(rollout.num_tokens for rollout in rollouts)
    num_observed = num_tokens - sum(int(rollout.is_sampled_T.sum()) for rollout in rollouts)
    return {
        "turns_mean": float(np.mean(turns)),
        "turns_max": float(max(turns)),
        "observed_share": num_observed / max(num_tokens, 1),
        "observed_tokens_mean": num_observed / len(rollouts),
        "replies_raised": sum(result.reason.startswith(RAISED) for group in groups for result in group.results),
        "environment_wait_s": mark.environment.wait_s - previous.environment.wait_s,
        "tool_calls": mark.environment.calls - previous.environment.calls,
        "tool_errors": mark.environment.errors - previous.environment.errors,
    }


def entropy_mean(rollouts: Sequence[Rollout]) -> float:
    """Entropy of what tokens were sampled from, in nats per token: the mean of -log p of those that were sampled
    estimates it without bias. NaN: there are none."""
    num = sum(int(one.is_sampled_T.sum()) for one in rollouts if len(one.behavior_logprobs_T))
    # The log-probabilities of observed tokens are 0.
    return -sum(float(one.behavior_logprobs_T.sum()) for one in rollouts) / num if num else float("nan")
