"""Reward minus the mean of the group: the baseline of the LlamaRL paper (arXiv 2505.24034, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import GroupAdvantage


@dataclass(frozen=True)
class GroupMean(GroupAdvantage):
    """A_i = r_i - mean(r) over the valid rollouts; all 0 if their rewards are equal."""

    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        valid_rewards = rewards_G[valid_G]
        if (valid_rewards == valid_rewards[:1]).all():  # exactly 0, although the mean may be rounded
            return np.zeros(len(rewards_G))
        mean = valid_rewards.mean()
        return np.where(valid_G, rewards_G, mean) - mean
