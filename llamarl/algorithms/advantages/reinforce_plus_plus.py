"""Rewards normalized over the whole batch (REINFORCE++, arXiv 2501.03262), without a critic or groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import Advantage, GroupRewards


@dataclass(frozen=True)
class ReinforcePlusPlus(Advantage):
    """A_t = (R_t - mean(R)) / (std(R) + epsilon) over all valid tokens, with R_t the reward of token t and later ones.

    Without rewards of single tokens R_t is the reward of the response. Rollouts of one prompt need not differ, so a
    group of one learns too. All advantages are 0 if all returns of the batch are equal.
    """

    epsilon: float = 1e-8
    """Bounds the advantages of a batch with nearly equal rewards."""

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        returns = [[rewards_T[::-1].cumsum()[::-1] for rewards_T in group.token_rewards] for group in groups]
        valid = [
            returns_T
            for group, of_group in zip(groups, returns, strict=True)
            for returns_T, is_valid in zip(of_group, group.valid_G, strict=True)
            if is_valid
        ]
        tokens = np.concatenate([np.empty(0), *valid])
        if (tokens == tokens[:1]).all():  # exactly 0, although the mean may be rounded
            return [[np.zeros(len(returns_T)) for returns_T in of_group] for of_group in returns]
        mean, scale = tokens.mean(), tokens.std() + self.epsilon
        return [
            [
                (returns_T - mean) / scale if is_valid else np.zeros(len(returns_T))
                for returns_T, is_valid in zip(of_group, group.valid_G, strict=True)
            ]
            for group, of_group in zip(groups, returns, strict=True)
        ]
