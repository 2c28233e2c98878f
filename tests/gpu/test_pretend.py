"""The pretended GPU refuses what a GPU refuses, and counts what it costs there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import refusals
from tests.gpu.conftest import Run
from tests.nightly import nightly


@nightly("pretends each device; by day other tests of this folder pretend one")
@pytest.mark.parametrize("refusal", refusals.REFUSALS, ids=lambda one: one.__name__)
def test_it_refuses(on_gpu: Run, refusal: Callable[[], None]) -> None:
    assert on_gpu(refusals.refused, refusal.__name__) == refusals.REFUSALS[refusal]


@nightly("a pretended GPU of its own; test_memory.py counts on one by day")
def test_it_counts_and_computes(on_gpu: Run) -> None:
    found, replayed, gradient = on_gpu(refusals.counted)
    assert replayed == [2, 4, 6, 8], "of the values that came after the capture"
    assert gradient == [2, 2, 2, 2]
    assert (sum(found.uploads.values()), sum(found.downloads.values())) == (3, 2)
    assert sum(found.syncs.values()) == 5, "two copies to the host, a mask, a number, and a copy that waits its turn"
