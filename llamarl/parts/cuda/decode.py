"""Decode attention on GPUs over a KV cache in blocks: one query token of each row, split over the row's tokens.

A program takes one part of a row's tokens, for one kv head with all of its query heads, so keys and values are read
once. The last program of a row and kv head joins the parts, in their order, so that results do not depend on which one
was last. Scores, softmax and sums are float32. Weights meet bfloat16 values as two bfloat16 numbers, high part and
rest: 16 bits. A float8 cache is multiplied in float16, which holds its numbers exactly, and weights with 11 bits.

`attend_rotated` is a whole step of attention in one launch: it also norms and rotates queries and keys, and writes keys
and values to the cache. The program whose part ends the row writes them before it reads them.

Lengths, and how wide a row of the table is, are read on the device: one captured launch serves every context. Without a
GPU Triton's interpreter runs the kernels (`TRITON_INTERPRET=1` before Triton is imported).

Shape suffixes: B rows, H query heads, J kv heads, K head dim, C blocks, S tokens of one block, P parts; in the kernels
T tokens of one tile, and R query heads of one kv head and K as powers of two.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llamarl.kernels.attention import BLOCK_SIZE
from llamarl.parts.cuda.ops import _bounded

_TILE = 4 * BLOCK_SIZE
_TILE_ROW_BYTES = 512
"""Most bytes of a whole tile's row: wider keys have tiles half as long, as small GPUs give a program 99 KB."""
_LEAST_TILES = 4
"""Tiles of a part at least: a short row is not split, and leaves the rest of its programs without work."""
_PROGRAMS = 1024
"""Smallest number of programs, where rows are long enough: 7 on each of an H100's 132 processors. An estimate."""
_MANY_PROGRAMS, _LEAST_TILES_OF_MANY = 2048, 16
"""From this number of rows times kv heads on, parts have at least this number of tiles: the rows fill the device, and
each further part costs a launch of a program that finds nothing to do."""
_MOST_TICKETS = 1 << 16
"""Largest product of rows and kv heads."""
_STAGES = 5
"""Some are spent on the table, through which keys and values are found. On an H100 3 % faster than 3 with a cache of
bfloat16, 20 % with one of float8 (`gpu-check`'s part `attention`)."""
_WIDE_STAGES = 3
"""In float32, and with wide heads: more would not fit small GPUs."""
_LOG2_E = 1.4426950408889634
_BOUNDS = {torch.float8_e4m3fn: 448.0}
"""Largest number that a cache of this type holds."""


def decode_attention(
    q_B_H_K: Tensor,
    keys_C_J_K_S: Tensor,
    values_C_J_S_K: Tensor,
    table: Tensor,
    width: Tensor,
    prefix_B: Tensor,
    own_B: Tensor,
) -> Tensor:
    """softmax(q K / sqrt(head dim)) V of each row over its tokens, [B, H, K], typed as q.

    Args:
        q_B_H_K: rows may be apart; heads of one row lie next to each other.
        keys_C_J_K_S: a view in which channels are neighbors, as in the values.
        table: int32; block ids of each row, those of its prefix and then its own; the next row's begin `width` further.
        width: int32 [1].
        prefix_B: int32; tokens of the prefix, which end anywhere in its last block.
        own_B: int32; tokens from the next block on, at least one.
    """
    kv = q_B_H_K[:, :1]  # is not read
    rows = table, width, prefix_B, own_B
    return _attend(q_B_H_K, kv, kv, (q_B_H_K, q_B_H_K), None, 0.0, (keys_C_J_K_S, values_C_J_S_K), rows, False)


def attend_rotated(
    q_B_H_K: Tensor,
    k_B_J_K: Tensor,
    v_B_J_K: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cached: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Tensor:
    """`ops.rotate_and_write` and then `decode_attention`, bit for bit, in one launch.

    Args:
        rotation: float32, for all channels of a head.
        cached: keys and values, as in `decode_attention`. The last own token of each row is written there.
        rows: table, width, prefixes and own tokens, as in `decode_attention`.
    """
    return _attend(q_B_H_K, k_B_J_K, v_B_J_K, rotation, norms, eps, cached, rows, True)


def _parts(programs: int) -> tuple[int, int]:
    """Returns the number of parts of a row, and the smallest number of tiles of a part."""
    if programs >= _MANY_PROGRAMS:
        return (2 if programs < 4 * _MANY_PROGRAMS else 1), _LEAST_TILES_OF_MANY
    return next(parts for parts in (4, 8, 16, 32, 64) if parts == 64 or parts * programs >= _PROGRAMS), _LEAST_TILES


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    """Returns counters of the finished parts of each row and kv head. They are 0 between launches."""
    with torch.inference_mode(False):
        return torch.zeros(_MOST_TICKETS, dtype=torch.int32, device=device)


def _attend(
    q_B_H_K: Tensor, k_B_J_K: Tensor, v_B_J_K: Tensor, rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None, eps: float, cached: tuple[Tensor, Tensor], rows: tuple[Tensor, ...],
    rotates: bool,
) -> Tensor:  # fmt: skip
    (num_rows, num_heads, head_dim), (keys, values) = q_B_H_K.shape, cached
    num_kv_heads = keys.shape[1]
    assert all(x.stride()[1:] == (head_dim, 1) for x in (q_B_H_K, k_B_J_K, v_B_J_K))
    assert keys.stride(2) == values.stride(3) == 1
    programs = max(1, num_rows * num_kv_heads)
    assert programs <= _MOST_TICKETS, f"{num_rows} rows of {num_kv_heads} kv heads; at most {_MOST_TICKETS} together"
    parts, least = _parts(programs)
    heads, channels = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    sums_B_H_P_K = q_B_H_K.new_empty((num_rows, num_heads, parts, head_dim), dtype=torch.float32)
    scales_B_H_P_2 = q_B_H_K.new_empty((num_rows, num_heads, parts, 2), dtype=torch.float32)
    out_B_H_K = torch.empty_like(q_B_H_K, memory_format=torch.contiguous_format)
    row_bytes = channels * q_B_H_K.element_size()
    tile = _TILE if row_bytes <= _TILE_ROW_BYTES else _TILE // 2
    exact = q_B_H_K.dtype == torch.float32 or not q_B_H_K.is_cuda
    is_wide = exact or row_bytes >= _TILE_ROW_BYTES
    with torch.cuda.device_of(q_B_H_K):
        attend: Any = _attend_to_part[num_rows, num_kv_heads, parts]
        attend(
            q_B_H_K, k_B_J_K, v_B_J_K, *rotation, *(norms or (q_B_H_K, q_B_H_K)), keys, values, *rows, sums_B_H_P_K,
            scales_B_H_P_2, out_B_H_K, _tickets(q_B_H_K.device), q_B_H_K.stride(0), k_B_J_K.stride(0),
            v_B_J_K.stride(0), rotation[0].stride(0), *(keys.stride(i) for i in (0, 1, 3)), *values.stride()[:3], eps,
            head_dim**-0.5 * _LOG2_E, heads, head_dim, R=max(16, triton.next_power_of_2(heads)), K=channels,
            EXACT=exact, ROTATES=rotates, NORMS=norms is not None, MOST=_BOUNDS.get(keys.dtype, 0.0), S=BLOCK_SIZE,
            T=tile, P=parts, LEAST=least, num_warps=4, num_stages=_WIDE_STAGES if is_wide else _STAGES,
        )  # fmt: skip
    return out_B_H_K


@triton.jit
def _span(prefix, own, S: tl.constexpr, T: tl.constexpr, P: tl.constexpr, LEAST: tl.constexpr):
    """Start of the own tokens, the end of all, and places of one part: whole tiles."""
    start = (prefix + S - 1) // S * S
    end = start + own
    return start, end, tl.maximum(((end + P - 1) // P + T - 1) // T, LEAST) * T


@triton.jit
def _rotated(x_R_K, swapped_R_K, weight_K, swapped_weight_K, cos_K, sin_K, head_dim, eps, NORMS: tl.constexpr):
    """Heads, given with their channels and with those half a head away."""
    if NORMS:
        factor_R = tl.rsqrt(tl.sum(x_R_K * x_R_K, 1) / head_dim + eps)
        x_R_K = x_R_K * factor_R[:, None] * weight_K[None, :]
        swapped_R_K = swapped_R_K * factor_R[:, None] * swapped_weight_K[None, :]
    return x_R_K * cos_K[None, :] + swapped_R_K * sin_K[None, :]


@triton.jit
def _write_newest(
    k, v, weight_K, swapped_weight_K, cos_K, sin_K, keys, values, at_key, at_value, k_K, other_K, head_dim, eps,
    NORMS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The key, rotated, and the value of a row's newest token, for one kv head."""
    inside_1_K = (k_K < head_dim)[None, :]
    x_1_K = tl.load(k + k_K[None, :], mask=inside_1_K, other=0.0).to(tl.float32)
    swapped_1_K = tl.load(k + other_K[None, :], mask=inside_1_K, other=0.0).to(tl.float32)
    x_1_K = _rotated(x_1_K, swapped_1_K, weight_K, swapped_weight_K, cos_K, sin_K, head_dim, eps, NORMS)
    tl.store(keys + at_key + k_K[None, :], _bounded(x_1_K, MOST).to(keys.dtype.element_ty), mask=inside_1_K)
    v_1_K = tl.load(v + k_K[None, :], mask=inside_1_K, other=0.0).to(tl.float32)
    tl.store(values + at_value + k_K[None, :], _bounded(v_1_K, MOST).to(values.dtype.element_ty), mask=inside_1_K)


@triton.jit
def _turned(
    q_R_K, at_q, in_q, k, v, cos, sin, q_weight, k_weight, keys, values, of_row, key_block, key_place, value_block,
    value_place, newest, k_K, head_dim, eps, writes, S: tl.constexpr, NORMS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Rotated queries. If it `writes`, the newest key and value of the row go to the cache."""
    other_K, inside_K = (k_K + head_dim // 2) % head_dim, k_K < head_dim
    cos_K, sin_K = tl.load(cos + k_K, mask=inside_K, other=0.0), tl.load(sin + k_K, mask=inside_K, other=0.0)
    weight_K, other_weight_K = cos_K, cos_K
    if NORMS:
        weight_K = tl.load(q_weight + k_K, mask=inside_K, other=0.0).to(tl.float32)
        other_weight_K = tl.load(q_weight + other_K, mask=inside_K, other=0.0).to(tl.float32)
    swapped_R_K = tl.load(at_q + other_K[None, :], mask=in_q, other=0.0).to(tl.float32)
    x_R_K = _rotated(q_R_K.to(tl.float32), swapped_R_K, weight_K, other_weight_K, cos_K, sin_K, head_dim, eps, NORMS)
    if writes:
        if NORMS:
            weight_K = tl.load(k_weight + k_K, mask=inside_K, other=0.0).to(tl.float32)
            other_weight_K = tl.load(k_weight + other_K, mask=inside_K, other=0.0).to(tl.float32)
        block, place = tl.load(of_row + newest // S).to(tl.int64), newest % S
        _write_newest(
            k, v, weight_K, other_weight_K, cos_K, sin_K, keys, values, block * key_block + place * key_place,
            block * value_block + place * value_place, k_K, other_K, head_dim, eps, NORMS, MOST,
        )  # fmt: skip
        tl.debug_barrier()  # all threads of this program read what some of them wrote
    return x_R_K.to(q_R_K.dtype)


@triton.jit
def _attended(
    q_R_K, keys, values, of_row, key_block, key_place, value_block, value_place, factor, begin, stop, prefix, start,
    end, k_K, head_dim, R: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr, MOST: tl.constexpr, S: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Largest scores, sums of weights, and weighted sums of values over the places from `begin` to `stop`."""
    t_T = tl.arange(0, T)
    most_R = tl.full((R,), -float("inf"), tl.float32)
    sum_R, sums_R_K = tl.full((R,), 0.0, tl.float32), tl.full((R, K), 0.0, tl.float32)
    for first in range(begin, stop, T):
        place_T = first + t_T
        # Each tile has such a place, as the gap behind the prefix is less than a block. Others are not even read.
        seen_T = (place_T < prefix) | ((place_T >= start) & (place_T < end))
        block_T = tl.load(of_row + place_T // S, mask=place_T < end, other=0).to(tl.int64)
        in_tile = seen_T[:, None] & (k_K < head_dim)[None, :]
        at_key = block_T * key_block + (place_T % S) * key_place
        at_value = block_T * value_block + (place_T % S) * value_place
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
        elif MOST > 0:
            sums_R_K = tl.dot(weight_R_T.to(tl.float16), value_T_K.to(tl.float16), sums_R_K)
        else:
            high_R_T, value_T_K = weight_R_T.to(q_R_K.dtype), value_T_K.to(q_R_K.dtype)
            sums_R_K = tl.dot(high_R_T, value_T_K, sums_R_K)
            sums_R_K = tl.dot((weight_R_T - high_R_T.to(tl.float32)).to(q_R_K.dtype), value_T_K, sums_R_K)
        most_R = more_R
    return most_R, sum_R, sums_R_K


# Where integers begin in the one array of a step differs from step to step: each alignment would be compiled anew.
@triton.jit(do_not_specialize_on_alignment=["table", "width", "prefixes", "owns"])
def _attend_to_part(
    q, k, v, cos, sin, q_weight, k_weight, keys, values, table, width, prefixes, owns, sums, scales, out, tickets,
    q_row, k_row, v_row, angle_row, key_block, key_head, key_place, value_block, value_head, value_place, eps, factor,
    num_heads, head_dim, R: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr, ROTATES: tl.constexpr,
    NORMS: tl.constexpr, MOST: tl.constexpr, S: tl.constexpr, T: tl.constexpr, P: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """`factor` brings scores to powers of two, `num_heads` are those of one kv head; EXACT multiplies in float32, MOST
    bounds what a float8 cache holds."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    prefix, own = tl.load(prefixes + row), tl.load(owns + row)
    start, end, span = _span(prefix, own, S, T, P, LEAST)
    if part * span < end:
        far = row.to(tl.int64)
        of_row = table + far * tl.load(width)
        r_R, k_K = tl.arange(0, R), tl.arange(0, K)
        heads = head * num_heads + r_R
        in_q = (r_R < num_heads)[:, None] & (k_K < head_dim)[None, :]
        at_q = q + far * q_row + heads[:, None] * head_dim
        q_R_K = tl.load(at_q + k_K[None, :], mask=in_q, other=0.0)
        if ROTATES:
            q_R_K = _turned(
                q_R_K, at_q, in_q, k + far * k_row + head * head_dim, v + far * v_row + head * head_dim,
                cos + far * angle_row, sin + far * angle_row, q_weight, k_weight, keys + head * key_head,
                values + head * value_head, of_row, key_block, key_place, value_block, value_place, end - 1, k_K,
                head_dim, eps, end <= (part + 1) * span, S, NORMS, MOST,
            )  # fmt: skip
        if MOST > 0 and not EXACT:
            q_R_K = _bounded(q_R_K.to(tl.float32), 65504.0).to(tl.float16)
        most_R, sum_R, sums_R_K = _attended(
            q_R_K, keys + head * key_head, values + head * value_head, of_row, key_block, key_place, value_block,
            value_place, factor, part * span, tl.minimum((part + 1) * span, end), prefix, start, end, k_K, head_dim, R,
            K, EXACT, MOST, S, T,
        )  # fmt: skip
        at_out = out + (far * tl.num_programs(1) * num_heads + heads)[:, None] * head_dim + k_K[None, :]
        used = (end + span - 1) // span
        if used == 1:
            tl.store(at_out, (sums_R_K / sum_R[:, None]).to(out.dtype.element_ty), mask=in_q)
        else:
            at_R = (far * tl.num_programs(1) * num_heads + heads) * P + part
            tl.store(sums + at_R[:, None] * head_dim + k_K[None, :], sums_R_K, mask=in_q)
            tl.store(scales + at_R * 2, most_R, mask=r_R < num_heads)
            tl.store(scales + at_R * 2 + 1, sum_R, mask=r_R < num_heads)
            tl.debug_barrier()  # the ticket of one thread stands for what all have written
            ticket = tickets + far * tl.num_programs(1) + head
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == used - 1:
                _join(sums, scales, at_R - part, out, at_out, k_K, in_q, r_R < num_heads, head_dim, used, R, K)
                tl.store(ticket, 0)


@triton.jit
def _join(sums, scales, at_R, out, at_out, k_K, in_q, in_R, head_dim, used, R: tl.constexpr, K: tl.constexpr):
    """Adds the parts of one row and kv head, in their order. Other programs wrote them: `.cg` reads past this
    processor's cache."""
    most_R = tl.full((R,), -float("inf"), tl.float32)
    for part in range(used):
        most_R = tl.maximum(most_R, tl.load(scales + (at_R + part) * 2, mask=in_R, other=0.0, cache_modifier=".cg"))
    sum_R, sums_R_K = tl.full((R,), 0.0, tl.float32), tl.full((R, K), 0.0, tl.float32)
    for part in range(used):
        scale_R = tl.load(scales + (at_R + part) * 2, mask=in_R, other=0.0, cache_modifier=".cg")
        weight_R = tl.exp2(scale_R - most_R)
        of_part_R = tl.load(scales + (at_R + part) * 2 + 1, mask=in_R, other=1.0, cache_modifier=".cg")
        at_part = sums + (at_R + part)[:, None] * head_dim + k_K[None, :]
        sums_R_K += tl.load(at_part, mask=in_q, other=0.0, cache_modifier=".cg") * weight_R[:, None]
        sum_R += of_part_R * weight_R
    tl.store(at_out, (sums_R_K / sum_R[:, None]).to(out.dtype.element_ty), mask=in_q)
