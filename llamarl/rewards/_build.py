"""From configuration to one reward."""

from __future__ import annotations

from contextlib import ExitStack

from llamarl.config import build
from llamarl.config.schema import RewardConfig
from llamarl.rewards._base import Reward
from llamarl.rewards._weighted import WeightedSum


def build_reward(config: RewardConfig) -> Reward:
    """The reward that `config` describes: a single part of weight 1 as it is, otherwise a weighted sum.

    Raises:
        ConfigError: unknown part, unknown option, or an option or weight that cannot work.
    """
    weights = config.weights or [1.0] * len(config.parts)
    with ExitStack() as made:  # a later part that cannot be built must not leave workers of an earlier one
        parts: list[Reward] = []
        for ref in config.parts:
            part = build(ref, "llamarl.rewards", "reward.parts")
            made.callback(part.close)
            parts.append(part)
        reward = parts[0] if len(parts) == 1 and weights == [1.0] else WeightedSum(parts, weights)
        made.pop_all()
    return reward
