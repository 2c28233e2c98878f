from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.blocks import BlockPool


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=80))
def test_pool_conserves_blocks_and_touches_no_more_than_it_must(
    num_blocks: int, actions: list[tuple[bool, int]]
) -> None:
    pool, free, most = BlockPool(num_blocks), set(range(num_blocks)), 0
    for releases, pick in actions:
        used = sorted(set(range(num_blocks)) - free)
        if releases and used:
            block = used[pick % len(used)]
            pool.release([block])
            free.add(block)
        elif not releases and free:
            block = pool.take()
            free.remove(block)
            most = max(most, num_blocks - len(free))
            assert block < most
        assert pool.num_free == len(free)
    if free:
        with pytest.raises(AssertionError, match="released twice"):
            pool.release([min(free)])
