"""How large groups are, as far as it takes to say which way they go to the trainer."""

from __future__ import annotations

import random
from time import thread_time
from typing import Any

import pytest

from llamarl.controller.ports import _num_characters

CASES: list[Any] = [
    {"solution": "x" * 5000, "test_list": [f"assert f({n}) == {'y' * 200}" for n in range(30)]},
    {"io": [{"input": [123456] * 900, "output": "7" * 20_000} for _ in range(20)]},
    {"family": "sums", "depth": 3, "nested": {"more": ["a" * 100, ("b" * 50, 1.5)]}},
]


@pytest.mark.parametrize("metadata", CASES)
def test_metadata_is_as_large_as_its_text_about(metadata: Any) -> None:
    assert _num_characters(metadata) == pytest.approx(len(str(metadata)), rel=0.3)


def test_nobody_writes_out_what_is_long() -> None:
    """A list of a million numbers, or a text of megabytes, takes no time of the controller."""
    long = {"numbers": [random.random()] * 1_000_000, "texts": ["z" * 10_000_000] * 3}
    start_s = thread_time()
    assert _num_characters(long) > 30_000_000
    taken_s, start_s = thread_time() - start_s, thread_time()
    assert len(str(long)) > 30_000_000
    assert taken_s < (thread_time() - start_s) / 10
    assert _num_characters({}) == _num_characters([]) == 0
