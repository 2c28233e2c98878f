"""Reward minus the mean of the group: the baseline of the LlamaRL paper (arXiv 2505.24034, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import Advantage


@dataclass(frozen=True)
class GroupMean(Advantage):
    """A_i = r_i - mean(r) over the valid rollouts; all 0 when fewer than two are valid."""

    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        if valid_G.sum() < 2:
            return np.zeros(len(rewards_G))
        rewards_G = np.where(valid_G, rewards_G, 0.0)
        return np.where(valid_G, rewards_G - rewards_G.sum() / valid_G.sum(), 0.0)
