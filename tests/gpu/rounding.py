"""Decode attention over long contexts, with sums as a GPU rounds them. Runs where `guard.begin` has been called."""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.generation.attention import BLOCK_SIZE, KVCache, attend_to_table, valid_places
from tests.gpu.pretend import GPU, values_of

HEADS, HEAD_DIM = 2, 16


def of_attention(num_tokens: int) -> float:
    """Of decode attention, relative to float64."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    k_T_1_K, v_T_1_K, q_1_H_K = _inputs(num_tokens)
    cache = KVCache(
        num_layers=1, num_blocks=num_blocks, num_kv_heads=1, head_dim=HEAD_DIM, dtype=torch.bfloat16, device=GPU
    )
    cache.keys_L_C_J_K_S.zero_()
    cache.values_L_C_J_S_K.zero_()
    places_T = torch.arange(num_tokens, device=GPU)
    cache.write(0, places_T // BLOCK_SIZE, places_T % BLOCK_SIZE, k_T_1_K.to(GPU), v_T_1_K.to(GPU))
    prefix_B, own_B = torch.zeros(1, dtype=torch.int64, device=GPU), torch.full((1,), num_tokens, device=GPU)
    table_B_M = torch.arange(num_blocks, device=GPU)[None]
    found_1_H_K = attend_to_table(cache, 0, q_1_H_K.to(GPU), table_B_M, valid_places(prefix_B, own_B, num_blocks))
    return _apart(found_1_H_K, _weighted(num_tokens).sum(0))


def of_atomics(num_tokens: int) -> float:
    """Of the same sum by atomics in bfloat16."""
    parts_T_H_K = _weighted(num_tokens)
    sums_1_H_K = torch.zeros(1, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=GPU)
    index_T = torch.zeros(num_tokens, dtype=torch.int64, device=GPU)
    return _apart(sums_1_H_K.index_add_(0, index_T, parts_T_H_K.bfloat16().to(GPU)), parts_T_H_K.sum(0))


def _inputs(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(num_tokens, 1, HEAD_DIM, generator=generator) for _ in range(2))
    return keys.bfloat16(), (values + 0.5).bfloat16(), torch.randn(1, HEADS, HEAD_DIM, generator=generator).bfloat16()


def _weighted(num_tokens: int) -> Tensor:
    """What each token adds, float64 [T, H, K]."""
    k_T_1_K, v_T_1_K, q_1_H_K = (one.double() for one in _inputs(num_tokens))
    return torch.softmax(k_T_1_K[:, 0] @ q_1_H_K[0].T / HEAD_DIM**0.5, 0)[:, :, None] * v_T_1_K


def _apart(found_1_H_K: Tensor, exact_H_K: Tensor) -> float:
    return float((values_of(found_1_H_K)[0].double() - exact_H_K).norm() / exact_H_K.norm())
