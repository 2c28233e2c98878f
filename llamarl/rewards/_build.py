"""Builds one reward from its configuration."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from llamarl.config.errors import ConfigError
from llamarl.config.ref import Ref, build, find
from llamarl.rewards._base import Reward
from llamarl.rewards._function_worker import is_coroutine
from llamarl.rewards._weighted import WeightedSum

if TYPE_CHECKING:  # workers of rewards import this package, and need no settings of runs
    from llamarl.config.schema import RewardConfig


def as_part(ref: Ref) -> Ref:
    """Returns a plain function as the part that calls it, and other parts unchanged. Raises ConfigError."""
    if ":" not in ref.name:
        return ref
    function = find(ref.name, "llamarl.rewards", "reward.parts", "")
    if isinstance(function, type) or not callable(function):
        return ref
    name = getattr(function, "__name__", ref.name.rpartition(":")[2])
    options = {"call": ref.name, "curve": name, "is_async": is_coroutine(function)}
    return Ref.model_validate({"name": "function"} | options | ref.options)


def build_reward(config: RewardConfig) -> Reward:
    """Returns the reward that `config` describes: a single part of weight 1, otherwise a weighted sum.

    Raises:
        ConfigError: unknown part, unknown option, or an option or weight that cannot work.
    """
    weights = config.weights or [1.0] * len(config.parts)
    if not any(weights) and not config.model:
        raise ConfigError("reward.weights are all 0, so every reward would be 0; give at least one part a weight")
    names = [str(ref.options.get("curve") or ref.name.rpartition(":")[2]) for ref in map(as_part, config.parts)]
    with ExitStack() as made:  # an error in a later part ends the workers of earlier ones
        parts: list[Reward] = []
        for ref in config.parts:
            part = build(as_part(ref), "llamarl.rewards", "reward.parts")
            if missing := [name for name in ("score", "close") if not callable(getattr(part, name, None))]:
                raise ConfigError(
                    f"`reward.parts = {ref.name!r}` has no method `{missing[0]}`; derive it from llamarl.rewards.Reward"
                )
            made.callback(part.close)
            parts.append(part)
        reward = parts[0] if len(parts) == 1 and weights == [1.0] else WeightedSum(parts, weights, names)
        made.pop_all()
    return reward
