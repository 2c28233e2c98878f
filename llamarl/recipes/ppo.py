"""PPO with a critic (arXiv 1707.06347; for language models arXiv 2203.02155, section 3.5). Advantages are per token and
not per group, so one rollout per prompt is enough."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def ppo(base: RunConfig) -> RunConfig:
    """Sets PPO's clip range of 0.2, generalized advantage estimation, and a KL penalty to the initial policy."""
    return layered(
        base,
        {
            "trainer": {
                "loss": {"name": "ppo_clip", "clip": 0.2},
                "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95},
            },
            "reference": {"kl_coefficient": 0.01, "kl_in": "reward", "kl_estimator": "k1"},
            "critic": {"clip": 0.2},
        },
    )
