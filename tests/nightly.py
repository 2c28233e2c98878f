"""What `make test` leaves to `make test-all`: repetition, and runs that take long."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

NIGHTLY = os.environ.get("LLAMARL_NIGHTLY") == "1"


def examples(number: int) -> int:
    """So many of hypothesis at night; by day a fifth, the same ones each time (`tests/conftest.py`)."""
    return number if NIGHTLY else -(-number // 5)


def also(*cases: Any) -> tuple[Any, ...]:
    """Further cases that only `make test-all` runs."""
    return cases if NIGHTLY else ()


def some(cases: Iterable[Any], number: int) -> list[Any]:
    """All cases at night; by day so many of them, the first, the last, and others as far from each other as they go."""
    every = list(cases)
    if NIGHTLY or len(every) <= number:
        return every
    return [every[round(index * (len(every) - 1) / max(1, number - 1))] for index in range(number)]


def crossed(*lists: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns all combinations of values; by day the fewest in which each value of each list occurs."""
    values = [list(one) for one in lists]
    if NIGHTLY:
        return list(product(*values))
    return [tuple(one[number % len(one)] for one in values) for number in range(max(map(len, values)))]


def nightly(why: str) -> pytest.MarkDecorator:
    """Marks a test that only `make test-all` runs."""
    return pytest.mark.skipif(not NIGHTLY, reason=f"`make test-all` does it: {why}")
