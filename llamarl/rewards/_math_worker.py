r"""The worker of the `math` reward: runs math-verify on one pair, without its own timeouts.

Two things differ from math-verify's defaults. Only the given expression is read, without a search in surrounding text.
Numbers that it calls equal after rounding must also be equal within a relative tolerance.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Equality, FiniteSet, Interval, MatrixBase, N, Tuple

from llamarl.rewards._math_text import RELATIVE_TOLERANCE

EQUAL, DIFFERENT, NO_ANSWER, NO_GOLD = "equal", "different", "no answer", "no gold"

_BOX_ONLY = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its timeouts are off, as intended


def compare(job: tuple[str, list[str]]) -> str:
    """Compares expressions with a gold. Returns EQUAL if all equal it, else why not."""
    gold, answers = job
    golds = _parse_gold(gold)
    if not golds:
        return NO_GOLD
    for answer in answers:
        parsed = _parse(answer)
        if not parsed:
            return NO_ANSWER
        if not verify(golds, parsed, timeout_seconds=0):
            return DIFFERENT
        if "%" not in gold + answer and not _near(golds[0], parsed[0]):
            return DIFFERENT
    return EQUAL


def _parse(text: str) -> list[Any]:
    return parse(
        rf"\boxed{{{text}}}",
        [_BOX_ONLY],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=0,
    )


_parse_gold = lru_cache(maxsize=64)(_parse)  # a group of rollouts has one gold


def _near(gold: Any, answer: Any) -> bool:
    """Returns False if numbers in the same place differ by more than the relative tolerance."""
    pairs = zip(_numbers(gold), _numbers(answer), strict=False)
    tolerance = float(RELATIVE_TOLERANCE)
    return all(abs(N(exact - number, 20)) <= (abs(N(exact, 20)) or 1) * tolerance for exact, number in pairs)


def _numbers(value: Any) -> list[Any]:
    """Returns the numbers that `value` consists of, in the same order for equal values, or none if it has other
    parts."""
    match value:
        case Equality():
            numbers = [value.rhs]
        case Interval():
            numbers = [value.start, value.end]
        case FiniteSet() | Tuple():
            numbers = list(value.args)
        case MatrixBase():
            numbers = list(value.flat())
        case _:
            numbers = [value]
    if not all(number.is_number and number.is_comparable for number in numbers):
        return []
    return sorted(numbers, key=N) if isinstance(value, (FiniteSet, Tuple)) else numbers
