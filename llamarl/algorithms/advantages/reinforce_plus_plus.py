"""Rewards normalized over the whole batch (REINFORCE++, arXiv 2501.03262), without a critic or groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import Advantage, GroupRewards


@dataclass(frozen=True)
class ReinforcePlusPlus(Advantage):
    """A_t = (R_t - mean(R)) / (std(R) + epsilon), R_t what token t and those after it earn, over all valid tokens.

    Without rewards of single tokens R_t is the reward of the response. One prompt's rollouts need not differ, so a
    group of one learns, too; all 0 where all returns of the batch are equal.
    """

    epsilon: float = 1e-8
    """Keeps a batch with nearly equal rewards from being blown up."""

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        returns = [[one[::-1].cumsum()[::-1] for one in group.token_rewards] for group in groups]
        valid = [
            returns_T
            for group, of_group in zip(groups, returns, strict=True)
            for returns_T, is_valid in zip(of_group, group.valid_G, strict=True)
            if is_valid
        ]
        tokens = np.concatenate([np.empty(0), *valid])
        if (tokens == tokens[:1]).all():  # exactly 0, where the mean would be rounded
            return [[np.zeros(len(one)) for one in of_group] for of_group in returns]
        mean, scale = tokens.mean(), tokens.std() + self.epsilon
        return [
            [
                (one - mean) / scale if is_valid else np.zeros(len(one))
                for one, is_valid in zip(of_group, group.valid_G, strict=True)
            ]
            for group, of_group in zip(groups, returns, strict=True)
        ]
