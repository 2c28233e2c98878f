"""On-policy distillation from a teacher (GKD, arXiv 2306.13649): the policy samples, the teacher judges each token."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def distillation(base: RunConfig) -> RunConfig:
    """Learns from the teacher in `reference.path` alone. `trainer.advantage.reward_weight` adds the task's reward."""
    return layered(
        base,
        {
            "trainer": {"advantage": "distillation"},
            "reference": {"kl_coefficient": 1.0, "kl_in": "reward", "kl_estimator": "k1"},
        },
    )
