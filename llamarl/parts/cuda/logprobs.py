"""A tile of logits on GPUs for `training/policy.py`, in one pass each: the running softmax with the targets' logits,
and the gradient, rounded to the type of the next matrix product. Torch takes seven passes, which cost more than the
matrix products.

Shape suffixes: R target tokens, T tokens of the vocabulary in a tile; in the kernels T columns of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Maximum columns of a row per iteration."""


def add_tile(logits_R_T: Tensor, columns_R: Tensor, largest_R_1: Tensor, sums_R_1: Tensor, targets_R_1: Tensor) -> None:
    """Updates the running maximum, the running sum of exponentials, and the targets' logits with a tile; all float32.

    Args:
        columns_R: int64; column of the target, outside of the tile's range if the target is in another tile.
    """
    _launch(_add_tile, logits_R_T, columns_R, largest_R_1, sums_R_1, targets_R_1)


def gradient(
    logits_R_T: Tensor, columns_R: Tensor, normalizers_R: Tensor, scales_R_1: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns scale * (1 at the target - probability) of each logit, [R, T]."""
    grad_R_T = torch.empty_like(logits_R_T, dtype=dtype)
    _launch(_gradient, logits_R_T, columns_R, normalizers_R, scales_R_1, grad_R_T)
    return grad_R_T


def _launch(kernel: Any, logits_R_T: Tensor, *arguments: Tensor) -> None:
    """Launches one program per row."""
    assert all(one.is_contiguous() for one in (logits_R_T, *arguments))
    num_rows, width = logits_R_T.shape
    with torch.cuda.device_of(logits_R_T):
        kernel[(num_rows,)](logits_R_T, width, *arguments, T=min(_BLOCK, triton.next_power_of_2(width)), num_warps=4)


@triton.jit(do_not_specialize=["width"])
def _add_tile(logits, width, columns, largest, sums, targets, T: tl.constexpr):
    row, t_T = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    most, total = tl.load(largest + row), tl.load(sums + row)
    for first in range(0, width, T):
        logits_T = tl.load(logits + row * width + first + t_T, mask=first + t_T < width, other=-float("inf"))
        more = tl.maximum(most, tl.max(logits_T, 0))
        total = total * tl.exp(most - more) + tl.sum(tl.exp(logits_T - more), 0)
        most = more
    tl.store(largest + row, most)
    tl.store(sums + row, total)
    column = tl.load(columns + row)
    if (column >= 0) & (column < width):
        tl.store(targets + row, tl.load(logits + row * width + column))


@triton.jit(do_not_specialize=["width"])
def _gradient(logits, width, columns, normalizers, scales, grads, T: tl.constexpr):
    row, t_T = tl.program_id(0).to(tl.int64), tl.arange(0, T)
    normalizer, scale, column = tl.load(normalizers + row), tl.load(scales + row), tl.load(columns + row)
    for first in range(0, width, T):
        here_T = first + t_T < width
        logits_T = tl.load(logits + row * width + first + t_T, mask=here_T, other=0.0)
        grad_T = scale * (tl.where(first + t_T == column, 1.0, 0.0) - tl.exp(logits_T - normalizer))
        tl.store(grads + row * width + first + t_T, grad_T.to(grads.dtype.element_ty), mask=here_T)
