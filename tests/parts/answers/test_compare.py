"""Intervals of two models' difference on the same problems hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llamarl.observability.metrics import ERRORS_95, share_error
from llamarl.parts.answers.compare import paired_difference
from tests.nightly import crossed

SIMULATED = 1500
"""Evaluations of each kind; the share that is found has a standard error of 0.006 around 0.95."""


def test_the_closed_form_of_one_sample_each() -> None:
    """Bonett and Price 2012, equation 6: 10 pairs that only the first gets right, 3 only the other, of 60."""
    pairs = [(1.0, 0.0)] * 10 + [(0.0, 1.0)] * 3 + [(1.0, 1.0)] * 30 + [(0.0, 0.0)] * 17
    found = paired_difference([one for one, _ in pairs], [other for _, other in pairs])
    first, other = 11 / 62, 4 / 62
    half = ERRORS_95 * math.sqrt((first + other - (first - other) ** 2) / 62)
    assert found == pytest.approx((7 / 60, first - other - half, first - other + half))


def test_the_same_answers_have_no_difference_and_a_width() -> None:
    found, low, high = paired_difference([0.5, 1.0, 0.0], [0.5, 1.0, 0.0])
    assert found == 0
    assert low < 0 < high
    assert low == -high
    assert all(map(math.isnan, paired_difference([], [])))


@pytest.mark.parametrize(("gain", "k"), crossed([0.0, 0.05, 0.2], [1, 4]))
def test_coverage(gain: float, k: int) -> None:
    rng, held = np.random.default_rng([k, int(100 * gain)]), list[bool]()
    for _ in range(SIMULATED):
        before = rng.beta(0.5, 0.5, 100)
        after = before + gain * (1 - before)  # which adds gain / 2 on average
        found = paired_difference((rng.binomial(k, after) / k).tolist(), (rng.binomial(k, before) / k).tolist())
        held.append(found[1] <= gain / 2 <= found[2])
    assert np.mean(held) > 0.93


def test_pairs_tell_more_than_two_intervals() -> None:
    """What both find hard cancels."""
    rng = np.random.default_rng(3)
    hard = rng.random(300) < 0.5
    before = hard & (rng.random(300) < 0.95)
    after = hard | (rng.random(300) < 0.05)
    _, low, high = paired_difference(after.astype(float).tolist(), before.astype(float).tolist())
    apart = math.hypot(*(ERRORS_95 * share_error(float(one.mean()), 300) for one in (before, after)))
    assert (high - low) / 2 < 0.6 * apart
