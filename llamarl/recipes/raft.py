"""RAFT (arXiv 2304.06767): imitate the responses that did better than their group."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def raft(base: RunConfig) -> RunConfig:
    """Imitates, where rewards are 0 and 1, the right responses, unless all of their group are right."""
    return layered(base, {"trainer": {"loss": "raft", "advantage": "group_mean"}})
