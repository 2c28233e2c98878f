"""AIPO, asynchronous and off-policy (LlamaRL, arXiv 2505.24034, section 6): what a run without a recipe does, too."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def aipo(base: RunConfig) -> RunConfig:
    """One-sided cap of the importance ratio at 4, the group's mean as baseline, rollouts up to one step old."""
    return layered(
        base,
        {
            "rollout": {"max_staleness": 1},
            "trainer": {"loss": {"name": "aipo", "rho": 4.0}, "advantage": "group_mean"},
        },
    )
