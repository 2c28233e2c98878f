"""`BlockPool`: which blocks of the KV cache are free. No torch."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Numbered blocks. The one released last is taken first, so memory that was never used stays untouched."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block; there must be one."""
        block = self._free.pop()
        self._is_free[block] = False
        return block

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            assert not self._is_free[block], f"block {block} released twice"
            self._is_free[block] = True
            self._free.append(block)
