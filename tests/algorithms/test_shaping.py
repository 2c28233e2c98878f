"""What length costs, against closed forms."""

from __future__ import annotations

import numpy as np

from llamarl.algorithms.shaping import length_share, overlong_share


def test_every_token_costs_the_same() -> None:
    np.testing.assert_array_equal(length_share(np.array([0, 5, 20]), 20), [0.0, 0.25, 1.0])


def test_soft_overlong_punishment_is_dapos() -> None:
    """DAPO's equation 13 with L_max 20480 and L_cache 4096: 0, ((L_max - L_cache) - |y|) / L_cache, -1 beyond."""
    lengths_G = np.array([0, 16384, 16385, 18432, 20479, 20480, 30000])
    expected_G = [0.0, 0.0, 1 / 4096, 0.5, 4095 / 4096, 1.0, 1.0]
    np.testing.assert_array_equal(overlong_share(lengths_G, 20480, 4096), expected_G)
