r"""Work of a worker of the `math` reward: math-verify on one pair, its own time-outs off.

Departures from math-verify's defaults: only the given expression is read (nothing is looked for in surrounding text),
and numbers that it calls equal after rounding must also be equal within a relative tolerance.
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

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off, which is meant


def compare(job: tuple[str, list[str]]) -> str:
    """(gold, expressions) -> EQUAL when every expression equals the gold, otherwise why not."""
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
    """False when numbers in the same place differ by more than the relative tolerance."""
    pairs = zip(_numbers(gold), _numbers(answer), strict=False)
    return all(abs(N(one - other, 20)) <= (abs(N(one, 20)) or 1) * float(RELATIVE_TOLERANCE) for one, other in pairs)


def _numbers(value: Any) -> list[Any]:
    """The numbers that `value` consists of, in an order that equal values share; empty when it has others too."""
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
