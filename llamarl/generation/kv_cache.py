"""`KVCache`: keys and values of all cached tokens, in blocks.

Shape suffixes: L layers, C blocks, J kv heads, S tokens of one block, K head dim, N packed tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.sequence import Segment

BLOCK_SIZE = 16
"""Tokens per block. Half a block per rollout is lost; smaller blocks cost more in bookkeeping than they save."""


class KVCache:
    """Preallocated storage. Memory of blocks that were never used is not touched."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        self.keys_L_C_J_S_K = torch.empty(shape, dtype=dtype, device=device)
        self.values_L_C_J_S_K = torch.empty(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.device = device

    @staticmethod
    def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block, keys and values of all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * BLOCK_SIZE * dtype.itemsize

    def clear(self, blocks: list[int]) -> None:
        """Zero new blocks: attention multiplies what lies behind the last token by 0, and 0 * NaN is NaN."""
        blocks_C = torch.tensor(blocks, device=self.device)
        self.keys_L_C_J_S_K.index_fill_(1, blocks_C, 0)
        self.values_L_C_J_S_K.index_fill_(1, blocks_C, 0)

    def slots(self, blocks_N: np.ndarray, offsets_N: np.ndarray) -> Tensor:
        """Where `write` puts each kv head of each token: rows of [C * J * S], int64 [N * J]."""
        heads_J = np.arange(self.num_kv_heads)
        slots_N_J = (blocks_N[:, None] * self.num_kv_heads + heads_J) * BLOCK_SIZE + offsets_N[:, None]
        return torch.from_numpy(slots_N_J.reshape(-1)).to(self.device)

    def write(self, layer: int, slots_NJ: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> None:
        """Store the keys and values of packed tokens."""
        self.keys_L_C_J_S_K[layer].view(-1, self.head_dim).index_copy_(0, slots_NJ, k_N_J_K.reshape(-1, self.head_dim))
        self.values_L_C_J_S_K[layer].view(-1, self.head_dim).index_copy_(
            0, slots_NJ, v_N_J_K.reshape(-1, self.head_dim)
        )

    def read(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Keys and values of a segment's cached tokens, each [J, N, K]."""
        blocks_C = torch.tensor(segment.blocks, dtype=torch.int64, device=self.device)
        pair = (self.keys_L_C_J_S_K[layer], self.values_L_C_J_S_K[layer])
        keys, values = (
            stored.index_select(0, blocks_C).transpose(0, 1).flatten(1, 2)[:, : segment.num_cached] for stored in pair
        )
        return keys, values
