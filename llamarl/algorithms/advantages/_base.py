"""Base classes of advantages. Plain numpy. Shape suffixes: G rollouts of one group, T tokens of one rollout."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRewards:
    """Rewards that the rollouts of one group have earned."""

    token_rewards: tuple[np.ndarray, ...]
    """Per rollout, float64 [T]: penalties where they arise, the reward of the response at its last token."""
    valid_G: np.ndarray
    """bool; False for rollouts that failed or whose reward is invalid: their rewards are meaningless."""
    values: tuple[np.ndarray, ...] = ()
    """Per rollout, float [T]: what a critic expects of each token and those after it, before the token is known; ()
    without a critic."""
    is_sampled: tuple[np.ndarray, ...] = ()
    """Per rollout, bool [T]: False for tokens that an environment wrote, which earn nothing; (): all were sampled."""
    baseline: float = math.nan
    """Reward of the greedy response; NaN where there is none or it could not be judged."""

    @property
    def rewards_G(self) -> np.ndarray:
        """Rewards of whole rollouts, float64 [G]."""
        return np.array([rewards_T.sum() for rewards_T in self.token_rewards], np.float64)

    def spread(self, advantages_G: np.ndarray) -> list[np.ndarray]:
        """The advantage of each rollout for all of its tokens."""
        return [np.full(len(one), value) for one, value in zip(self.token_rewards, advantages_G, strict=True)]


class Advantage(ABC):
    """A measure of how much better each token was than what was to be expected. Dataclass fields are options."""

    NEEDS_GREEDY: ClassVar[bool] = False
    """Whether each group needs a greedy response beside its rollouts, which nobody learns from."""

    @abstractmethod
    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        """Per group and rollout, float64 [T]; 0 for invalid rollouts."""


class GroupAdvantage(Advantage):
    """Compares the rollouts of one group; all tokens of a rollout have its advantage."""

    @abstractmethod
    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        """Advantages, float64 [G]; 0 where `valid_G` is False.

        Args:
            rewards_G: float64; entries where `valid_G` is False are meaningless.
            valid_G: bool; False for rollouts that failed or whose reward is invalid.
        """

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        return [group.spread(self(group.rewards_G, group.valid_G)) for group in groups]


class ValueAdvantage(Advantage):
    """Compares with the values of a critic, so a run that names one has a critic executor."""

    @abstractmethod
    def estimate(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        """Advantages per group and rollout before normalization, float64 [T]; plus values, what a critic learns."""
