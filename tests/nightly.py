"""What `make test` leaves to `make test-all`: repetition, and runs that take long."""

from __future__ import annotations

import os
from typing import Any

import pytest

NIGHTLY = os.environ.get("LLAMARL_NIGHTLY") == "1"


def examples(number: int) -> int:
    """So many of hypothesis at night; by day a third, the same ones each time (`tests/conftest.py`)."""
    return number if NIGHTLY else -(-number // 3)


def also(*cases: Any) -> tuple[Any, ...]:
    """Further cases that only `make test-all` runs."""
    return cases if NIGHTLY else ()


def nightly(why: str) -> pytest.MarkDecorator:
    """Marks a test that only `make test-all` runs."""
    return pytest.mark.skipif(not NIGHTLY, reason=f"`make test-all` does it: {why}")
