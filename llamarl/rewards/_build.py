"""Builds one reward from its configuration."""

from __future__ import annotations

from contextlib import ExitStack

from llamarl.config import ConfigError, build
from llamarl.config.schema import RewardConfig
from llamarl.rewards._base import Reward
from llamarl.rewards._weighted import WeightedSum


def build_reward(config: RewardConfig) -> Reward:
    """The reward that `config` describes: a single part of weight 1 as it is, otherwise a weighted sum.

    Raises:
        ConfigError: unknown part, unknown option, or an option or weight that cannot work.
    """
    weights = config.weights or [1.0] * len(config.parts)
    if not any(weights) and not config.model:
        raise ConfigError("reward.weights are all 0, so every reward would be 0; give at least one part a weight")
    with ExitStack() as made:  # a later part that cannot be built must not leave workers of an earlier one
        parts: list[Reward] = []
        for ref in config.parts:
            part = build(ref, "llamarl.rewards", "reward.parts")
            if missing := [name for name in ("score", "close") if not callable(getattr(part, name, None))]:
                raise ConfigError(
                    f"`reward.parts = {ref.name!r}` has no method `{missing[0]}`; derive it from llamarl.rewards.Reward"
                )
            made.callback(part.close)
            parts.append(part)
        reward = parts[0] if len(parts) == 1 and weights == [1.0] else WeightedSum(parts, weights)
        made.pop_all()
    return reward
