"""`TorchAttention`: paged attention by torch alone, for GPUs and where there is no compiler.

Decode is batched over blocks, not over rollouts: one small product per block and kv head, `q K`, then the softmax over
all blocks of a rollout, then one product `p V` per block, summed per rollout. Products cost what the tokens that exist
cost, however long the longest rollout is; only the softmax is padded to it. A block of a shared prompt prefix is
multiplied by the queries of all its rollouts at once, so it is read once per group. Both kinds of blocks are dense
ranges of the cache (see `BlockPool`) that the products read in place; only scores and outputs, a small part of the
traffic, are moved.

A *cell* is one kv head of one row, with its `r` = H / J query heads: `row * J + head`. Cells of row B are a dump for
the results of unused blocks.

Shape suffixes: B decode rows, N packed tokens, H query heads, J kv heads, K head dim, S tokens of one block, r query
heads per kv head, C blocks of one kind, G rollouts that share a block (at most), M blocks of one rollout (at most),
W groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        self, cache: KVCache, num_heads: int, rows: Rows, chunks: list[Chunk], blocks_N: np.ndarray,
        offsets_N: np.ndarray,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.chunks = chunks
        # Batched products in bfloat16 took 7 times as long as in float32 on the CPU.
        self._dtype = torch.float32 if cache.device.type == "cpu" else cache.dtype
        self.decode = DecodePlan(cache, rows, num_heads, self._dtype) if len(rows) else None
        self._blocks_N, self._offsets_N = (torch.from_numpy(x).to(cache.device) for x in (blocks_N, offsets_N))

    def __call__(self, layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        self.cache.write(layer, self._blocks_N, self._offsets_N, k_N_J_K, v_N_J_K)
        dtype, q_N_H_K = q_N_H_K.dtype, q_N_H_K.to(self._dtype)
        parts = []
        start = 0
        if self.decode is not None:
            start = self.decode.num_rows
            parts.append(self.decode(layer, q_N_H_K[:start]))
        for chunk in self.chunks:
            stop = start + chunk.stop - chunk.start
            parts.append(self._prefill(layer, chunk, q_N_H_K[start:stop]))
            start = stop
        return torch.cat(parts).to(dtype)

    def _prefill(self, layer: int, chunk: Chunk, q_N_H_K: Tensor) -> Tensor:
        """Causal attention of one chunk to all that is cached before it and to itself."""
        keys_J_N_K, values_J_N_K = self.cache.read(layer, chunk.group.prefix)
        if chunk.sequence is None:
            seen = chunk.stop
            keys_J_N_K, values_J_N_K = keys_J_N_K[:, :seen], values_J_N_K[:, :seen]
        else:
            own_keys, own_values = self.cache.read(layer, chunk.sequence.own)
            seen = chunk.group.prefix_tokens + chunk.stop
            keys_J_N_K = torch.cat((keys_J_N_K, own_keys), dim=1)[:, :seen]
            values_J_N_K = torch.cat((values_J_N_K, own_values), dim=1)[:, :seen]
        count = len(q_N_H_K)
        mask = None
        if count < seen:
            mask = torch.ones(count, seen, dtype=torch.bool, device=q_N_H_K.device).tril_(seen - count)
        out_1_H_N_K = F.scaled_dot_product_attention(
            *(x[None].to(self._dtype) for x in (q_N_H_K.transpose(0, 1), keys_J_N_K, values_J_N_K)),
            attn_mask=mask, is_causal=mask is None, enable_gqa=q_N_H_K.shape[1] != keys_J_N_K.shape[0],
        )  # fmt: skip
        return out_1_H_N_K[0].transpose(0, 1)


class DecodePlan:
    """Decode attention of one step, the same for every layer."""

    def __init__(self, cache: KVCache, rows: Rows, num_heads: int, dtype: torch.dtype) -> None:
        self.cache = cache
        self._dtype = dtype
        self.num_rows = len(rows)
        self.rep = num_heads // cache.num_kv_heads
        own, prefix = _own_blocks(rows), _prefix_blocks(rows)
        self._num_columns = own.num_columns + (prefix.num_columns if prefix else 0)
        # One set of rows more than there are, for the dump.
        table = np.full((self.num_rows + 1) * num_heads * self._num_columns, -1)
        self._sets = [self._block_set(own, 0, table, 0)]
        if prefix:
            self._sets.append(self._block_set(prefix, own.num_columns, table, self._sets[0].num_scores))
        self._num_scores = sum(blocks.num_scores for blocks in self._sets)
        table = table[: self.num_rows * num_heads * self._num_columns]
        # Rollouts have different numbers of blocks: what is missing points to one row of -inf at the end.
        self._table = torch.from_numpy(np.where(table < 0, self._num_scores, table)).to(cache.device)
        self._scores = torch.empty(self._num_scores + 1, BLOCK_SIZE, dtype=dtype, device=cache.device)
        self._scores[-1] = -math.inf

    def __call__(self, layer: int, q_B_H_K: Tensor) -> Tensor:
        count, num_heads, head_dim = q_B_H_K.shape
        keys_C_J_K_S, values_C_J_S_K = self.cache.keys_L_C_J_K_S[layer], self.cache.values_L_C_J_S_K[layer]
        q_cell_rK = q_B_H_K.reshape(-1, self.rep * head_dim)
        start = 0
        for blocks in self._sets:
            stop = start + blocks.num_scores
            keys_CJ_K_S = blocks.of(keys_C_J_K_S).to(self._dtype)
            q_CJ_Gr_K = q_cell_rK.index_select(0, blocks.queries).view(len(keys_CJ_K_S), -1, head_dim)
            scores_CJ_Gr_S = self._scores[start:stop].view(len(keys_CJ_K_S), -1, BLOCK_SIZE)
            torch.baddbmm(blocks.mask_CJ_1_S, q_CJ_Gr_K, keys_CJ_K_S, alpha=head_dim**-0.5, out=scores_CJ_Gr_S)
            start = stop
        padded = self._scores.index_select(0, self._table).view(count * num_heads, -1)
        probs = torch.softmax(padded, dim=-1, dtype=torch.float32).to(self._dtype).view(-1, BLOCK_SIZE)
        out = q_cell_rK.new_zeros((count + 1) * self.cache.num_kv_heads, self.rep * head_dim)
        for blocks in self._sets:
            values_CJ_S_K = blocks.of(values_C_J_S_K).to(self._dtype)
            probs_CJ_Gr_S = probs.index_select(0, blocks.places).view(len(values_CJ_S_K), -1, BLOCK_SIZE)
            out.index_add_(0, blocks.cells, torch.bmm(probs_CJ_Gr_S, values_CJ_S_K).view(-1, self.rep * head_dim))
        return out.view(-1, num_heads, head_dim)[:count]

    def _block_set(self, used: _Used, first_column: int, table: np.ndarray, first_score: int) -> _BlockSet:
        """Index arrays of one kind of blocks; fills `table`, place of a score in the softmax -> row of scores."""
        lowest, stop = int(used.ids_C.min()), int(used.ids_C.max()) + 1
        blocks, local_C, count = slice(lowest, stop), used.ids_C - lowest, stop - lowest
        if count > 2 * len(used.ids_C):
            blocks, local_C, count = self._tensor(used.ids_C), np.arange(len(used.ids_C)), len(used.ids_C)
        num_kv_heads = self.cache.num_kv_heads
        rows_C_1_G = np.full((count, 1, used.rows_C_G.shape[1]), self.num_rows)
        rows_C_1_G[local_C, 0] = used.rows_C_G
        columns_C, fill_C = np.zeros((2, count), np.int64)
        columns_C[local_C] = used.columns_C + first_column
        fill_C[local_C] = used.fill_C
        cells_C_J_G = rows_C_1_G * num_kv_heads + np.arange(num_kv_heads)[:, None]
        heads_C_J_G_r = cells_C_J_G[..., None] * self.rep + np.arange(self.rep)
        places = (heads_C_J_G_r * self._num_columns + columns_C[:, None, None, None]).reshape(-1)
        table[places] = np.arange(first_score, first_score + len(places))
        num_places = self.num_rows * num_kv_heads * self.rep * self._num_columns
        mask_C_S = np.where(np.arange(BLOCK_SIZE) < fill_C[:, None], np.float32(0), np.float32(-np.inf))
        return _BlockSet(
            blocks=blocks,
            num_scores=len(places),
            cells=self._tensor(cells_C_J_G.reshape(-1)),
            queries=self._tensor(np.minimum(cells_C_J_G, self.num_rows * num_kv_heads - 1).reshape(-1)),
            places=self._tensor(np.minimum(places, num_places - 1)),
            mask_CJ_1_S=self._tensor(mask_C_S.repeat(num_kv_heads, axis=0)[:, None]).to(self._dtype),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.cache.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _BlockSet:
    """One kind of blocks in a step: those that the products read, and whose they are."""

    blocks: slice | Tensor
    """A range of the cache, or ids when most of the range would be unused."""
    num_scores: int
    """C * J * G * r rows of scores."""
    cells: Tensor
    """Cells that each (block, kv head) serves, int64 [C * J * G]; G = 1 for own blocks."""
    queries: Tensor
    """The same, with some real cell in place of the dump."""
    places: Tensor
    """Where the softmax has the probabilities of each row of scores, int64 [C * J * G * r]."""
    mask_CJ_1_S: Tensor
    """0 where a token is, -inf behind the last one."""

    def of(self, stored_C_J: Tensor) -> Tensor:
        """Keys [C * J, K, S] or values [C * J, S, K]."""
        if isinstance(self.blocks, slice):
            return stored_C_J[self.blocks].flatten(0, 1)
        return stored_C_J.index_select(0, self.blocks).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Used:
    """Blocks of one kind that hold tokens which the step attends to."""

    ids_C: np.ndarray
    rows_C_G: np.ndarray
    """Rows that see the block; the number of rows means none."""
    columns_C: np.ndarray
    """Place among the blocks of its rollout."""
    fill_C: np.ndarray
    """Tokens in it."""
    num_columns: int


def _own_blocks(rows: Rows) -> _Used:
    """Blocks of the rollouts' own tokens, this step's included."""
    count = len(rows)
    tokens_B = rows.length_R[:count] + 1
    num_columns = -(-int(tokens_B.max()) // BLOCK_SIZE)
    fill_B_M = tokens_B[:, None] - np.arange(num_columns) * BLOCK_SIZE
    rows_C, columns_C = np.nonzero(fill_B_M > 0)
    ids_C = rows.blocks_R_M[rows_C, columns_C]
    fill_C = fill_B_M[rows_C, columns_C]
    return _Used(ids_C, rows_C[:, None], columns_C, fill_C, num_columns)


def rows_of_groups(rows: Rows) -> dict[Group, list[int]]:
    """Rows by the prefix that they share."""
    members: dict[Group, list[int]] = {}
    for row, sequence in enumerate(rows.sequences):
        members.setdefault(sequence.group, []).append(row)
    return members


def _prefix_blocks(rows: Rows) -> _Used | None:
    """Blocks of the prefixes of all groups with a running rollout; None when every prompt is a single token."""
    members = {group: rows_G for group, rows_G in rows_of_groups(rows).items() if group.prefix.blocks}
    if not members:
        return None
    groups = list(members)
    widest = max(len(members[group]) for group in groups)
    rows_W_G = np.full((len(groups), widest), len(rows))
    for i, group in enumerate(groups):
        rows_W_G[i, : len(members[group])] = members[group]
    ids_C = np.concatenate([group.prefix.blocks for group in groups])
    num_blocks_W = np.array([len(group.prefix.blocks) for group in groups])
    columns_C = np.arange(len(ids_C)) - np.repeat(num_blocks_W.cumsum() - num_blocks_W, num_blocks_W)
    tokens_C = np.repeat(np.array([group.prefix_tokens for group in groups]), num_blocks_W)
    return _Used(
        ids_C, np.repeat(rows_W_G, num_blocks_W, axis=0), columns_C, tokens_C - columns_C * BLOCK_SIZE,
        int(num_blocks_W.max()),
    )  # fmt: skip
