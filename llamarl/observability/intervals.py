"""Intervals of shares of right answers, and chances of k samples.

The uncertainty is that of the problems: an interval says where the share would lie on all problems of the same kind, of
which these were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import comb

ERRORS_95 = 1.959963984540054
"""Standard errors that hold 95 % of a normal distribution."""
_ALIKE = 2
"""Problems that an estimate of the spread between problems counts as if there were more: all samples of them alike."""


def wilson(share: float, num: float, errors: float = ERRORS_95) -> tuple[float, float]:
    """Wilson's score interval of `errors` standard errors, as if each of `num` were right or wrong; NaN where num is 0.

    Unlike share ± error it is within 0 and 1, and has a width where all are wrong, or all right.
    """
    if not num > 0 or math.isnan(share):
        return math.nan, math.nan
    center = (share + errors**2 / (2 * num)) / (1 + errors**2 / num)
    half = _half(share, num, errors)
    return center - half if share > 0 else 0.0, center + half if share < 1 else 1.0


def share_error(share: float, num: float) -> float:
    """Half of Wilson's score interval at one standard error; NaN where num is 0."""
    return _half(share, num, 1.0) if num > 0 else math.nan


def _half(share: float, num: float, errors: float) -> float:
    spread = max(share * (1 - share), 0.0) / num + errors**2 / (4 * num**2)
    return errors * math.sqrt(spread) / (1 + errors**2 / num)


def effective_num(right: Sequence[int], judged: Sequence[int]) -> float:
    """Independent answers that those of problems with several samples are worth, for an interval of their share.

    Samples of one problem are alike, so that 16 of each of 30 problems say less than 480 problems do. It is p (1 - p)
    over the variance of p = sum(right) / sum(judged), a ratio of sums over problems, and lies between their number (all
    samples of a problem alike; so it is of one sample each, exactly) and that of the samples. As few problems tell
    little of their spread, two that are alike are counted with it; docs/evaluation.md has the coverage.

    Args:
        right: right answers of each problem.
        judged: answers of each problem that were judged; at least one.
    """
    num_answers = sum(judged)
    if not num_answers:
        return 0.0
    share = sum(right) / num_answers
    num_alike = num_answers**2 / sum(num**2 for num in judged)
    residuals = sum((one - share * num) ** 2 for one, num in zip(right, judged, strict=True))
    num_problems, spread = len(judged), share * (1 - share)
    if not residuals or num_problems < 2:
        apart = num_alike if not spread or num_problems < 2 else float(num_answers)
    else:
        apart = spread * num_answers**2 * (num_problems - 1) / (num_problems * residuals)
    apart, weight = min(max(apart, num_alike), num_answers), _ALIKE / (num_problems + _ALIKE)
    return apart / (1 + weight * (apart / num_alike - 1))


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples, drawn from `num_samples` without replacement, is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def chances(samples: int) -> list[int]:
    """Values of k of which pass@k is reported: powers of two below `samples`, and that."""
    return [1 << power for power in range(samples.bit_length()) if 1 << power < samples] + [samples]
