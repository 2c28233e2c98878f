from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.blocks import BlockPool


@settings(deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["low", "high", "release"]), st.integers(0, 99)), max_size=80),
)
def test_pool_hands_out_the_outermost_free_block_and_conserves_blocks(
    num_blocks: int, actions: list[tuple[str, int]]
) -> None:
    pool, free = BlockPool(num_blocks), set(range(num_blocks))
    for action, pick in actions:
        used = sorted(set(range(num_blocks)) - free)
        if action == "release" and used:
            block = used[pick % len(used)]
            pool.release([block])
            free.add(block)
        elif action != "release" and free:
            block = pool.take_low() if action == "low" else pool.take_high()
            assert block == (min(free) if action == "low" else max(free))
            free.remove(block)
        assert pool.num_free == len(free)
