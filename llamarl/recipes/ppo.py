"""PPO with a critic (arXiv 1707.06347; for language models arXiv 2203.02155, section 3.5): advantages of tokens, not of
groups, so that one rollout per prompt can be enough."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def ppo(base: RunConfig) -> RunConfig:
    """PPO's clip at 0.2, generalized advantage estimation, and a price per token for leaving the first policy."""
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
