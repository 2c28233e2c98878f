"""Base classes of advantages. Plain numpy. Shape suffixes: G rollouts of one group, T tokens of one rollout."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRewards:
    """Rewards of the rollouts of one group."""

    token_rewards: tuple[np.ndarray, ...]
    """Per rollout, float64 [T]: penalties at their tokens, and the reward of the response at its last token."""
    valid_G: np.ndarray
    """bool. False for rollouts that failed or whose reward is invalid: their rewards are meaningless."""
    values: tuple[np.ndarray, ...] = ()
    """Per rollout, float [T]: a critic's prediction, before each token, of the reward of that token and later ones. ()
    means that there is no critic."""
    is_sampled: tuple[np.ndarray, ...] = ()
    """Per rollout, bool [T]: False for tokens that an environment wrote, which earn nothing. () means that all were
    sampled."""
    scores_G: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Reward of each response less its penalties, without those of single tokens, float64. Part of the reward of the
    last token."""
    baseline: float = math.nan
    """Reward of the greedy response. NaN means that there is none or that it is invalid."""

    @property
    def rewards_G(self) -> np.ndarray:
        """Rewards of whole rollouts, float64 [G]."""
        return np.array([rewards_T.sum() for rewards_T in self.token_rewards], np.float64)

    def spread(self, advantages_G: np.ndarray) -> list[np.ndarray]:
        """Returns the advantage of each rollout for all of its tokens."""
        pairs = zip(self.token_rewards, advantages_G, strict=True)
        return [np.full(len(rewards_T), advantage) for rewards_T, advantage in pairs]


class Advantage(ABC):
    """Computes how much better each token was than expected. Dataclass fields are options."""

    NEEDS_GREEDY: ClassVar[bool] = False
    """Whether each group needs a greedy response in addition to its rollouts. It is not trained on."""

    @abstractmethod
    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        """Returns float64 [T] per group and rollout; 0 for invalid rollouts."""


class GroupAdvantage(Advantage):
    """Compares the rollouts of one group. All tokens of a rollout have its advantage."""

    @abstractmethod
    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        """Returns advantages, float64 [G]; 0 if `valid_G` is False.

        Args:
            rewards_G: float64. Entries are meaningless if `valid_G` is False.
            valid_G: bool. False for rollouts that failed or whose reward is invalid.
        """

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        return [group.spread(self(group.rewards_G, group.valid_G)) for group in groups]


class TeacherAdvantage(Advantage):
    """Learns from the log-probabilities of a teacher, so a run with it has `reference.kl_in = "reward"`. Groups with
    equal rewards teach, too."""

    @property
    @abstractmethod
    def compares(self) -> bool:
        """Whether the rollouts of a group are compared, too."""


class ValueAdvantage(Advantage):
    """Compares with the values of a critic, so a run with it has a critic executor."""

    @abstractmethod
    def estimate(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        """Returns advantages per group and rollout before normalization, float64 [T]. The critic learns their sum with
        the values."""
