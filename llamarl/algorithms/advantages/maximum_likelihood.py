"""Reward minus the group's mean, over the mean: gradient of the log of the success rate (MaxRL, arXiv 2602.02710)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import GroupAdvantage
from llamarl.algorithms.advantages.group_mean import GroupMean


@dataclass(frozen=True)
class MaximumLikelihood(GroupAdvantage):
    """A_i = (r_i - mean(r)) / mean(r) over the valid rollouts, for rewards of 0 and 1.

    Hard prompts weigh more: at success rate p, 1 / p times as much as with `group_mean`. The divisor is at least 1 / n,
    the smallest mean of n such rewards that is not 0, so other rewards are safe too.
    """

    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        valid_rewards = rewards_G[valid_G]
        if not len(valid_rewards):
            return np.zeros(len(rewards_G))
        return GroupMean()(rewards_G, valid_G) / max(valid_rewards.mean(), 1 / len(valid_rewards))
