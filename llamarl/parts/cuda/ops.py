"""Small operations of a decode step on GPUs, with one launch each where torch needs several. One program per row or
head.

If the next matrix product multiplies 8-bit numbers, the output is quantized: values, and a float32 scale per row. The
scale of a row is not finite if the row is not. Tested like `decode.py`.

Shape suffixes: N packed tokens, D and F channels of a row, H query heads, J kv heads, K head dim, C blocks, S tokens of
one block; in the kernels D, F and K as powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
Rows = tuple[Tensor, Tensor]
"""Values [N, D], and scales [N, 1]."""


def rms_norm(
    x_N_D: Tensor, weight_D: Tensor, eps: float, delta_N_D: Tensor | None, takes: torch.dtype | None
) -> Tensor | Rows:
    """Adds `delta` to x in place, then returns x / sqrt(mean(x^2) + eps) * weight in the type of the weight, quantized
    to `takes`."""
    assert x_N_D.is_contiguous()
    delta = x_N_D if delta_N_D is None else delta_N_D.contiguous()
    y, scales = _results(x_N_D.shape, weight_D, takes)
    _launch(
        _norm_row, x_N_D, x_N_D, delta, weight_D, y, scales, x_N_D.shape[1], eps,
        ADDS=delta_N_D is not None, MOST=MOST[takes] if takes else 0.0,
    )  # fmt: skip
    return (y, scales) if takes else y


def silu_mul(gate_N_F: Tensor, up_N_F: Tensor, takes: torch.dtype | None) -> Tensor | Rows:
    """Returns silu(gate) * up, quantized to `takes`. Rows may have any stride."""
    assert gate_N_F.stride(1) == up_N_F.stride(1) == 1
    y, scales = _results(gate_N_F.shape, gate_N_F, takes)
    strides = gate_N_F.stride(0), up_N_F.stride(0)
    most = MOST[takes] if takes else 0.0
    _launch(_silu_mul_row, gate_N_F, gate_N_F, up_N_F, y, scales, gate_N_F.shape[1], *strides, MOST=most)
    return (y, scales) if takes else y


def quantize(x_N_D: Tensor, takes: torch.dtype) -> Rows:
    x_N_D = x_N_D.contiguous()
    y, scales = _results(x_N_D.shape, x_N_D, takes)
    _launch(_quantize_row, x_N_D, x_N_D, y, scales, x_N_D.shape[1], MOST=MOST[takes])
    return y, scales


def rotate_and_write(
    q_N_H_K: Tensor,
    k_N_J_K: Tensor,
    v_N_J_K: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cached: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
) -> Tensor:
    """Returns queries as `ops.rotate` does, in float32 arithmetic. Writes rotated keys and values to the cache.

    Args:
        rotation: float32.
        cached: keys [C, J, K, S] with contiguous channels, and values [C, J, S, K].
        places: block and position in the block, for each token.
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q_N_H_K.shape, k_N_J_K.shape[1]
    keys, values = cached
    for x in (q_N_H_K, k_N_J_K, v_N_J_K):
        assert x.stride()[1:] == (head_dim, 1)
    assert keys.stride(2) == values.stride(3) == 1
    out_N_H_K = torch.empty_like(q_N_H_K, memory_format=torch.contiguous_format)
    weights = norms or (q_N_H_K, q_N_H_K)
    rotate: Any = _rotate_head[num_tokens, num_heads + num_kv_heads]
    with torch.cuda.device_of(q_N_H_K):
        rotate(
            q_N_H_K, k_N_J_K, v_N_J_K, *rotation, *weights, out_N_H_K, keys, values, *places, num_heads, head_dim, eps,
            *(x.stride(0) for x in (q_N_H_K, k_N_J_K, v_N_J_K, rotation[0])),
            *(keys.stride(i) for i in (0, 1, 3)), *values.stride()[:3],
            NORMS=norms is not None, MOST=MOST.get(keys.dtype, 0.0), K=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
    return out_N_H_K


def _results(shape: torch.Size, like: Tensor, takes: torch.dtype | None) -> Rows:
    return like.new_empty(shape, dtype=takes or like.dtype), like.new_empty((shape[0], 1), dtype=torch.float32)


def _launch(kernel: Any, x_N_D: Tensor, *arguments: Any, **options: Any) -> None:
    """Launches one program per row of x."""
    block = triton.next_power_of_2(x_N_D.shape[1])
    with torch.cuda.device_of(x_N_D):
        kernel[(len(x_N_D),)](*arguments, **options, D=block, num_warps=min(16, max(1, block // 512)))


@triton.jit
def _store_row(y, scales, row, size, x_D, d_D, MOST: tl.constexpr):
    """Stores a row, unchanged or quantized with rounding half to even, as in torch."""
    if MOST > 0:
        # Reductions may drop NaN; the second term is 0 or NaN.
        scale = tl.maximum(tl.max(tl.abs(x_D), 0), 1e-30) / MOST + tl.sum(x_D * 0.0, 0)
        tl.store(scales + row, scale)
        x_D = x_D / scale
        if MOST == 127.0:
            x_D = (x_D + 12582912.0) - 12582912.0  # 1.5 * 2^23 leaves no fractional bits
    tl.store(y + row * size + d_D, x_D.to(y.dtype.element_ty), mask=d_D < size)


@triton.jit
def _norm_row(
    x, delta, weight, y, scales, size, eps, ADDS: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    row, d_D = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    x_D = tl.load(x + row * size + d_D, mask=d_D < size, other=0.0)
    if ADDS:
        x_D = (x_D.to(tl.float32) + tl.load(delta + row * size + d_D, mask=d_D < size, other=0.0)).to(x_D.dtype)
        tl.store(x + row * size + d_D, x_D, mask=d_D < size)
    x_D = x_D.to(tl.float32)
    weight_D = tl.load(weight + d_D, mask=d_D < size, other=0.0).to(tl.float32)
    _store_row(y, scales, row, size, x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / size + eps) * weight_D, d_D, MOST)


@triton.jit
def _silu_mul_row(gate, up, y, scales, size, gate_row, up_row, MOST: tl.constexpr, D: tl.constexpr):
    row, d_D = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    gate_D = tl.load(gate + row * gate_row + d_D, mask=d_D < size, other=0.0).to(tl.float32)
    up_D = tl.load(up + row * up_row + d_D, mask=d_D < size, other=0.0).to(tl.float32)
    _store_row(y, scales, row, size, gate_D / (1.0 + tl.exp(-gate_D)) * up_D, d_D, MOST)


@triton.jit
def _quantize_row(x, y, scales, size, MOST: tl.constexpr, D: tl.constexpr):
    row, d_D = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    x_D = tl.load(x + row * size + d_D, mask=d_D < size, other=0.0).to(tl.float32)
    _store_row(y, scales, row, size, x_D, d_D, MOST)


@triton.jit
def _bounded(x_K, MOST: tl.constexpr):
    """Clamps numbers to the range of the storage type. NaN stays NaN."""
    if MOST > 0:
        x_K = tl.where(x_K > MOST, MOST, tl.where(x_K < -MOST, -MOST, x_K))
    return x_K


@triton.jit
def _rotated(x, weight, cos_K, sin_K, k_K, head_dim, eps, NORMS: tl.constexpr):
    """Returns one rotated head: each channel is combined with the channel half a head away."""
    other_K, inside = (k_K + head_dim // 2) % head_dim, k_K < head_dim
    x_K = tl.load(x + k_K, mask=inside, other=0.0).to(tl.float32)
    swapped_K = tl.load(x + other_K, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        factor = tl.rsqrt(tl.sum(x_K * x_K, 0) / head_dim + eps)
        x_K = x_K * factor * tl.load(weight + k_K, mask=inside, other=0.0).to(tl.float32)
        swapped_K = swapped_K * factor * tl.load(weight + other_K, mask=inside, other=0.0).to(tl.float32)
    return x_K * cos_K + swapped_K * sin_K


@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets"])  # see `decode.py`
def _rotate_head(
    q, k, v, cos, sin, q_weight, k_weight, out, keys, values, blocks, offsets, num_heads, head_dim, eps, q_row, k_row,
    v_row, angle_row, key_block, key_head, key_place, value_block, value_head, value_place, NORMS: tl.constexpr,
    MOST: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    token, head, k_K = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, K)
    inside = k_K < head_dim
    cos_K = tl.load(cos + token * angle_row + k_K, mask=inside, other=0.0)
    sin_K = tl.load(sin + token * angle_row + k_K, mask=inside, other=0.0)
    if head < num_heads:
        x_K = _rotated(q + token * q_row + head * head_dim, q_weight, cos_K, sin_K, k_K, head_dim, eps, NORMS)
        at_out = out + (token * num_heads + head) * head_dim
        tl.store(at_out + k_K, x_K.to(out.dtype.element_ty), mask=inside)
    else:
        head -= num_heads
        block, offset = tl.load(blocks + token).to(tl.int64), tl.load(offsets + token)
        x_K = _rotated(k + token * k_row + head * head_dim, k_weight, cos_K, sin_K, k_K, head_dim, eps, NORMS)
        at_key = keys + block * key_block + head * key_head + offset * key_place
        tl.store(at_key + k_K, _bounded(x_K, MOST).to(keys.dtype.element_ty), mask=inside)
        value_K = tl.load(v + token * v_row + head * head_dim + k_K, mask=inside, other=0.0).to(tl.float32)
        at_value = values + block * value_block + head * value_head + offset * value_place
        tl.store(at_value + k_K, _bounded(value_K, MOST).to(values.dtype.element_ty), mask=inside)
