"""Small operations of bfloat16 training on GPUs, forward and backward: one pass over memory each, with float32 sums.

Torch makes several passes and widens intermediate values, which takes half of a step. Tested like `decode.py`.

Shape suffixes: N packed tokens, D channels of a row, H heads, K head dim, R rotated channels of a head; in the kernels
D, H and K as powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 512
"""Programs that share the rows in the backward of a norm. Each sums a part of the weight's gradient."""
_BLOCK = 2048
"""Elements per program of the gated activation."""


def rms_norm(x_N_D: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight, in `dtype`."""
    y_N_D = torch.empty_like(x_N_D, dtype=dtype)
    _launch(_norm, len(x_N_D), x_N_D, weight_D, y_N_D, x_N_D.shape[1], eps, **_of_width(x_N_D.shape[1]))
    return y_N_D


def rms_norm_backward(grad_N_D: Tensor, x_N_D: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight, in their types."""
    (num_rows, width), grad_x_N_D = x_N_D.shape, torch.empty_like(x_N_D)
    parts_P_D = torch.empty(min(_ROWS, num_rows), width, device=x_N_D.device)
    sizes = num_rows, width, eps
    _launch(
        _norm_backward, len(parts_P_D), grad_N_D, x_N_D, weight_D, grad_x_N_D, parts_P_D, *sizes, **_of_width(width)
    )
    return grad_x_N_D, parts_P_D.sum(0).to(weight_D.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up of contiguous tensors."""
    y, size = torch.empty_like(gate), gate.numel()
    _launch(_gate, -(-size // _BLOCK), gate, up, y, size, T=_BLOCK)
    return y


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _launch(_gate_backward, -(-size // _BLOCK), grad, gate, up, grad_gate, grad_up, size, T=_BLOCK)
    return grad_gate, grad_up


def rotated(x_N_H_K: Tensor, cos_N_1_R: Tensor, sin_N_1_R: Tensor, back: bool = False) -> Tensor:
    """Returns `ops.rotate_by_torch` in float32, in the type of `x`. `back` applies it to a gradient."""
    num_tokens, num_heads, head_dim = x_N_H_K.shape
    y_N_H_K = torch.empty_like(x_N_H_K, memory_format=torch.contiguous_format)
    assert x_N_H_K.stride(2) == cos_N_1_R.stride(2) == sin_N_1_R.stride(2) == 1
    assert cos_N_1_R.stride(0) == sin_N_1_R.stride(0)
    _launch(
        _rotate, num_tokens, x_N_H_K, cos_N_1_R, sin_N_1_R, y_N_H_K, *x_N_H_K.stride()[:2], cos_N_1_R.stride(0),
        num_heads, head_dim, cos_N_1_R.shape[-1], BACK=back, H=_power(num_heads), K=_power(head_dim),
    )  # fmt: skip
    return y_N_H_K


def _launch(kernel: Any, programs: int, first: Tensor, *arguments: Any, **options: Any) -> None:
    with torch.cuda.device_of(first):
        kernel[(programs,)](first, *arguments, **options)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _of_width(width: int) -> dict[str, int]:
    """Returns options of a kernel that holds a whole row."""
    return {"D": _power(width), "num_warps": min(32, max(1, _power(width) // 512))}


@triton.jit
def _norm(x, weight, y, width, eps, D: tl.constexpr):
    row, d_D = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    here_D = d_D < width
    x_D = tl.load(x + row * width + d_D, mask=here_D, other=0.0).to(tl.float32)
    weight_D = tl.load(weight + d_D, mask=here_D, other=0.0).to(tl.float32)
    y_D = x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / width + eps) * weight_D
    tl.store(y + row * width + d_D, y_D.to(y.dtype.element_ty), mask=here_D)


_KEPT = tl.constexpr(8192)
"""Maximum channels of a row for which weights and sums also fit into registers."""


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward(grad, x, weight, grad_x, parts, num_rows, width, eps, D: tl.constexpr):
    """With s = 1 / sqrt(mean(x^2) + eps) and h = grad * weight: grad_x = s * h - x * s^3 * mean(h * x)."""
    d_D = tl.arange(0, D)
    here_D = d_D < width
    part_D = tl.zeros((D,), tl.float32)
    first, programs = tl.program_id(0), tl.num_programs(0)
    own = parts + first.to(tl.int64) * width
    weight_D = tl.load(weight + d_D, mask=here_D, other=0.0).to(tl.float32)
    if D > _KEPT:
        tl.store(own + d_D, part_D, mask=here_D)
    for turn in range((num_rows - first + programs - 1) // programs):
        row = (first + turn * programs).to(tl.int64) * width
        x_D = tl.load(x + row + d_D, mask=here_D, other=0.0).to(tl.float32)
        grad_D = tl.load(grad + row + d_D, mask=here_D, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_D * x_D, 0) / width + eps)
        if D <= _KEPT:
            part_D += grad_D * x_D * scale
            h_D = grad_D * weight_D
        else:
            sum_D = tl.load(own + d_D, mask=here_D, other=0.0) + grad_D * x_D * scale
            tl.store(own + d_D, sum_D, mask=here_D)
            h_D = grad_D * tl.load(weight + d_D, mask=here_D, other=0.0).to(tl.float32)
        grad_x_D = scale * h_D - x_D * (scale * scale * scale * tl.sum(h_D * x_D, 0) / width)
        tl.store(grad_x + row + d_D, grad_x_D.to(grad_x.dtype.element_ty), mask=here_D)
    if D <= _KEPT:
        tl.store(own + d_D, part_D, mask=here_D)


@triton.jit(do_not_specialize=["size"])
def _gate(gate, up, y, size, T: tl.constexpr):
    place_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    here_T = place_T < size
    gate_T = tl.load(gate + place_T, mask=here_T, other=0.0).to(tl.float32)
    up_T = tl.load(up + place_T, mask=here_T, other=0.0).to(tl.float32)
    tl.store(y + place_T, (gate_T * tl.sigmoid(gate_T) * up_T).to(y.dtype.element_ty), mask=here_T)


@triton.jit(do_not_specialize=["size"])
def _gate_backward(grad, gate, up, grad_gate, grad_up, size, T: tl.constexpr):
    place_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    here_T = place_T < size
    grad_T = tl.load(grad + place_T, mask=here_T, other=0.0).to(tl.float32)
    gate_T = tl.load(gate + place_T, mask=here_T, other=0.0).to(tl.float32)
    up_T = tl.load(up + place_T, mask=here_T, other=0.0).to(tl.float32)
    sigmoid_T = tl.sigmoid(gate_T)
    silu_T = gate_T * sigmoid_T
    slope_T = sigmoid_T + silu_T * (1.0 - sigmoid_T)
    tl.store(grad_gate + place_T, (grad_T * up_T * slope_T).to(grad_gate.dtype.element_ty), mask=here_T)
    tl.store(grad_up + place_T, (grad_T * silu_T).to(grad_up.dtype.element_ty), mask=here_T)


@triton.jit(do_not_specialize=["x_row"])
def _rotate(
    x, cos, sin, y, x_row, x_head, angle_row, num_heads, head_dim, rotary_dim, BACK: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Combines each rotated channel with the one half of the rotated channels away. The other channels are
    unchanged."""
    token, h_H, k_K = tl.program_id(0).to(tl.int64), tl.arange(0, H), tl.arange(0, K)
    turns_K = k_K < rotary_dim
    other_K = tl.where(turns_K, (k_K + rotary_dim // 2) % rotary_dim, k_K)
    here_H_K = (h_H < num_heads)[:, None] & (k_K < head_dim)[None, :]
    at_H = x + token * x_row + h_H[:, None] * x_head
    x_H_K = tl.load(at_H + k_K[None, :], mask=here_H_K, other=0.0).to(tl.float32)
    other_H_K = tl.load(at_H + other_K[None, :], mask=here_H_K, other=0.0).to(tl.float32)
    cos_K = tl.load(cos + token * angle_row + k_K, mask=turns_K, other=1.0)
    sin_K = tl.load(sin + token * angle_row + (other_K if BACK else k_K), mask=turns_K, other=0.0)
    y_H_K = x_H_K * cos_K[None, :] + other_H_K * sin_K[None, :]
    at_y = y + (token * num_heads + h_H[:, None]) * head_dim + k_K[None, :]
    tl.store(at_y, y_H_K.to(y.dtype.element_ty), mask=here_H_K)
