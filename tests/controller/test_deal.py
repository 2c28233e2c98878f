"""Balance of `deal`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamarl.controller.flight import deal


@given(loads=st.lists(st.integers(0, 30), min_size=1, max_size=8), num=st.integers(0, 40), weight=st.integers(1, 8))
def test_deal_balances(loads: list[int], num: int, weight: int) -> None:
    before = list(loads)
    dealt = deal(range(num), loads, weight)
    assert loads == before, "the caller's loads are its own"
    assert sorted(item for items in dealt for item in items) == list(range(num))
    assert all(items == sorted(items) for items in dealt), "in order"
    after = [load + weight * len(items) for load, items in zip(loads, dealt, strict=True)]
    for items, load in zip(dealt, after, strict=True):
        # Whoever received was the least loaded before, so ends at most one item above everybody.
        assert not items or load - weight <= min(after)
