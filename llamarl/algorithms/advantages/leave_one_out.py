"""Reward minus the mean of the others in the group (RLOO: Kool et al. 2019; arXiv 2402.14740, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import GroupAdvantage
from llamarl.algorithms.advantages.group_mean import GroupMean


@dataclass(frozen=True)
class LeaveOneOut(GroupAdvantage):
    """A_i = r_i - mean of r_j, j != i, over the n valid rollouts: unbiased, n / (n - 1) times `group_mean`."""

    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        count = int(valid_G.sum())
        return GroupMean()(rewards_G, valid_G) * (count / max(count - 1, 1))
