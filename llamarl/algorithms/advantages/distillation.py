"""On-policy distillation: a teacher judges each token that the policy sampled (GKD, arXiv 2306.13649, section 3, with
the reverse KL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages._base import GroupRewards, TeacherAdvantage
from llamarl.algorithms.advantages.group_mean import GroupMean


@dataclass(frozen=True)
class Distillation(TeacherAdvantage):
    """A_t = coefficient (log teacher(y_t) - log pi(y_t)) + reward_weight (R - mean(R) of the group).

    The first term is the reward of the token alone, minus the k1 estimate of KL(pi || teacher), so its expected
    gradient is that of the divergence at this token. Later tokens do not count.
    """

    reward_weight: float = 0.0
    """Weight of the task's reward beside the teacher. 0 learns from the teacher alone."""

    def __post_init__(self) -> None:
        if not self.reward_weight >= 0:
            raise ValueError(f"reward_weight = {self.reward_weight} must not be negative")

    @property
    def compares(self) -> bool:
        return self.reward_weight > 0

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        return [self._of_group(group) for group in groups]

    def _of_group(self, group: GroupRewards) -> list[np.ndarray]:
        advantages_G = self.reward_weight * GroupMean()(group.scores_G, group.valid_G)
        divergences = group.divergences or [np.zeros(len(rewards_T)) for rewards_T in group.token_rewards]
        return [
            divergence_T + advantage if valid else np.zeros(len(divergence_T))
            for divergence_T, advantage, valid in zip(divergences, advantages_G, group.valid_G, strict=True)
        ]
