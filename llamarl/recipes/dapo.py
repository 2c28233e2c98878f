"""DAPO (arXiv 2503.14476, section 3): wider clip upwards, dynamic sampling, mean over tokens, overlong punishment."""

from __future__ import annotations

from llamarl.config import RunConfig
from llamarl.recipes._base import layered


def dapo(base: RunConfig) -> RunConfig:
    """Groups whose rewards are all equal are replaced, up to 10 attempts; no KL term."""
    return layered(
        base,
        {
            "rollout": {"max_attempts": 10},
            "trainer": {
                "loss": {"name": "dapo", "clip_low": 0.2, "clip_high": 0.28},
                "advantage": "group_normalized",
            },
            "shaping": {"overlong_penalty": 1.0},
        },
    )
