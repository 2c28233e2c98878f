"""Attention of a step's tokens to each other and the KV cache, by the C++ kernel on CPUs; see `torch_attention.py`.

A step is a list of runs of blocks with the tokens that see them (`Tasks`): the prefix of each group, seen by all its
rollouts at once and so read once; each rollout's own tokens; and for each chunk of prefill what is cached before it
and, causally, itself. The tasks of a prefix come before those of own tokens, in decode as in prefill, so a token's
attention has the same bits whether it was decoded or prefilled.

Shape suffixes: B decode rows, N packed tokens, H query heads, J kv heads, K head dim, M blocks of one rollout (at
most).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from llamarl.generation.kv_cache import BLOCK_SIZE, KVCache
from llamarl.generation.rows import Rows
from llamarl.generation.scheduler import Chunk
from llamarl.kernels import attention, gpu
from llamarl.kernels.attention import PagedAttention, Tasks


def backend_name(cache: KVCache) -> str:
    """Name for the log of what attends to this cache: `c++ avx2`, `triton`, or `torch` and why."""
    if cache.library is not None:
        return f"c++ {attention.instructions(cache.library)}"
    if cache.decode is not None:
        return "triton"
    device, on_cpu = cache.device, cache.device.type == "cpu"
    why = attention.unusable(cache.dtype, device, cache.head_dim) if on_cpu else gpu.reason("decode", device)
    return f"torch ({why})"


class KernelAttention:
    """`attend` of one step."""

    def __init__(
        self, cache: KVCache, rows: Rows, chunks: list[Chunk], blocks_N: np.ndarray, offsets_N: np.ndarray
    ) -> None:
        """Packed are one token of each row, then those of each chunk.

        Args:
            blocks_N: the block that each token's own keys and values go to.
            offsets_N: their place in the block.
        """
        assert cache.library is not None
        tasks = _tasks(rows, chunks, blocks_N * BLOCK_SIZE + offsets_N)
        self.cached = cache.keys_L_C_J_K_S, cache.values_L_C_J_S_K
        """Keys and values of all layers, as in `KVCache`."""
        self.paged = PagedAttention(cache.library, tasks, *(one[0] for one in self.cached))

    def __call__(self, layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        return self.paged(q_N_H_K, k_N_J_K, v_N_J_K, *(one[layer] for one in self.cached))


def _tasks(rows: Rows, chunks: list[Chunk], slots_N: np.ndarray) -> Tasks:
    count = len(rows)
    shared, members, blocks = _shared_runs(rows, chunks)
    own_B_M = rows.blocks_R_M[:count]
    tokens_B = rows.length_R[:count] + 1
    num_blocks_B = -(-tokens_B // BLOCK_SIZE)
    own_blocks = own_B_M[np.arange(own_B_M.shape[1]) < num_blocks_B[:, None]]
    decode_B_5 = np.zeros((count, 5), np.int64)
    decode_B_5[:, 0] = np.arange(count)
    decode_B_5[:, 1] = 1
    decode_B_5[:, 2] = num_blocks_B.cumsum() - num_blocks_B
    decode_B_5[:, 3] = tokens_B
    # Members and blocks of the rows' own tasks lie first, so those of the others are counted from behind them.
    others = np.array(shared, np.int64).reshape(-1, 5) + np.array((count, 0, len(own_blocks), 0, 0))
    return Tasks(
        table=np.concatenate((others, decode_B_5)),
        members=np.concatenate((np.arange(count), np.array(members, np.int64))),
        blocks=np.concatenate((own_blocks, np.array(blocks, np.int64))),
        slots_N=slots_N,
    )


def _shared_runs(rows: Rows, chunks: list[Chunk]) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Tasks of prefixes and of chunks, with their members and blocks."""
    table, members, blocks = list[tuple[int, ...]](), list[int](), list[int]()

    def add(tokens: list[int] | range, run: list[int], num_tokens: int, step: int) -> None:
        if num_tokens:
            table.append((len(members), len(tokens), len(blocks), num_tokens, step))
            members.extend(tokens)
            blocks.extend(run)

    for group, rows_G in rows.of_groups().items():
        add(rows_G, group.prefix.blocks, group.prefix_tokens, 0)
    start = len(rows)
    for chunk in chunks:
        tokens = range(start, start + chunk.stop - chunk.start)
        start = tokens.stop
        if chunk.sequence is not None:
            add(tokens, chunk.group.prefix.blocks, chunk.group.prefix_tokens, 0)
        segment = chunk.group.prefix if chunk.sequence is None else chunk.sequence.own
        add(tokens, segment.blocks, chunk.start + 1, 1)
    return table, members, blocks
