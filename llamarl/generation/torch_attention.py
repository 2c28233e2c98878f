"""Paged attention by torch alone, for GPUs and where there is no compiler: eager steps and graphed ones share it.

Each row reads its own blocks, those of the shared prefix first, through a table; products and sums are in float32.

Shape suffixes: B decode rows, N packed tokens, H query heads, J kv heads, r query heads per kv head, K head dim, M
blocks of one row (at most), S tokens of one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.generation.kv_cache import BLOCK_SIZE, KVCache
from llamarl.generation.rows import Rows
from llamarl.generation.scheduler import Chunk
from llamarl.generation.sequence import Group


class TorchAttention:
    """`attend` of one step: packed are first one token per row, then the tokens of each chunk."""

    def __init__(
        self,
        cache: KVCache,
        blocks_N: Tensor,
        offsets_N: Tensor,
        table_B_M: Tensor,
        prefix_B: Tensor,
        own_B: Tensor,
        chunks: Sequence[Chunk] = (),
    ) -> None:
        """
        Args:
            blocks_N: the block that each token's own keys and values go to, and `offsets_N` their place in it.
            table_B_M: see `block_table`, as `prefix_B` and `own_B`.
        """
        self._cache, self._blocks_N, self._offsets_N, self._table_B_M = cache, blocks_N, offsets_N, table_B_M
        self._valid_B_M_S = valid_places(prefix_B, own_B, table_B_M.shape[1])
        self._chunks = chunks

    def __call__(self, layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        self._cache.write(layer, self._blocks_N, self._offsets_N, k_N_J_K, v_N_J_K)
        sizes = [len(self._table_B_M), *(chunk.stop - chunk.start for chunk in self._chunks)]
        q_B_H_K, *of_chunks = q_N_H_K.split(sizes)
        parts = [self._prefill(layer, chunk, q) for chunk, q in zip(self._chunks, of_chunks, strict=True)]
        if not len(q_B_H_K):
            return torch.cat(parts)
        out_B_H_K = attend_to_table(self._cache, layer, q_B_H_K, self._table_B_M, self._valid_B_M_S)
        return torch.cat((out_B_H_K, *parts)) if parts else out_B_H_K

    def _prefill(self, layer: int, chunk: Chunk, q_N_H_K: Tensor) -> Tensor:
        """Causal attention of one chunk to all that is cached before it and to itself."""
        keys_J_N_K, values_J_N_K = self._cache.read(layer, chunk.group.prefix)
        if chunk.sequence is None:
            seen = chunk.stop
            keys_J_N_K, values_J_N_K = keys_J_N_K[:, :seen], values_J_N_K[:, :seen]
        else:
            own_keys, own_values = self._cache.read(layer, chunk.sequence.own)
            seen = chunk.group.prefix_tokens + chunk.stop
            keys_J_N_K = torch.cat((keys_J_N_K, own_keys), dim=1)[:, :seen]
            values_J_N_K = torch.cat((values_J_N_K, own_values), dim=1)[:, :seen]
        count = len(q_N_H_K)
        mask = None
        if count < seen:
            mask = torch.ones(count, seen, dtype=torch.bool, device=q_N_H_K.device).tril_(seen - count)
        # Batched products in bfloat16 took 7 times as long as in float32 on the CPU.
        dtype = torch.float32 if self._cache.device.type == "cpu" else self._cache.dtype
        out_1_H_N_K = F.scaled_dot_product_attention(
            *(x[None].to(dtype) for x in (q_N_H_K.transpose(0, 1), keys_J_N_K, values_J_N_K)),
            attn_mask=mask, is_causal=mask is None, enable_gqa=q_N_H_K.shape[1] != keys_J_N_K.shape[0],
        )  # fmt: skip
        return out_1_H_N_K[0].transpose(0, 1).to(q_N_H_K.dtype)


def attend_to_table(cache: KVCache, layer: int, q_B_H_K: Tensor, table_B_M: Tensor, valid_B_M_S: Tensor) -> Tensor:
    """softmax(q K / sqrt(head dim)) V of each row over the valid places of its blocks, [B, H, K]."""
    keys_B_M_J_K_S, values_B_M_J_S_K = (
        stored[layer].index_select(0, table_B_M.flatten()).unflatten(0, table_B_M.shape).float()
        for stored in (cache.keys_L_C_J_K_S, cache.values_L_C_J_S_K)
    )
    q_B_1_J_r_K = q_B_H_K.float().unflatten(1, (cache.num_kv_heads, -1))[:, None]
    scores_B_M_J_r_S = (q_B_1_J_r_K * cache.head_dim**-0.5) @ keys_B_M_J_K_S
    scores_B_M_J_r_S = scores_B_M_J_r_S.masked_fill(~valid_B_M_S[:, :, None, None], -math.inf)
    probs_B_J_r_MS = torch.softmax(scores_B_M_J_r_S.permute(0, 2, 3, 1, 4).flatten(3), -1)
    probs_B_M_J_r_S = probs_B_J_r_MS.unflatten(3, (-1, BLOCK_SIZE)).permute(0, 3, 1, 2, 4)
    out_B_J_r_K = (probs_B_M_J_r_S @ values_B_M_J_S_K).sum(1)
    return out_B_J_r_K.flatten(1, 2).to(q_B_H_K.dtype)


def valid_places(prefix_B: Tensor, own_B: Tensor, num_blocks: int) -> Tensor:
    """Where tokens are in the blocks of each row, bool [B, M, S]: `prefix_B` tokens, then `own_B` from the next block
    on."""
    place_M_S = torch.arange(num_blocks * BLOCK_SIZE, device=own_B.device).view(num_blocks, BLOCK_SIZE)
    prefix_B, own_B = prefix_B[:, None, None], own_B[:, None, None]
    start_B = (prefix_B + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    return (place_M_S < prefix_B) | ((place_M_S >= start_B) & (place_M_S < start_B + own_B))


def block_table(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of each row, int64 [B, M], tokens of its prefix and of its own, this step's included, [B] each.

    Places behind a row's blocks name its first own one: masked, yet multiplied by 0, which leaves NaN of others.
    """
    prefixes = [sequence.group.prefix.blocks for sequence in rows.sequences]
    own_B = rows.length_R[: len(rows)] + 1
    start_B, num_own_B = np.array([len(blocks) for blocks in prefixes], np.int64), -(-own_B // BLOCK_SIZE)
    table_B_M = rows.blocks_R_M[: len(rows), :1].repeat(int((start_B + num_own_B).max(initial=0)), 1)
    for table_M, blocks, own_M, num_own in zip(table_B_M, prefixes, rows.blocks_R_M, num_own_B, strict=False):
        table_M[: len(blocks)] = blocks
        table_M[len(blocks) : len(blocks) + num_own] = own_M[:num_own]
    prefix_B = np.array([sequence.group.prefix_tokens for sequence in rows.sequences], np.int64)
    return table_B_M, prefix_B, own_B


def rows_of_groups(rows: Rows) -> dict[Group, list[int]]:
    """Rows by the prefix that they share."""
    members: dict[Group, list[int]] = {}
    for row, sequence in enumerate(rows.sequences):
        members.setdefault(sequence.group, []).append(row)
    return members
