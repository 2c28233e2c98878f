"""Decode attention on GPUs over a paged KV cache: one query token per row, split over the row's tokens.

A program handles one part of a row's tokens for one kv head with all of its query heads, so keys and values are read
once. A second kernel combines the parts. Scores, softmax and sums are float32. Attention weights multiply bfloat16
values as two bfloat16 numbers, high part and remainder: 16 bits.

The kernels read lengths and the row width of the table on the device, so one captured launch serves every context.
Without a GPU, Triton's interpreter runs the kernels (`TRITON_INTERPRET=1` before Triton is imported).

Shape suffixes: B rows, H query heads, J kv heads, K head dim, C blocks, S tokens of one block, P parts; in the kernels
T tokens of one tile, and R query heads of one kv head and K as powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.kernels.attention import BLOCK_SIZE

_TILE = 4 * BLOCK_SIZE
_TILE_ROW_BYTES = 512
"""Maximum bytes of a tile's row. Wider keys use tiles half as long, because small GPUs give a program 99 KB."""
_LEAST_TILES = 4
"""Minimum tiles of a part. Short rows are not split."""
_PROGRAMS = 1024
"""Minimum number of programs if rows are long enough: 7 on each of an H100's 132 processors. An estimate."""
_STAGES = 5
"""Pipeline stages, some of which hide the lookup in the table. On an H100 3 % faster than 3 stages with a bfloat16
cache, 20 % with a float8 cache (`gpu-check`'s part `attention`)."""
_WIDE_STAGES = 3
"""Pipeline stages for float32 and wide heads. More would not fit on small GPUs."""
_LOG2_E = 1.4426950408889634


def decode_attention(
    q_B_H_K: Tensor,
    keys_C_J_K_S: Tensor,
    values_C_J_S_K: Tensor,
    table: Tensor,
    width: Tensor,
    prefix_B: Tensor,
    own_B: Tensor,
) -> Tensor:
    """Returns softmax(q K / sqrt(head dim)) V of each row over its tokens, [B, H, K], in the type of q.

    Args:
        q_B_H_K: rows may have any stride. Heads of a row are contiguous.
        keys_C_J_K_S: a view whose channels are contiguous, as in the values.
        table: int32; block ids of each row: first those of its prefix, then its remaining blocks. Rows are `width`
            apart.
        width: int32 [1].
        prefix_B: int32; tokens of the prefix, which may end anywhere in its last block.
        own_B: int32; tokens in the remaining blocks, at least one.
    """
    num_rows, num_heads, head_dim = q_B_H_K.shape
    num_kv_heads = keys_C_J_K_S.shape[1]
    assert q_B_H_K.stride()[1:] == (head_dim, 1)
    assert keys_C_J_K_S.stride(2) == values_C_J_S_K.stride(3) == 1
    programs = max(1, num_rows * num_kv_heads)
    parts = next(parts for parts in (4, 8, 16, 32, 64) if parts == 64 or parts * programs >= _PROGRAMS)
    heads, channels = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    sums_B_H_P_K = q_B_H_K.new_empty((num_rows, num_heads, parts, head_dim), dtype=torch.float32)
    scales_B_H_P_2 = q_B_H_K.new_empty((num_rows, num_heads, parts, 2), dtype=torch.float32)
    out_B_H_K = torch.empty_like(q_B_H_K, memory_format=torch.contiguous_format)
    row_bytes = channels * q_B_H_K.element_size()
    tile = _TILE if row_bytes <= _TILE_ROW_BYTES else _TILE // 2
    exact = q_B_H_K.dtype == torch.float32 or not q_B_H_K.is_cuda
    is_wide = exact or row_bytes >= _TILE_ROW_BYTES
    context = {"S": BLOCK_SIZE, "T": tile, "P": parts, "LEAST": _LEAST_TILES}
    with torch.cuda.device_of(q_B_H_K):
        attend: Any = _attend_to_part[num_rows, num_kv_heads, parts]
        attend(
            q_B_H_K, keys_C_J_K_S, values_C_J_S_K, table, width, prefix_B, own_B, sums_B_H_P_K, scales_B_H_P_2,
            q_B_H_K.stride(0), *(keys_C_J_K_S.stride(i) for i in (0, 1, 3)), *values_C_J_S_K.stride()[:3],
            head_dim**-0.5 * _LOG2_E, heads, head_dim, R=max(16, triton.next_power_of_2(heads)), K=channels,
            EXACT=exact, **context, num_warps=4, num_stages=_WIDE_STAGES if is_wide else _STAGES,
        )  # fmt: skip
        join: Any = _join_parts[num_rows, num_heads]
        join(sums_B_H_P_K, scales_B_H_P_2, prefix_B, own_B, out_B_H_K, head_dim, K=channels, **context, num_warps=4)
    return out_B_H_K


@triton.jit
def _span(prefix, own, S: tl.constexpr, T: tl.constexpr, P: tl.constexpr, LEAST: tl.constexpr):
    """Returns the start of the tokens after the prefix, the end of all tokens, and the positions of one part, in
    tiles."""
    start = (prefix + S - 1) // S * S
    end = start + own
    return start, end, tl.maximum(((end + P - 1) // P + T - 1) // T, LEAST) * T


# The alignment of integers in a step's array varies; without this option each alignment would be compiled separately.
@triton.jit(do_not_specialize_on_alignment=["table", "width", "prefixes", "owns"])
def _attend_to_part(
    q, keys, values, table, width, prefixes, owns, sums, scales, q_row, key_block, key_head, key_place, value_block,
    value_head, value_place, factor, num_heads, head_dim, R: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr,
    S: tl.constexpr, T: tl.constexpr, P: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """`factor` scales scores to base 2. `num_heads` is the number of query heads per kv head. EXACT multiplies in
    float32."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prefix, own = tl.load(prefixes + row), tl.load(owns + row)
    start, end, span = _span(prefix, own, S, T, P, LEAST)
    if part * span < end:
        of_row = table + row.to(tl.int64) * tl.load(width)
        r_R, k_K, t_T = tl.arange(0, R), tl.arange(0, K), tl.arange(0, T)
        heads = head * num_heads + r_R
        in_q = (r_R < num_heads)[:, None] & (k_K < head_dim)[None, :]
        q_R_K = tl.load(q + row.to(tl.int64) * q_row + heads[:, None] * head_dim + k_K[None, :], mask=in_q, other=0.0)
        most_R = tl.full((R,), -float("inf"), tl.float32)
        sum_R, sums_R_K = tl.full((R,), 0.0, tl.float32), tl.full((R, K), 0.0, tl.float32)
        for first in range(part * span, tl.minimum((part + 1) * span, end), T):
            place_T = first + t_T
            # Each tile contains such a position, because the gap behind the prefix is less than a block.
            seen_T = (place_T < prefix) | ((place_T >= start) & (place_T < end))
            block_T = tl.load(of_row + place_T // S, mask=place_T < end, other=0).to(tl.int64)
            in_tile = seen_T[:, None] & (k_K < head_dim)[None, :]
            at_key = block_T * key_block + head * key_head + (place_T % S) * key_place
            at_value = block_T * value_block + head * value_head + (place_T % S) * value_place
            key_T_K = tl.load(keys + at_key[:, None] + k_K[None, :], mask=in_tile, other=0.0)
            value_T_K = tl.load(values + at_value[:, None] + k_K[None, :], mask=in_tile, other=0.0)
            if EXACT:
                score_R_T = tl.dot(q_R_K.to(tl.float32), tl.trans(key_T_K.to(tl.float32)), input_precision="ieee")
            else:
                score_R_T = tl.dot(q_R_K, tl.trans(key_T_K.to(q_R_K.dtype)))
            score_R_T = tl.where(seen_T[None, :], score_R_T * factor, -float("inf"))
            more_R = tl.maximum(most_R, tl.max(score_R_T, 1))
            weight_R_T, fade_R = tl.exp2(score_R_T - more_R[:, None]), tl.exp2(most_R - more_R)
            sum_R, sums_R_K = sum_R * fade_R + tl.sum(weight_R_T, 1), sums_R_K * fade_R[:, None]
            if EXACT:
                sums_R_K += tl.dot(weight_R_T, value_T_K.to(tl.float32), input_precision="ieee")
            else:
                high_R_T, value_T_K = weight_R_T.to(q_R_K.dtype), value_T_K.to(q_R_K.dtype)
                sums_R_K = tl.dot(high_R_T, value_T_K, sums_R_K)
                sums_R_K = tl.dot((weight_R_T - high_R_T.to(tl.float32)).to(q_R_K.dtype), value_T_K, sums_R_K)
            most_R = more_R
        at_R = (row.to(tl.int64) * tl.num_programs(1) * num_heads + heads) * P + part
        tl.store(sums + at_R[:, None] * head_dim + k_K[None, :], sums_R_K, mask=in_q)
        tl.store(scales + at_R * 2, most_R, mask=r_R < num_heads)
        tl.store(scales + at_R * 2 + 1, sum_R, mask=r_R < num_heads)


@triton.jit(do_not_specialize_on_alignment=["prefixes", "owns"])
def _join_parts(
    sums, scales, prefixes, owns, out, head_dim, K: tl.constexpr, S: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    _, end, span = _span(tl.load(prefixes + row), tl.load(owns + row), S, T, P, LEAST)
    p_P, k_K = tl.arange(0, P), tl.arange(0, K)
    used_P, in_K = p_P * span < end, k_K < head_dim
    at = row.to(tl.int64) * tl.num_programs(1) + head
    most_P = tl.load(scales + (at * P + p_P) * 2, mask=used_P, other=-float("inf"))
    weight_P = tl.exp2(most_P - tl.max(most_P, 0))
    sum_P = tl.load(scales + (at * P + p_P) * 2 + 1, mask=used_P, other=0.0)
    sums_P_K = tl.load(
        sums + (at * P + p_P)[:, None] * head_dim + k_K[None, :], mask=used_P[:, None] & in_K[None, :], other=0.0
    )
    out_K = tl.sum(sums_P_K * weight_P[:, None], 0) / tl.sum(sum_P * weight_P, 0)  # pyrefly: ignore
    tl.store(out + at * head_dim + k_K, out_K.to(out.dtype.element_ty), mask=in_K)
