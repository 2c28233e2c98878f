"""Attention of packed tokens in training on CPUs, in float32: one call, forward or backward, for a whole microbatch.

Torch needs a call for each group and copies of its prompt for each response: a third of a small model's step. The
kernel serves on one thread, if `train_attention.cpp` was compiled and has reproduced torch.

Shape suffixes: N packed tokens, H query heads, J key/value heads, K head dim, G segments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.kernels.build import Kernel, load
from llamarl.kernels.ops import are_plain

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def kernels() -> Kernel:
    """Compiles the kernels, and checks them against torch, at the first call."""
    loaded = load("train_attention")
    if (library := loaded.library) is None:
        return loaded
    library.attend.argtypes = (_P, _P, _P, _P, *(_I,) * 5, _F, _P, _P)
    library.attend_backward.argtypes = (*(_P,) * 7, *(_I,) * 5, _F, *(_P,) * 4)
    library.attend.restype = library.attend_backward.restype = None
    if _is_right(library):
        return loaded
    return Kernel(library=None, reason="train_attention.cpp differs from torch on this processor")


def can_serve(q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> bool:
    """Returns whether the kernel serves these tensors: plain float32 tensors of a CPU, on one thread."""
    return are_plain(q_N_H_K, k_N_J_K, v_N_J_K) and kernels().library is not None


def serves() -> bool:
    """Returns whether the kernel exists and one thread computes."""
    return torch.get_num_threads() == 1 and kernels().library is not None


def segments(prompt_lengths: Sequence[int], response_lengths: Sequence[tuple[int, ...]], shared: int = 0) -> np.ndarray:
    """Returns runs of tokens for `attend`, int64 [G, 6]: first token and number of tokens of the run, of the prompt
    that it sees, and of the `shared` first tokens that every prompt continues.

    Groups are consecutive, each a prompt and its responses.
    """
    runs, start = [(0, shared, 0, 0, 0, 0)] if shared else [], shared
    for prompt, lengths in zip(prompt_lengths, response_lengths, strict=True):
        runs.append((start, prompt, 0, 0, 0, shared))
        end = start + prompt
        for length in lengths:
            runs.append((end, length, start, prompt, 0, shared))
            end += length
        start = end
    return np.array(runs, np.int64).reshape(-1, 6)


def attend(q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor, segments_G_6: np.ndarray) -> Tensor:
    """Returns outputs [N, H, K]. Each token sees its segment up to itself, and the runs that the segment sees. Scores
    are scaled by head_dim ** -0.5."""
    return _AttendFunction.apply(q_N_H_K, k_N_J_K, v_N_J_K, segments_G_6)


class _AttendFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor, segments_G_6: np.ndarray) -> Tensor:
        q_N_H_K, k_N_J_K, v_N_J_K = (x.contiguous() for x in (q_N_H_K, k_N_J_K, v_N_J_K))
        library = kernels().library
        assert library is not None, "there are no kernels"
        out_N_H_K, lse_H_N = forward(library, q_N_H_K, k_N_J_K, v_N_J_K, segments_G_6)
        ctx.save_for_backward(q_N_H_K, k_N_J_K, v_N_J_K, out_N_H_K, lse_H_N)
        ctx.library, ctx.segments_G_6 = library, segments_G_6
        return out_N_H_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(ctx.library, grads[0].contiguous(), q, k, v, out, lse, ctx.segments_G_6), None


def forward(
    library: ctypes.CDLL, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor, segments_G_6: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Returns outputs, and the logarithm of the sum of each query's exponentials, [H, N]."""
    out_N_H_K, lse_H_N = torch.empty_like(q_N_H_K), q_N_H_K.new_empty(q_N_H_K.shape[1], len(q_N_H_K))
    library.attend(
        *(x.data_ptr() for x in (q_N_H_K, k_N_J_K, v_N_J_K)), *_sizes(q_N_H_K, k_N_J_K, segments_G_6),
        out_N_H_K.data_ptr(), lse_H_N.data_ptr(),
    )  # fmt: skip
    return out_N_H_K, lse_H_N


def backward(
    library: ctypes.CDLL,
    grad_N_H_K: Tensor,
    q_N_H_K: Tensor,
    k_N_J_K: Tensor,
    v_N_J_K: Tensor,
    out_N_H_K: Tensor,
    lse_H_N: Tensor,
    segments_G_6: np.ndarray,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of queries, keys and values."""
    inputs = grad_N_H_K, q_N_H_K, k_N_J_K, v_N_J_K, out_N_H_K, lse_H_N
    grads = torch.empty_like(q_N_H_K), torch.zeros_like(k_N_J_K), torch.zeros_like(v_N_J_K)
    delta_H_N = torch.empty_like(lse_H_N)
    library.attend_backward(
        *(x.data_ptr() for x in inputs), *_sizes(q_N_H_K, k_N_J_K, segments_G_6),
        *(x.data_ptr() for x in (delta_H_N, *grads)),
    )  # fmt: skip
    return grads


def _sizes(q_N_H_K: Tensor, k_N_J_K: Tensor, segments_G_6: np.ndarray) -> tuple[int | float, ...]:
    num_tokens, heads, head_dim = q_N_H_K.shape
    assert segments_G_6[:, 1].sum() == num_tokens, "every token must be in one segment"
    return segments_G_6.ctypes.data, len(segments_G_6), num_tokens, heads, k_N_J_K.shape[1], head_dim, head_dim**-0.5


def mask(segments_G_6: np.ndarray) -> Tensor:
    """Returns which token sees which, bool [N, N]."""
    num_tokens = int(segments_G_6[:, 1].sum())
    sees_N_N = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for first, count, *seen in segments_G_6.tolist():
        sees_N_N[first : first + count, first : first + count] = torch.ones(count, count, dtype=torch.bool).tril()
        for start, number in (seen[:2], seen[2:]):
            sees_N_N[first : first + count, start : start + number] = True
    return sees_N_N


def _is_right(library: ctypes.CDLL) -> bool:
    """Compares two responses to a prompt behind shared tokens with torch, and gradients with their formulas, because
    inference mode has none."""
    generator = torch.Generator().manual_seed(0)
    sizes = segments((12,), ((37, 5),), shared=7)
    sees_N_N = mask(sizes)
    q, grad = (torch.randn(61, 2, 10, generator=generator) for _ in range(2))
    k, v = (torch.randn(61, 1, 10, generator=generator) for _ in range(2))
    wide_k, wide_v = k.expand(-1, 2, -1).transpose(0, 1), v.expand(-1, 2, -1).transpose(0, 1)
    out, lse = forward(library, q, k, v, sizes)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), wide_k, wide_v, attn_mask=sees_N_N).transpose(0, 1)
    p = (q.transpose(0, 1) @ wide_k.mT * 10**-0.5).masked_fill(~sees_N_N, -torch.inf).softmax(-1)
    g = grad.transpose(0, 1)
    ds = p * (g @ wide_v.mT - (g * expected.transpose(0, 1)).sum(-1, keepdim=True)) * 10**-0.5
    exact = (ds @ wide_k).transpose(0, 1), (ds.mT @ q.transpose(0, 1)).sum(0)[:, None], (p.mT @ g).sum(0)[:, None]
    grads = backward(library, grad, q, k, v, out, lse, sizes)
    return all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in zip((out, *grads), (expected, *exact), strict=True))
