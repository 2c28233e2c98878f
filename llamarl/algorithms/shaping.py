"""Reward shaping: penalties for length, as shares. Plain numpy. Shape suffix: G rollouts of one group."""

from __future__ import annotations

import numpy as np

OVERLONG_SHARE = 0.2
"""Last share of the longest response in which the overlong penalty grows, as in DAPO."""


def length_share(num_tokens_G: np.ndarray, max_tokens: int) -> np.ndarray:
    """Returns |y| / max_tokens, float64 [G]: every token costs the same."""
    return num_tokens_G / max_tokens


def overlong_share(num_tokens_G: np.ndarray, max_tokens: int, buffer_tokens: float) -> np.ndarray:
    """Returns 0 up to max_tokens - buffer_tokens, then linear to 1 at max_tokens, float64 [G]: the soft overlong
    punishment of DAPO (arXiv 2503.14476, equation 13) without its sign."""
    return np.clip((num_tokens_G - (max_tokens - buffer_tokens)) / buffer_tokens, 0.0, 1.0)
