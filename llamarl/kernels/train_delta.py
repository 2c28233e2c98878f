"""The gated delta rule of packed tokens in training on CPUs, in float32: convolution, norms and rule in one call,
forward or backward, for a whole microbatch.

Torch needs a call for each kind of product in a chunk, and makes copies for each chunk: half of a small model's step.
The kernel keeps only its inputs for backward. It serves on one thread, if `train_delta.cpp` was compiled and has
reproduced the recurrent form.

Shape suffixes: N packed tokens, C mixed channels, W conv width, H value heads, V value dim, B sequences.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.kernels.build import Kernel, load
from llamarl.kernels.delta import convolved, heads, step, wide
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.kernels.ops import are_plain

_P, _I = ctypes.c_void_p, ctypes.c_int64
_CHECKED = DeltaShape(layers=(0,), num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=21, conv_width=4)


@functools.cache
def kernels() -> Kernel:
    """Compiles the kernels, and checks them against the recurrent form in torch, at the first call."""
    loaded = load("train_delta")
    if (library := loaded.library) is None:
        return loaded
    library.delta_forward.argtypes = (_P, _I, _I, *(_P,) * 6)
    library.delta_backward.argtypes = (_P, _I, _I, *(_P,) * 10)
    library.delta_forward.restype = library.delta_backward.restype = None
    if _is_right(library):
        return loaded
    return Kernel(library=None, reason="train_delta.cpp differs from torch on this processor")


def can_serve(decay_N_H: Tensor, strength_N_H: Tensor) -> bool:
    """Returns whether the kernel serves a delta net with these decays and strengths: plain float32 tensors of a CPU, on
    one thread. The other inputs may be bfloat16."""
    return are_plain(decay_N_H, strength_N_H) and kernels().library is not None


def apply(
    sequences_B_3: np.ndarray, delta: DeltaShape, chunk_tokens: int, mixed_N_C: Tensor, conv_C_W: Tensor,
    decay_N_H: Tensor, strength_N_H: Tensor,
) -> Tensor:  # fmt: skip
    """Returns outputs [N, H, V], float32. The number of heads follows from the decays, which tensor parallelism cuts.

    Args:
        sequences_B_3: first token, number of tokens, and number of the sequence that each one continues, which comes
            before it, or -1; int64. Every token is in one sequence.
    """
    ranks = delta.num_value_heads // decay_N_H.shape[1]
    sizes_6 = np.array(
        [
            delta.num_key_heads // ranks, decay_N_H.shape[1], delta.key_dim, delta.value_dim, delta.conv_width,
            chunk_tokens,
        ],
        np.int64,
    )  # fmt: skip
    return _DeltaFunction.apply(sequences_B_3, sizes_6, mixed_N_C, conv_C_W, decay_N_H, strength_N_H)


class _DeltaFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequences_B_3: np.ndarray, sizes_6: np.ndarray, *inputs: Tensor) -> Tensor:
        library = kernels().library
        assert library is not None, "there are no kernels"
        ctx.save_for_backward(*inputs)
        ctx.library, ctx.sequences_B_3, ctx.sizes_6 = library, sequences_B_3, sizes_6
        return forward(library, sequences_B_3, sizes_6, [wide(x).contiguous() for x in inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        saved = ctx.saved_tensors  # once, because activation checkpointing frees what it has computed again
        inputs = [wide(x).contiguous() for x in saved]
        found = backward(ctx.library, ctx.sequences_B_3, ctx.sizes_6, inputs, grads[0].contiguous())
        return None, None, *(grad.to(x.dtype) for grad, x in zip(found, saved, strict=True))


def forward(library: ctypes.CDLL, sequences_B_3: np.ndarray, sizes_6: np.ndarray, inputs: Sequence[Tensor]) -> Tensor:
    """Returns outputs of contiguous float32 inputs."""
    decay_N_H = inputs[2]
    assert sequences_B_3[:, 1].sum() == len(decay_N_H), "every token must be in one sequence"
    out_N_H_V = decay_N_H.new_empty(*decay_N_H.shape, int(sizes_6[3]))
    library.delta_forward(
        sequences_B_3.ctypes.data, len(sequences_B_3), len(decay_N_H), *(x.data_ptr() for x in inputs),
        sizes_6.ctypes.data, out_N_H_V.data_ptr(),
    )  # fmt: skip
    return out_N_H_V


def backward(
    library: ctypes.CDLL, sequences_B_3: np.ndarray, sizes_6: np.ndarray, inputs: Sequence[Tensor], grad_N_H_V: Tensor
) -> list[Tensor]:
    """Returns gradients of the inputs."""
    grads = [torch.empty_like(x) for x in inputs]
    library.delta_backward(
        sequences_B_3.ctypes.data, len(sequences_B_3), len(grad_N_H_V), *(x.data_ptr() for x in inputs),
        sizes_6.ctypes.data, grad_N_H_V.data_ptr(), *(x.data_ptr() for x in grads),
    )  # fmt: skip
    return grads


def _is_right(library: ctypes.CDLL) -> bool:
    """Compares a sequence of two chunks, and one that continues it, with the recurrent form."""
    generator, delta, length = torch.Generator().manual_seed(0), _CHECKED, 9
    sequences_B_3 = np.array([(0, 6, -1), (6, 3, 0)], np.int64)
    sizes_6 = np.array([2, 4, delta.key_dim, delta.value_dim, delta.conv_width, 4], np.int64)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        mixed, conv = (
            torch.randn(*size, generator=generator) for size in ((9, delta.mixed_size), (delta.mixed_size, 4))
        )
        inputs = mixed, conv, -torch.rand(9, 4, generator=generator), torch.rand(9, 4, generator=generator)
        grad_N_H_V = torch.randn(length, 4, delta.value_dim, generator=generator)
        own = [x.requires_grad_() for x in inputs]
        expected = _one_by_one(delta, *own)
        exact = torch.autograd.grad(expected, own, grad_N_H_V)
    found = (
        forward(library, sequences_B_3, sizes_6, inputs),
        *backward(library, sequences_B_3, sizes_6, inputs, grad_N_H_V),
    )
    return all(torch.allclose(a, b, 1e-3, 1e-4) for a, b in zip(found, (expected, *exact), strict=True))


def _one_by_one(
    delta: DeltaShape, mixed_N_C: Tensor, conv_C_W: Tensor, decay_N_H: Tensor, strength_N_H: Tensor
) -> Tensor:
    """Returns outputs of one sequence by the recurrent form."""
    width = conv_C_W.shape[1]
    padded = torch.cat((mixed_N_C.new_zeros(width - 1, mixed_N_C.shape[1]), mixed_N_C))
    q, k, v = heads(convolved([padded[first : first + len(mixed_N_C)] for first in range(width)], conv_C_W), delta)
    state, outputs = mixed_N_C.new_zeros(1, delta.num_value_heads, delta.key_dim, delta.value_dim), list[Tensor]()
    for token in range(len(mixed_N_C)):
        now = slice(token, token + 1)
        output, state = step(q[now], k[now], v[now], decay_N_H[now], strength_N_H[now], state)
        outputs.append(output)
    return torch.cat(outputs)
