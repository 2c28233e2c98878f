"""RLOO (arXiv 2402.14740, section 3.3): REINFORCE with the mean of the other rollouts as baseline, no clip."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def rloo(base: RunConfig) -> RunConfig:
    """The paper samples from the policy in training; a stale token weighs min(pi / mu, 2), a fresh one 1."""
    return layered(base, {"trainer": {"loss": {"name": "reinforce", "truncate": 2.0}, "advantage": "leave_one_out"}})
