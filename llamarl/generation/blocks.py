"""`BlockPool`: which blocks of the KV cache are free. `PrefixIndex`: which of them hold the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class BlockPool:
    """Numbered blocks with reference counts. The pool takes the block that was released last first, so memory that was
    never used stays untouched."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._num_users = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Returns a free block, with one user; there must be one."""
        block = self._free.pop()
        self._num_users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a user to a block that is in use."""
        assert self._num_users[block], f"block {block} is free"
        self._num_users[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Removes one user from each block. Returns the blocks that are free now."""
        freed = list[int]()
        for block in blocks:
            assert self._num_users[block], f"block {block} released twice"
            self._num_users[block] -= 1
            if not self._num_users[block]:
                freed.append(block)
        self._free += freed
        return freed


class PrefixIndex:
    """Finds full blocks with the keys and values of a prompt's first tokens, computed by the weights in use. Prompts
    with the same beginning (a system prompt, examples) then prefill it once.

    A block's key is its tokens and the block before it. A user of a block also uses the blocks before it, so a key is
    valid as long as its own block is in use.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = dict[tuple[int, bytes], int]()
        self._keys = dict[int, tuple[int, bytes]]()

    def add(self, prompt_T: np.ndarray, blocks: list[int], start: int, stop: int) -> None:
        """Registers the blocks that tokens `start` to `stop` of a prompt have filled."""
        for place in range(start // self._block_size, stop // self._block_size):
            key = self._key(prompt_T, blocks[place - 1] if place else -1, place)
            if key not in self._blocks:
                self._blocks[key] = blocks[place]
                self._keys[blocks[place]] = key

    def find(self, prompt_T: np.ndarray, num_tokens: int) -> list[int]:
        """Returns blocks that hold the longest known beginning of the first `num_tokens` tokens of a prompt."""
        found = list[int]()
        for place in range(num_tokens // self._block_size if self._blocks else 0):
            block = self._blocks.get(self._key(prompt_T, found[-1] if found else -1, place))
            if block is None:
                break
            found.append(block)
        return found

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops blocks that are free now."""
        for block in blocks:
            if key := self._keys.pop(block, None):
                del self._blocks[key]

    def clear(self) -> None:
        """Drops everything: the weights have changed."""
        self._blocks.clear()
        self._keys.clear()

    def _key(self, prompt_T: np.ndarray, before: int, place: int) -> tuple[int, bytes]:
        return before, prompt_T[place * self._block_size : (place + 1) * self._block_size].tobytes()
