"""Reward minus the group's mean, over its standard deviation (GRPO, arXiv 2402.03300, equation 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import GroupAdvantage


@dataclass(frozen=True)
class GroupNormalized(GroupAdvantage):
    """A_i = (r_i - mean(r)) / (std(r) + epsilon) over the valid rollouts; all 0 if their rewards are equal."""

    epsilon: float = 1e-4
    """Bounds the advantages of groups with nearly equal rewards."""

    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        valid_rewards = rewards_G[valid_G]
        if (valid_rewards == valid_rewards[:1]).all():  # exactly 0, although the mean may be rounded
            return np.zeros(len(rewards_G))
        mean = valid_rewards.mean()
        return (np.where(valid_G, rewards_G, mean) - mean) / (valid_rewards.std(ddof=1) + self.epsilon)
