from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.blocks import BlockPool, PrefixIndex


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


def test_a_shared_block_is_free_after_its_last_user() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.share(block)
    assert pool.release([block]) == [] and pool.num_free == 2
    assert pool.release([block]) == [block] and pool.num_free == 3
    with pytest.raises(AssertionError, match="is free"):
        pool.share(block)


def test_an_index_finds_full_blocks_of_the_same_beginning_only() -> None:
    index, prompt_T = PrefixIndex(4), np.arange(12, dtype=np.int32)
    index.add(prompt_T, [7, 5, 6], 0, 11)
    other_T = np.append(prompt_T[:6], np.int32([99, 99, 8, 9, 10, 11]))
    assert index.find(prompt_T, 11) == [7, 5] and index.find(prompt_T, 7) == [7] and index.find(other_T, 12) == [7]
    assert index.find(prompt_T[4:], 8) == [], "a block counts with all before it"
    index.forget([5, 1])
    assert index.find(prompt_T, 12) == [7]
    index.clear()
    assert index.find(prompt_T, 12) == []
