"""Losses and rewards of a user, named by `package.module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses
from llamarl.rewards._base import Reward, invalid
from llamarl.types import RewardItem, RewardResult


@dataclass(frozen=True)
class BrokenLoss(Loss):
    """Raises in the trainer."""

    LEARNS_WITHOUT_ADVANTAGE = True

    def token_losses(self, positions: Positions) -> TokenLosses:
        raise ZeroDivisionError("the user's loss is broken")


@dataclass(frozen=True)
class InfiniteLoss(Loss):
    """Has no finite value for one response in each group."""

    LEARNS_WITHOUT_ADVANTAGE = True

    def token_losses(self, positions: Positions) -> TokenLosses:
        is_second_N = positions.sequence_N == 1
        loss_N = (-positions.logprobs_N).masked_fill(is_second_N, float("inf"))
        return TokenLosses(loss_N=loss_N, capped_N=is_second_N)


@dataclass
class BrokenReward(Reward):
    """Raises in the reward executor."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        raise ZeroDivisionError("the user's reward is broken")


@dataclass
class Undecided(Reward):
    """Judges nothing."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [invalid("the user's reward cannot say") for _ in items]
