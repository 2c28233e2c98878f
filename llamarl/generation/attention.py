"""The memory and attention of a step: the KV cache, a step's inputs on a GPU, and attention to the cache.

`KVCache` holds keys and values of all cached tokens, in blocks. For the C++ kernel neighboring tokens of keys and
neighboring channels of values are adjacent, so both products of attention, q K and p V, read a block as it is.
Elsewhere neighboring channels of both are adjacent, a head of a block is contiguous, and keys are read through a view.
float8 clamps values to its range, and is moved as bytes, which every device can.

`StepInputs` is everything that a step on a GPU reads of its rows, in one array, for a single copy.

`KernelAttention` calls the C++ kernel on CPUs. A step is a list of runs of blocks with the tokens that see them
(`Tasks`): the prefix of each group, seen by all its rollouts at once and so read once; each rollout's own tokens; and
for each chunk of prefill the tokens cached before it and, causally, itself. The tasks of a prefix come before those of
own tokens, in decode as in prefill, so a token's attention has the same bits whether it was decoded or prefilled.

`TorchAttention` is for GPUs, and for machines without a C++ compiler. Eager steps and graphs share it. Each row reads
its blocks, first those of the shared prefix, through a table: by `parts/cuda/decode.py` if that runs, else by torch,
which gathers them. Products and sums are in float32.

Shape suffixes: B decode rows, N packed tokens, L layers, H query heads, J kv heads, r query heads per kv head, K head
dim, C blocks of the cache, M blocks of one rollout (at most), S tokens of one block, W experts of a token in all
layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.generation.rows import Rows
from llamarl.generation.sampler import settings
from llamarl.generation.scheduler import Chunk
from llamarl.kernels import attention, gpu
from llamarl.kernels.attention import BLOCK_SIZE, PagedAttention, Tasks
from llamarl.models.delta_rule import Recur
from llamarl.models.flash_attention import can_serve, flash_of_last
from llamarl.models.memory import kv_token_bytes
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import DecoderSizes

FP8, FP8_MOST = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max


class KVCache:
    """Preallocated storage. Memory of blocks that were never used is not touched."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, num_blocks, num_kv_heads)
        self.library = None if attention.unusable(dtype, device, head_dim) else attention.kernel().library
        """The kernel that reads this cache; None means torch or `decode`."""
        self.decode, self.ops = gpu.kernel("decode", device), gpu.kernel("ops", device)
        """`decode.py` and `ops.py` of `parts/cuda/`; None means torch."""
        keys = (head_dim, BLOCK_SIZE) if self.library else (BLOCK_SIZE, head_dim)
        self.keys_L_C_J_K_S = torch.empty((*shape, *keys), dtype=dtype, device=device)
        if self.library is None:
            self.keys_L_C_J_K_S = self.keys_L_C_J_K_S.transpose(-1, -2)
        self.values_L_C_J_S_K = torch.empty((*shape, BLOCK_SIZE, head_dim), dtype=dtype, device=device)
        self._stored = tuple(
            stored.view(torch.uint8) if dtype == FP8 else stored
            for stored in (self.keys_L_C_J_K_S, self.values_L_C_J_S_K)
        )
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device

    @staticmethod
    def block_bytes(shape: DecoderSizes, dtype: torch.dtype) -> int:
        """Returns the bytes of one block: keys and values of all layers."""
        return BLOCK_SIZE * int(kv_token_bytes(shape, 1, dtype.itemsize))

    def clear(self, blocks: list[int]) -> None:
        """Zeroes new blocks for torch, which multiplies values behind the last token by 0, and 0 * NaN is NaN."""
        if self.library is None and self.decode is None:
            blocks_C = torch.tensor(blocks, device=self.device)
            for stored in self._stored:
                stored.index_fill_(1, blocks_C, 0)

    def write(self, layer: int, blocks_N: Tensor, offsets_N: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> None:
        """Stores the keys and values of packed tokens."""
        keys, values = (stored[layer] for stored in self._stored)
        keys[blocks_N, :, :, offsets_N] = self._rounded(k_N_J_K)
        values[blocks_N, :, offsets_N] = self._rounded(v_N_J_K)

    def read(self, layer: int, blocks_N: Tensor, offsets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of cached tokens, each [J, N, K]."""
        keys, values = (stored[layer] for stored in self._stored)
        read = keys[blocks_N, :, :, offsets_N], values[blocks_N, :, offsets_N]
        keys_J_N_K, values_J_N_K = (x_N_J_K.view(self.dtype).transpose(0, 1) for x_N_J_K in read)
        return keys_J_N_K, values_J_N_K

    def blocks(self, layer: int, table_B_M: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys [B, M, J, K, S] and values [B, M, J, S, K] of the blocks in a table, in float32."""
        keys, values = (
            stored[layer].index_select(0, table_B_M.flatten()).view(self.dtype).unflatten(0, table_B_M.shape).float()
            for stored in self._stored
        )
        return keys, values

    def _rounded(self, x_N_J_K: Tensor) -> Tensor:
        if self.dtype == FP8:
            return x_N_J_K.clamp(-FP8_MOST, FP8_MOST).to(FP8).view(torch.uint8)
        return x_N_J_K.to(self.dtype)


_OF_TOKEN, _OF_ROW = 4, 7
"""Numbers of each token, and of each row, before the table."""


def num_inputs(num_tokens: int, num_rows: int, width: int) -> int:
    """Returns the length of the array of a step's inputs, with `width` blocks of each row."""
    return _OF_TOKEN * num_tokens + _OF_ROW * num_rows + 1 + num_rows * width


class StepInputs:
    """Views of the array."""

    def __init__(self, array: Tensor, num_tokens: int, num_rows: int, routes_N_W: Tensor | None = None) -> None:
        self.routes_N_W = routes_N_W
        """Experts that each token chooses, which the forward fills in; None means that they are not recorded."""
        rows = _OF_TOKEN * num_tokens
        end = rows + _OF_ROW * num_rows
        self.token_N, self.position_N, self.block_N, self.offset_N = array[:rows].view(_OF_TOKEN, num_tokens)
        """`block_N` is the block of each token's keys and values, `offset_N` their place in it."""
        rows_7_B = array[rows:end].view(_OF_ROW, num_rows)
        self.prefix_B, self.own_B = rows_7_B[:2]
        """Tokens of the prefix, and own tokens including this step's."""
        self.settings_5_B = rows_7_B[2:].view(torch.float32)
        """Sampling settings of each row, float32 [5, B]; see `sampler.settings`."""
        self.width, self.table = array[end : end + 1], array[end + 1 :]
        """Blocks of each row: those of its prefix, then own blocks. The next row begins `width` further."""

    def table_B_M(self) -> Tensor:
        """Returns the block table with equal rows, as wide as the array allows. The last column is repeated. Does not
        wait for the device."""
        num_rows = len(self.own_B)
        column_M = torch.arange(len(self.table) // max(num_rows, 1), device=self.table.device)
        row_B = torch.arange(num_rows, device=self.table.device)
        return self.table[row_B[:, None] * self.width + torch.minimum(column_M, self.width - 1)]


def new_routes(shape: ModelShape, num_tokens: int, device: torch.device) -> Tensor | None:
    """Returns memory for the experts of `num_tokens` tokens, or None if the model is not a mixture."""
    if shape.moe is None:
        return None
    dtype = torch.uint8 if shape.moe.route_bytes == 1 else torch.uint16
    return torch.empty(num_tokens, shape.moe.route_width, dtype=dtype, device=device)


def gather_inputs(
    rows: Rows,
    of_tokens: Sequence[np.ndarray],
    device: torch.device,
    padded: int = 0,
    spare_block: int = 0,
    ahead: int = 0,
) -> Tensor:
    """Returns the array of a step's inputs on the host, int32, pinned for a GPU.

    Args:
        of_tokens: ids, positions, blocks for keys and values, and places in these blocks.
        padded: number of rows to pad to. Padding rows read and write a block that nothing else reads.
        ahead: number of tokens of each row that are drawn but not yet in `rows`.
    """
    count, num_fed = len(rows), len(of_tokens[0])
    size = max(padded, count)
    num_tokens = num_fed + size - count
    length_B = rows.length_R[:count] + ahead
    own_B = length_B + 1
    width = int((rows.start_R[:count] - -own_B // BLOCK_SIZE).max(initial=1))
    is_pinned = device.type == "cuda" and torch.backends.cuda.is_built()
    host = torch.zeros(num_inputs(num_tokens, size, width), dtype=torch.int32, pin_memory=is_pinned)
    inputs = StepInputs(host, num_tokens, size)
    for target_N, source_N in zip(
        (inputs.token_N, inputs.position_N, inputs.block_N, inputs.offset_N), of_tokens, strict=True
    ):
        target_N.numpy()[:num_fed] = source_N
    inputs.block_N.numpy()[num_fed:] = spare_block
    inputs.prefix_B.numpy()[:count], inputs.own_B.numpy()[:] = rows.prefix_R[:count], 1
    inputs.own_B.numpy()[:count], inputs.width[0] = own_B, width
    inputs.settings_5_B.numpy()[:, :count] = settings(rows.sampling, length_B)
    table_B_M = inputs.table.view(size, width).numpy()
    table_B_M[:count], table_B_M[count:] = rows.table_R_M[:count, :width], spare_block
    return host


class StepGraphs(Protocol):
    """Decode steps that were captured on a device, as in the part `cuda`."""

    routes_B_W: Tensor | None
    """Experts of the rows of the last step, valid until the next step. None means that the model is not a mixture."""

    def __call__(
        self, rows: Rows, of_tokens: Sequence[np.ndarray], draws: bool, ahead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Returns what the step computes for the rows, valid until the next step, and their sampling settings. See
        `gather_inputs`.

        Args:
            of_tokens: token -1 - i is the one that row i of the last step drew; see `feed`.
            draws: the result is tokens and their log-probabilities, as of `sampler.invert`, without truncation. Else it
                is hidden states.
        """
        ...

    def feed(self, drawn_B_C: Tensor) -> None:
        """Hands tokens that were drawn outside of a graph to the next step. `drawn` is the result of
        `sampler.invert`."""
        ...

    def is_ready(self, num_rows: int, draws: bool) -> bool:
        """Returns True if a step of this number of rows captures nothing."""
        ...

    def state(self) -> tuple[int, ...]:
        """Returns numbers that decide which steps are captured. They must be the same on all ranks that share a model,
        because a capture runs their collectives."""
        ...


def backend_name(cache: KVCache) -> str:
    """Returns the attention of this cache, for the log: `c++ avx2`, `triton`, or `torch` and the reason."""
    if cache.library is not None:
        return f"c++ {attention.instructions(cache.library)}"
    if cache.decode is not None:
        return "triton"
    device, on_cpu = cache.device, cache.device.type == "cpu"
    reason = attention.unusable(cache.dtype, device, cache.head_dim) if on_cpu else gpu.reason("decode", device)
    return f"torch ({reason})"


class KernelAttention:
    """`attend` of one step, by the C++ kernel."""

    recur: Recur | None = None
    """Recurrent part of delta nets in this step. None means that the model has none."""

    def __init__(
        self, cache: KVCache, rows: Rows, chunks: list[Chunk], blocks_N: np.ndarray, offsets_N: np.ndarray
    ) -> None:
        """Packed are one token of each row, then the tokens of each chunk.

        Args:
            blocks_N: block of each token's keys and values.
            offsets_N: their place in the block.
        """
        assert cache.library is not None
        tasks = _tasks(rows, chunks, blocks_N * BLOCK_SIZE + offsets_N)
        self.cached = cache.keys_L_C_J_K_S, cache.values_L_C_J_S_K
        """Keys and values of all layers, as in `KVCache`."""
        self.paged = PagedAttention(cache.library, tasks, *(stored[0] for stored in self.cached))

    def __call__(self, layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        return self.paged(q_N_H_K, k_N_J_K, v_N_J_K, *(stored[layer] for stored in self.cached))


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
    # Members and blocks of the rows' own tasks come first, so the indices of the other tasks begin behind them.
    others = np.array(shared, np.int64).reshape(-1, 5) + np.array((count, 0, len(own_blocks), 0, 0))
    return Tasks(
        table=np.concatenate((others, decode_B_5)),
        members=np.concatenate((np.arange(count), np.array(members, np.int64))),
        blocks=np.concatenate((own_blocks, np.array(blocks, np.int64))),
        slots_N=slots_N,
    )


def _shared_runs(rows: Rows, chunks: list[Chunk]) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
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


class TorchAttention:
    """`attend` of one step, for one token per row and then the tokens of each chunk."""

    recur: Recur | None = None
    """Recurrent part of delta nets in this step. None means that the model has none."""

    def __init__(self, cache: KVCache, inputs: StepInputs, chunks: Sequence[Chunk] = ()) -> None:
        self._cache, self._inputs = cache, inputs
        self._places = [_places(chunk, cache.device) for chunk in chunks]
        self._sizes = [len(inputs.own_B), *(chunk.stop - chunk.start for chunk in chunks)]
        self._is_decode = cache.decode is not None and not chunks
        if cache.decode is None:
            self._table_B_M = inputs.table_B_M()
            self._valid_B_M_S = valid_places(inputs.prefix_B, inputs.own_B, self._table_B_M.shape[1])

    def __call__(self, layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        block_N, offset_N = self._places_of_tokens
        self._cache.write(layer, block_N, offset_N, k_N_J_K, v_N_J_K)
        return self._read(layer, q_N_H_K)

    @cached_property
    def _places_of_tokens(self) -> tuple[Tensor, Tensor]:
        """Block of each token's keys and values, and their place in it, as indices."""
        return self._inputs.block_N.long(), self._inputs.offset_N.long()

    @property
    def rotates(self) -> bool:
        """True if `rotated` can be called."""
        return self._cache.ops is not None

    def rotated(self, layer: int, *arguments: Any) -> Tensor:
        """Returns attention for queries, keys and values before norm and rotation. Takes the other arguments of
        `ops.rotate` too."""
        cache, places = self._cache, (self._inputs.block_N, self._inputs.offset_N)
        assert cache.ops is not None
        cached = cache.keys_L_C_J_K_S[layer], cache.values_L_C_J_S_K[layer]
        if self._is_decode:
            return cache.decode.attend_rotated(*arguments, cached, self._rows)
        return self._read(layer, cache.ops.rotate_and_write(*arguments, cached, places))

    @property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = self._inputs
        return inputs.table, inputs.width, inputs.prefix_B, inputs.own_B

    def _read(self, layer: int, q_N_H_K: Tensor) -> Tensor:
        q_B_H_K, *of_chunks = q_N_H_K.split(self._sizes)
        parts = [self._prefill(layer, places, q) for places, q in zip(self._places, of_chunks, strict=True)]
        if not len(q_B_H_K):
            return torch.cat(parts)
        out_B_H_K = self._decode(layer, q_B_H_K)
        return torch.cat((out_B_H_K, *parts)) if parts else out_B_H_K

    def _decode(self, layer: int, q_B_H_K: Tensor) -> Tensor:
        cache = self._cache
        if cache.decode is None:
            return attend_to_table(cache, layer, q_B_H_K, self._table_B_M, self._valid_B_M_S)
        stored = cache.keys_L_C_J_K_S[layer], cache.values_L_C_J_S_K[layer]
        return cache.decode.decode_attention(q_B_H_K, *stored, *self._rows)

    def _prefill(self, layer: int, places_2_N: Tensor, q_N_H_K: Tensor) -> Tensor:
        """Returns causal attention of one chunk to all tokens cached before it and to itself."""
        keys_J_N_K, values_J_N_K = self._cache.read(layer, *places_2_N)
        count, seen = len(q_N_H_K), places_2_N.shape[1]
        # Batched products in bfloat16 took 7 times as long as in float32 on the CPU.
        dtype = torch.float32 if self._cache.device.type == "cpu" else q_N_H_K.dtype
        qkv = [x[None].to(dtype) for x in (q_N_H_K.transpose(0, 1), keys_J_N_K, values_J_N_K)]
        if can_serve(q_N_H_K.device, dtype, self._cache.head_dim):
            return flash_of_last(*qkv)[0].transpose(0, 1)
        mask = None
        if count < seen:
            mask = torch.ones(count, seen, dtype=torch.bool, device=q_N_H_K.device).tril_(seen - count)
        out_1_H_N_K = F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=mask is None, enable_gqa=q_N_H_K.shape[1] != keys_J_N_K.shape[0],
        )  # fmt: skip
        return out_1_H_N_K[0].transpose(0, 1).to(q_N_H_K.dtype)


def attend_to_table(cache: KVCache, layer: int, q_B_H_K: Tensor, table_B_M: Tensor, valid_B_M_S: Tensor) -> Tensor:
    """Returns softmax(q K / sqrt(head dim)) V of each row over the valid places of its blocks, [B, H, K]."""
    keys_B_M_J_K_S, values_B_M_J_S_K = cache.blocks(layer, table_B_M)
    q_B_1_J_r_K = q_B_H_K.float().unflatten(1, (cache.num_kv_heads, -1))[:, None]
    scores_B_M_J_r_S = (q_B_1_J_r_K * cache.head_dim**-0.5) @ keys_B_M_J_K_S
    scores_B_M_J_r_S = scores_B_M_J_r_S.masked_fill(~valid_B_M_S[:, :, None, None], -math.inf)
    probs_B_J_r_MS = torch.softmax(scores_B_M_J_r_S.permute(0, 2, 3, 1, 4).flatten(3), -1)
    probs_B_M_J_r_S = probs_B_J_r_MS.unflatten(3, (-1, BLOCK_SIZE)).permute(0, 3, 1, 2, 4)
    out_B_J_r_K = (probs_B_M_J_r_S @ values_B_M_J_S_K).sum(1)
    return out_B_J_r_K.flatten(1, 2).to(q_B_H_K.dtype)


def valid_places(prefix_B: Tensor, own_B: Tensor, num_blocks: int) -> Tensor:
    """Returns the places of tokens in the blocks of each row, bool [B, M, S]: `prefix_B` tokens, then `own_B` tokens
    from the next block on."""
    place_M_S = torch.arange(num_blocks * BLOCK_SIZE, device=own_B.device).view(num_blocks, BLOCK_SIZE)
    prefix_B, own_B = prefix_B[:, None, None], own_B[:, None, None]
    start_B = (prefix_B + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    return (place_M_S < prefix_B) | ((place_M_S >= start_B) & (place_M_S < start_B + own_B))


def _places(chunk: Chunk, device: torch.device) -> Tensor:
    """Returns blocks of all tokens that the last token of a chunk sees, and their places in these, int64 [2, N]."""
    prefix, own = chunk.group.prefix, chunk.sequence.own if chunk.sequence else None
    runs = [(prefix, chunk.stop if own is None else chunk.group.prefix_tokens), *([(own, chunk.stop)] if own else [])]
    place_N = np.concatenate([np.arange(count) for _, count in runs])
    block_N = np.concatenate([np.repeat(segment.blocks, BLOCK_SIZE)[:count] for segment, count in runs])
    return torch.from_numpy(np.stack((block_N, place_N % BLOCK_SIZE))).to(device, torch.int64, non_blocking=True)
