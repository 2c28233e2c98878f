"""Paged attention for GPUs, and where there is no C++ compiler: eager steps and graphed ones share it.

Each row reads its own blocks, those of the shared prefix first, through a table: by `parts/cuda/decode.py` where that
runs, else by torch, which gathers them. Products and sums are in float32.

Shape suffixes: B decode rows, N packed tokens, H query heads, J kv heads, r query heads per kv head, K head dim, M
blocks of one row (at most), S tokens of one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.generation.inputs import StepInputs
from llamarl.generation.kv_cache import BLOCK_SIZE, KVCache
from llamarl.generation.scheduler import Chunk
from llamarl.models.flash_attention import can_serve, flash_of_last


class TorchAttention:
    """`attend` of one step: packed are first one token per row, then the tokens of each chunk."""

    def __init__(self, cache: KVCache, inputs: StepInputs, chunks: Sequence[Chunk] = ()) -> None:
        self._cache, self._inputs = cache, inputs
        self._block_N, self._offset_N = inputs.block_N.long(), inputs.offset_N.long()
        self._places = [_places(chunk, cache.device) for chunk in chunks]
        self._sizes = [len(inputs.own_B), *(chunk.stop - chunk.start for chunk in chunks)]
        if cache.decode is None:
            self._table_B_M = inputs.table_B_M()
            self._valid_B_M_S = valid_places(inputs.prefix_B, inputs.own_B, self._table_B_M.shape[1])

    def __call__(self, layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        self._cache.write(layer, self._block_N, self._offset_N, k_N_J_K, v_N_J_K)
        return self._read(layer, q_N_H_K)

    @property
    def rotates(self) -> bool:
        """`rotated` can be called."""
        return self._cache.ops is not None

    def rotated(self, layer: int, *arguments: Any) -> Tensor:
        """Attention for queries, keys and values not normed and rotated yet; takes what `ops.rotate` takes besides."""
        cache, places = self._cache, (self._inputs.block_N, self._inputs.offset_N)
        assert cache.ops is not None
        cached = cache.keys_L_C_J_K_S[layer], cache.values_L_C_J_S_K[layer]
        return self._read(layer, cache.ops.rotate_and_write(*arguments, cached, places))

    def _read(self, layer: int, q_N_H_K: Tensor) -> Tensor:
        q_B_H_K, *of_chunks = q_N_H_K.split(self._sizes)
        parts = [self._prefill(layer, places, q) for places, q in zip(self._places, of_chunks, strict=True)]
        if not len(q_B_H_K):
            return torch.cat(parts)
        out_B_H_K = self._decode(layer, q_B_H_K)
        return torch.cat((out_B_H_K, *parts)) if parts else out_B_H_K

    def _decode(self, layer: int, q_B_H_K: Tensor) -> Tensor:
        cache, inputs = self._cache, self._inputs
        if cache.decode is None:
            return attend_to_table(cache, layer, q_B_H_K, self._table_B_M, self._valid_B_M_S)
        stored = cache.keys_L_C_J_K_S[layer], cache.values_L_C_J_S_K[layer]
        rows = inputs.table, inputs.width, inputs.prefix_B, inputs.own_B
        return cache.decode.decode_attention(q_B_H_K, *stored, *rows)

    def _prefill(self, layer: int, places_2_N: Tensor, q_N_H_K: Tensor) -> Tensor:
        """Causal attention of one chunk to all that is cached before it and to itself."""
        keys_J_N_K, values_J_N_K = self._cache.read(layer, *places_2_N)
        count, seen = len(q_N_H_K), places_2_N.shape[1]
        # Batched products in bfloat16 took 7 times as long as in float32 on the CPU.
        dtype = torch.float32 if self._cache.device.type == "cpu" else q_N_H_K.dtype
        given = [x[None].to(dtype) for x in (q_N_H_K.transpose(0, 1), keys_J_N_K, values_J_N_K)]
        if can_serve(q_N_H_K.device, dtype, self._cache.head_dim):
            return flash_of_last(*given)[0].transpose(0, 1)
        mask = None
        if count < seen:
            mask = torch.ones(count, seen, dtype=torch.bool, device=q_N_H_K.device).tril_(seen - count)
        out_1_H_N_K = F.scaled_dot_product_attention(
            *given, attn_mask=mask, is_causal=mask is None, enable_gqa=q_N_H_K.shape[1] != keys_J_N_K.shape[0],
        )  # fmt: skip
        return out_1_H_N_K[0].transpose(0, 1).to(q_N_H_K.dtype)


def attend_to_table(cache: KVCache, layer: int, q_B_H_K: Tensor, table_B_M: Tensor, valid_B_M_S: Tensor) -> Tensor:
    """softmax(q K / sqrt(head dim)) V of each row over the valid places of its blocks, [B, H, K]."""
    keys_B_M_J_K_S, values_B_M_J_S_K = cache.blocks(layer, table_B_M)
    q_B_1_J_r_K = q_B_H_K.float().unflatten(1, (cache.num_kv_heads, -1))[:, None]
    scores_B_M_J_r_S = (q_B_1_J_r_K * cache.head_dim**-0.5) @ keys_B_M_J_K_S
    scores_B_M_J_r_S = scores_B_M_J_r_S.masked_fill(~valid_B_M_S[:, :, None, None], -math.inf)
    probs_B_J_r_MS = torch.softmax(scores_B_M_J_r_S.permute(0, 2, 3, 1, 4).flatten(3), -1)
    probs_B_M_J_r_S = probs_B_J_r_MS.unflatten(3, (-1, BLOCK_SIZE)).permute(0, 3, 1, 2, 4)
    out_B_J_r_K = (probs_B_M_J_r_S @ values_B_M_J_S_K).sum(1)
    return out_B_J_r_K.flatten(1, 2).to(q_B_H_K.dtype)


def valid_places(prefix_B: Tensor, own_B: Tensor, num_blocks: int) -> Tensor:
    """Places of tokens in the blocks of each row, bool [B, M, S]: `prefix_B` tokens, then `own_B` from the next block
    on."""
    place_M_S = torch.arange(num_blocks * BLOCK_SIZE, device=own_B.device).view(num_blocks, BLOCK_SIZE)
    prefix_B, own_B = prefix_B[:, None, None], own_B[:, None, None]
    start_B = (prefix_B + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    return (place_M_S < prefix_B) | ((place_M_S >= start_B) & (place_M_S < start_B + own_B))


def _places(chunk: Chunk, device: torch.device) -> Tensor:
    """Blocks of all tokens that the last one of a chunk sees, and the places in them, int64 [2, N]."""
    prefix, own = chunk.group.prefix, chunk.sequence.own if chunk.sequence else None
    runs = [(prefix, chunk.stop if own is None else chunk.group.prefix_tokens), *([(own, chunk.stop)] if own else [])]
    place_N = np.concatenate([np.arange(count) for _, count in runs])
    block_N = np.concatenate([np.repeat(segment.blocks, BLOCK_SIZE)[:count] for segment, count in runs])
    return torch.from_numpy(np.stack((block_N, place_N % BLOCK_SIZE))).to(device, torch.int64, non_blocking=True)
