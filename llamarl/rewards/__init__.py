"""Rewards: numbers for responses. One file per reward; graders run in processes that can be killed. No torch."""

from llamarl.rewards._base import Reward, invalid, right, wrong
from llamarl.rewards._build import build_reward
from llamarl.rewards._weighted import WeightedSum

__all__ = ["Reward", "WeightedSum", "build_reward", "invalid", "right", "wrong"]
