"""Intervals hold what they say: closed forms, and the share of simulated evaluations whose interval holds the truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.observability.metrics import ERRORS_95, chances, effective_num, pass_at_k, share_error, wilson
from tests.nightly import crossed

SIMULATED = 1500
"""Evaluations of each kind; the share that is found has a standard error of 0.006 around 0.95."""
Difficulty = Callable[[np.random.Generator, int], np.ndarray]
DIFFICULTIES: dict[str, tuple[float, Difficulty]] = {
    "all alike": (0.3, lambda _, num: np.full(num, 0.3)),
    "easy or hard": (0.5, lambda rng, num: rng.beta(0.5, 0.5, num)),
    "some in between": (0.5, lambda rng, num: rng.beta(2, 2, num)),
    "mostly hard": (0.1, lambda rng, num: rng.beta(0.2, 1.8, num)),
    "mostly easy": (0.9, lambda rng, num: rng.beta(9, 1, num)),
    "always or never": (0.7, lambda rng, num: (rng.random(num) < 0.7).astype(float)),
}
"""Mean chance that a sample is right, and chances of so many problems."""


def coverage(kind: str, num: int, k: int, *, as_if_independent: bool = False) -> float:
    """Share of simulated evaluations whose interval holds the mean chance of all problems of the kind."""
    rng, (mean, draw), num_held = np.random.default_rng([num, k]), DIFFICULTIES[kind], 0
    for _ in range(SIMULATED):
        right = rng.binomial(k, draw(rng, num)).tolist()
        worth = num * k if as_if_independent else effective_num(right, [k] * num)
        low, high = wilson(sum(right) / (num * k), worth)
        num_held += low <= mean <= high
    return num_held / SIMULATED


class TestWilson:
    @given(right=st.integers(0, 40), num=st.integers(1, 40))
    def test_its_ends_solve_the_quadratic(self, right: int, num: int) -> None:
        """(p - x)^2 = z^2 x (1 - x) / n, Wilson 1927, for both ends x."""
        share = min(right, num) / num
        for end in wilson(share, num):
            assert (share - end) ** 2 == pytest.approx(ERRORS_95**2 * end * (1 - end) / num, abs=1e-12)
        low, high = wilson(share, num)
        assert 0 <= low <= share <= high <= 1
        assert high - low > 0

    def test_known_values(self) -> None:
        """Newcombe, Statistics in Medicine 17 (1998), table I."""
        for right, num, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
            assert wilson(right / num, num) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
        assert wilson(1.0, 29) == (pytest.approx(0.8830, abs=1e-4), 1.0)

    def test_nothing_is_known_of_nothing(self) -> None:
        assert all(map(math.isnan, (*wilson(0.5, 0), *wilson(math.nan, 0), share_error(0.5, 0))))

    def test_half_of_it_at_one_error(self) -> None:
        low, high = wilson(0.3, 50, errors=1.0)
        assert share_error(0.3, 50) == pytest.approx((high - low) / 2)


class TestSeveralSamples:
    @given(st.lists(st.integers(0, 1), min_size=1, max_size=50))
    def test_one_sample_each_is_the_number_of_problems(self, right: list[int]) -> None:
        assert effective_num(right, [1] * len(right)) == len(right)

    @given(st.lists(st.booleans(), min_size=1, max_size=50), st.integers(1, 16))
    def test_equal_samples_say_no_more_than_one(self, right: list[bool], k: int) -> None:
        found = effective_num([k * one for one in right], [k] * len(right))
        assert found == pytest.approx(len(right))

    @given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=40))
    def test_it_lies_between_problems_and_samples(self, counts: list[tuple[int, int]]) -> None:
        right, judged = [min(one, num) for one, num in counts], [num for _, num in counts]
        alike = sum(judged) ** 2 / sum(num**2 for num in judged)
        assert alike * (1 - 1e-9) <= effective_num(right, judged) <= sum(judged) * (1 + 1e-9)

    def test_independent_samples_are_nearly_all_worth_one(self) -> None:
        """Of 2,000 problems that are alike, eight samples each."""
        right = np.random.default_rng(0).binomial(8, 0.3, 2000)
        assert 0.9 * 16_000 < effective_num(right.tolist(), [8] * 2000) <= 16_000

    def test_the_variance_of_the_mean_closed_form(self) -> None:
        """Problems of chance a or b, half and half: p (1 - p) / (spread / n + (p (1 - p) - spread) / (n k))."""
        rng, num, k = np.random.default_rng(1), 40_000, 4
        chance = np.where(np.arange(num) % 2, 0.2, 0.6)
        spread, whole = 0.04, 0.4 * 0.6
        wanted = whole / (spread / num + (whole - spread) / (num * k))
        assert effective_num(rng.binomial(k, chance).tolist(), [k] * num) == pytest.approx(wanted, rel=0.02)

    def test_none_was_judged(self) -> None:
        assert effective_num([], []) == 0

    @pytest.mark.parametrize(
        ("kind", "samples"), crossed(DIFFICULTIES, [(15, 4), (30, 16), (100, 1), (100, 8), (400, 4)])
    )
    def test_coverage(self, kind: str, samples: tuple[int, int]) -> None:
        """Problems are drawn anew each time, and their samples: 95 % of all intervals hold the mean of all problems. Of
        few answers there are few shares, and Wilson's own interval jumps between 90 and 98 %."""
        num, k = samples
        assert coverage(kind, num, k) > (0.9 if num < 30 else 0.92)

    def test_all_samples_as_if_independent_would_be_wrong(self) -> None:
        """The test above can tell: Wilson's interval of n k answers holds the truth in half of the cases."""
        assert coverage("easy or hard", 30, 16, as_if_independent=True) < 0.7


class TestPassAtK:
    @given(num=st.integers(1, 8), data=st.data())
    def test_it_is_the_mean_over_all_draws(self, num: int, data: st.DataObject) -> None:
        right, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
        draws = list(combinations([True] * right + [False] * (num - right), k))
        assert pass_at_k(num, right, k) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))))

    def test_it_is_unbiased(self) -> None:
        """Chen et al., section 2.1: its mean is 1 - (1 - p)^k."""
        right = np.random.default_rng(2).binomial(10, 0.3, 200_000)
        each = np.array([pass_at_k(10, count, 4) for count in range(11)])
        assert each[right].mean() == pytest.approx(1 - 0.7**4, abs=2e-3)

    @pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
    def test_of_which_k(self, samples: int, ks: list[int]) -> None:
        assert chances(samples) == ks
