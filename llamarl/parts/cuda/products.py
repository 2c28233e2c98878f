"""Products of a few rows on GPUs, with what comes before and after them: five launches a layer of a decode step.

With at most 64 rows a product takes as long as its weights take to arrive. So each program streams a tile of them once,
for all rows, and the small operations around it cost no launch and no pass over memory:

    normed   (x / rms(x) * weight) W^T + b    norm before the product; x is the float32 residual stream
    gated    silu(gate) * up                  both of one normed row
    added    x += a W^T                       in place; also returns sums of squares, which the next norm needs
    scaled   8-bit rows and weights           scales and bias after the product, sums split where outputs are few

Rows, norms, and products are rounded where the separate operations of `ops.py` and cuBLAS round them, so trainer and
generator differ by the order of sums only. Where a tile of outputs has several programs, the last one adds the parts in
their order. `graphs.py` measures whether these are faster than cuBLAS with separate operations, and takes the faster.

Shape suffixes: M rows, N outputs, K inputs, Q parts of the sums of squares; in the kernel tiles of these.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64
_OUTPUTS = 64
"""Outputs of a tile."""
_PROGRAMS = 256
"""Smallest number of programs, if the inputs are long enough to be split: about two on each of an H100's 132
processors."""
_LEAST_INPUTS = 1024
"""Smallest number of inputs of a program."""
_MOST_TILES = 1 << 14
_STAGES = 3


def num_parts(width: int) -> int:
    """Returns Q, the number of tiles of a hidden state."""
    return -(-width // _OUTPUTS)


def normed(x_M_K: Tensor, squares_Q_M: Tensor, norm_K: Tensor, eps: float, weight_N_K: Tensor, bias_N: Any) -> Tensor:
    """Returns the product of normed rows, [M, N]."""
    y_M_N = torch.empty(len(x_M_K), len(weight_N_K), dtype=weight_N_K.dtype, device=x_M_K.device)
    _launch(x_M_K, weight_N_K, y_M_N, squares=squares_Q_M, norm=norm_K, eps=eps, bias=bias_N)
    return y_M_N


def gated(x_M_K: Tensor, squares_Q_M: Tensor, norm_K: Tensor, eps: float, weight_2N_K: Tensor) -> Tensor:
    """Returns silu(gate) * up of normed rows, [M, N]. The weights of gates come first."""
    y_M_N = torch.empty(len(x_M_K), len(weight_2N_K) // 2, dtype=weight_2N_K.dtype, device=x_M_K.device)
    _launch(x_M_K, weight_2N_K, y_M_N, squares=squares_Q_M, norm=norm_K, eps=eps, is_gated=True)
    return y_M_N


def added(a_M_K: Tensor, weight_N_K: Tensor, x_M_N: Tensor, squares_Q_M: Tensor) -> None:
    """Adds the product to float32 rows, and writes the sums of their squares."""
    _launch(a_M_K, weight_N_K, x_M_N, adds_to=squares_Q_M)


def scaled(
    rows_M_K: Tensor, scale_M_1: Tensor, values_N_K: Tensor, scales_N: Tensor, bias_N: Any, dtype: torch.dtype
) -> Tensor:
    """Returns the product of 8-bit numbers times the scales of rows and columns, plus the bias."""
    y_M_N = torch.empty(len(rows_M_K), len(values_N_K), dtype=dtype, device=rows_M_K.device)
    _launch(rows_M_K, values_N_K, y_M_N, scales=(scale_M_1, scales_N), bias=bias_N)
    return y_M_N


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    """Returns counters of the finished programs of each tile. They are 0 between launches."""
    with torch.inference_mode(False):
        return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def _launch(
    x: Tensor, weight: Tensor, y: Tensor, *, squares: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, bias: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None,
    adds_to: Tensor | None = None, is_gated: bool = False,
) -> None:  # fmt: skip
    """Writes to y, or adds to it if there is `adds_to`."""
    assert all(one.is_contiguous() for one in (x, weight, y))
    (num_rows, depth), width = x.shape, y.shape[1]
    assert num_rows <= MOST_ROWS
    assert weight.shape == (width * (1 + is_gated), depth)
    inputs = 128 if weight.dtype.itemsize == 1 else 64 if weight.dtype.itemsize == 2 else 32
    tiles, steps = num_parts(width), -(-depth // inputs)
    assert tiles <= _MOST_TILES
    split = 1
    while not is_gated and tiles * split < _PROGRAMS and steps * inputs >= 2 * split * _LEAST_INPUTS:
        split *= 2
    rows = max(16, 1 << (num_rows - 1).bit_length())
    # 32 bits hold the sums of both: 127 * 127 * 2 ** 17 of int8.
    kind = torch.int32 if weight.dtype == torch.int8 else torch.float32
    parts = torch.empty(tiles * split if split > 1 else 0, _OUTPUTS, rows, dtype=kind, device=x.device)
    row_scales, column_scales = scales or (x, x)
    with torch.cuda.device_of(x):
        multiply: Any = _multiply[tiles, split]
        multiply(
            x, row_scales, x if squares is None else squares, x if norm is None else norm, weight, column_scales,
            x if bias is None else bias, y, x if adds_to is None else adds_to, parts, _tickets(x.device), num_rows,
            width, depth, eps, M=rows, N=_OUTPUTS, K=inputs, SPLIT=split, EVEN=depth % inputs == 0,
            NORMED=norm is not None, GATED=is_gated, ADDS=adds_to is not None, SCALED=scales is not None,
            BIAS=bias is not None, INTEGER=kind == torch.int32, EXACT=weight.dtype == torch.float32,
            Q=1 if squares is None else triton.next_power_of_2(len(squares)),
            NUM_PARTS=0 if squares is None else len(squares), num_warps=4, num_stages=_STAGES,
        )  # fmt: skip


@triton.jit
def _inputs(
    x, norm, scale_M, at_M, k_K, depth, half: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr
):  # fmt: skip
    """A tile of rows [M, K], normed and rounded as `ops.rms_norm` rounds them."""
    at_M_K, here_K = x + at_M[:, None] + k_K[None, :], k_K < depth
    if EVEN:
        x_M_K = tl.load(at_M_K)
    else:
        x_M_K = tl.load(at_M_K, mask=here_K[None, :], other=0.0)
    if NORMED:
        norm_K = tl.load(norm + k_K, mask=here_K, other=0.0).to(tl.float32)
        x_M_K = (x_M_K * scale_M[:, None] * norm_K[None, :]).to(half)
    return x_M_K


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x, row_scales, squares, norm, weights, column_scales, bias, y, new_squares, parts, tickets, num_rows, width, depth,
    eps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    INTEGER: tl.constexpr, EXACT: tl.constexpr, Q: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of outputs [N, M], of a part of the inputs: weights are the first factor, so that few rows fill the unit
    that multiplies. INTEGER sums int8, EXACT multiplies in float32."""
    tile, part = tl.program_id(0), tl.program_id(1)
    m_M, n_N = tl.arange(0, M), tile * N + tl.arange(0, N)
    row_M = tl.minimum(m_M, num_rows - 1)
    at_M = row_M.to(tl.int64) * depth
    half: tl.constexpr = weights.dtype.element_ty
    scale_M = tl.full((M,), 1.0, tl.float32)
    if NORMED:
        q_Q = tl.arange(0, Q)
        squares_M_Q = tl.load(
            squares + q_Q[None, :] * num_rows + row_M[:, None], mask=(q_Q < NUM_PARTS)[None, :], other=0.0
        )
        scale_M = tl.rsqrt(tl.sum(squares_M_Q, 1) / depth + eps)
    sums_N_M, more_N_M = _sums(
        x, norm, weights, scale_M, at_M, n_N, part, width, depth, half, M, N, K, SPLIT, EVEN,
        NORMED, GATED, INTEGER, EXACT,
    )  # fmt: skip
    is_last = True
    if SPLIT > 1:
        at_part = parts + tile * SPLIT * N * M + tl.arange(0, N)[:, None] * M + m_M[None, :]
        tl.store(at_part + part * N * M, sums_N_M)
        tl.debug_barrier()  # the ticket of one thread stands for what all have written
        is_last = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if is_last:
            sums_N_M = tl.zeros((N, M), tl.int32 if INTEGER else tl.float32)
            for one in range(SPLIT):
                sums_N_M += tl.load(at_part + one * N * M, cache_modifier=".cg")
            tl.store(tickets + tile, 0)
    if is_last:
        _finish(
            sums_N_M.to(tl.float32), more_N_M, n_N, m_M, row_M, row_scales, column_scales, bias, y, new_squares, tile,
            num_rows, width, half, GATED, ADDS, SCALED, BIAS,
        )  # fmt: skip


@triton.jit
def _sums(
    x, norm, weights, scale_M, at_M, n_N, part, width, depth, half: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    INTEGER: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile of outputs over a part of the inputs, and of the outputs that belong to it."""
    k_K, at_N = tl.arange(0, K), tl.minimum(n_N, width - 1).to(tl.int64) * depth
    sums_N_M = tl.zeros((N, M), tl.int32 if INTEGER else tl.float32)
    more_N_M = tl.zeros((N, M), tl.float32)
    of_each = ((depth + K - 1) // K + SPLIT - 1) // SPLIT * K
    for first in range(part * of_each, tl.minimum((part + 1) * of_each, depth), K):
        here_K = first + k_K
        at_N_K = weights + at_N[:, None] + here_K[None, :]
        if EVEN:
            w_N_K = tl.load(at_N_K)
        else:
            w_N_K = tl.load(at_N_K, mask=(here_K < depth)[None, :], other=0.0)
        x_K_M = tl.trans(_inputs(x, norm, scale_M, at_M, here_K, depth, half, EVEN, NORMED))
        if EXACT:
            sums_N_M = tl.dot(w_N_K, x_K_M, sums_N_M, input_precision="ieee")
        elif INTEGER:
            sums_N_M += tl.dot(w_N_K, x_K_M, out_dtype=tl.int32)
        else:
            sums_N_M = tl.dot(w_N_K, x_K_M, sums_N_M)
        if GATED:
            at_up_N_K = at_N_K + width.to(tl.int64) * depth
            if EVEN:
                up_N_K = tl.load(at_up_N_K)
            else:
                up_N_K = tl.load(at_up_N_K, mask=(here_K < depth)[None, :], other=0.0)
            if EXACT:
                more_N_M = tl.dot(up_N_K, x_K_M, more_N_M, input_precision="ieee")
            else:
                more_N_M = tl.dot(up_N_K, x_K_M, more_N_M)
    return sums_N_M, more_N_M


@triton.jit
def _finish(
    y_N_M, up_N_M, n_N, m_M, row_M, row_scales, column_scales, bias, y, new_squares, tile, num_rows, width,
    half: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What comes after the sums of a tile."""
    in_N_M = (n_N < width)[:, None] & (m_M < num_rows)[None, :]
    at_y = y + m_M[None, :].to(tl.int64) * width + n_N[:, None]
    if SCALED:
        column_N = tl.load(column_scales + n_N, mask=n_N < width, other=0.0)
        y_N_M = y_N_M * tl.load(row_scales + row_M)[None, :] * column_N[:, None]
    if BIAS:
        y_N_M += tl.load(bias + n_N, mask=n_N < width, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate_N_M, up_N_M = y_N_M.to(half).to(tl.float32), up_N_M.to(half).to(tl.float32)
        y_N_M = gate_N_M / (1.0 + tl.exp(-gate_N_M)) * up_N_M
    if ADDS:
        y_N_M = y_N_M.to(half).to(tl.float32) + tl.load(at_y, mask=in_N_M, other=0.0)
        y_N_M = tl.where(in_N_M, y_N_M, 0.0)
        tl.store(new_squares + tile * num_rows + m_M, tl.sum(y_N_M * y_N_M, 0), mask=m_M < num_rows)
    tl.store(at_y, y_N_M.to(y.dtype.element_ty), mask=in_N_M)
