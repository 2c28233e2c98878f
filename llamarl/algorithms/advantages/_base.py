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
    """Reward of each response less its penalties, without those of single tokens, float64."""
    divergences: tuple[np.ndarray, ...] = ()
    """Per rollout, float64 [T]: minus the penalty of each token for leaving the reference, which is part of
    `token_rewards`. () means that there is none."""
    turns: tuple[np.ndarray, ...] = ()
    """Per rollout, int [T]: number of the turn of each token. () means one turn each."""
    turn_returns: tuple[np.ndarray, ...] = ()
    """Per rollout, float64 [turns]: what the tokens of each turn learn from. () means the rewards of whole rollouts."""
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
        return [self._by_turn(group) if group.turns else self._by_rollout(group) for group in groups]

    def _by_rollout(self, group: GroupRewards) -> list[np.ndarray]:
        return group.spread(self(group.rewards_G, group.valid_G))

    def _by_turn(self, group: GroupRewards) -> list[np.ndarray]:
        """Compares the n-th turns of a group with each other, for each n. Rollouts without this turn do not count."""
        advantages = [np.zeros(len(returns)) for returns in group.turn_returns]
        for turn in range(max(map(len, group.turn_returns), default=0)):
            has_turn_G = np.array([len(returns) > turn for returns in group.turn_returns])
            rewards_G = np.array([returns[turn] if len(returns) > turn else 0.0 for returns in group.turn_returns])
            found_G = self(rewards_G, group.valid_G & has_turn_G)
            for of_rollout, advantage, has_turn in zip(advantages, found_G, has_turn_G, strict=True):
                if has_turn:
                    of_rollout[turn] = advantage
        return [of_rollout[turn_T] for of_rollout, turn_T in zip(advantages, group.turns, strict=True)]


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
