"""GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1) without its KL term."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def grpo(base: RunConfig) -> RunConfig:
    """PPO's clip at 0.2, rewards normalized in their group, every response with the same weight."""
    return layered(base, {"trainer": {"loss": {"name": "grpo", "clip": 0.2}, "advantage": "group_normalized"}})
