"""`BlockPool`: which blocks of the KV cache are free. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Numbered blocks, handed out from either end, lowest or highest first.

    Both ends stay dense that way, and decode attention reads a contiguous range of blocks without a copy.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._free = [True] * num_blocks
        # Heaps keep ids that were taken from the other end; those are dropped when they come up.
        self._low = list(range(num_blocks))
        self._high = [-block for block in reversed(range(num_blocks))]
        self._in_low = [True] * num_blocks
        self._in_high = [True] * num_blocks

    def take_low(self) -> int:
        """The free block with the smallest id; there must be one."""
        while True:
            block = heapq.heappop(self._low)
            self._in_low[block] = False
            if self._free[block]:
                return self._take(block)

    def take_high(self) -> int:
        """The free block with the largest id; there must be one."""
        while True:
            block = -heapq.heappop(self._high)
            self._in_high[block] = False
            if self._free[block]:
                return self._take(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            assert not self._free[block], f"block {block} released twice"
            self._free[block] = True
            self.num_free += 1
            if not self._in_low[block]:
                self._in_low[block] = True
                heapq.heappush(self._low, block)
            if not self._in_high[block]:
                self._in_high[block] = True
                heapq.heappush(self._high, -block)

    def _take(self, block: int) -> int:
        self._free[block] = False
        self.num_free -= 1
        return block
