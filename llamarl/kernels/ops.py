"""The small operations of a decode step: norms, rotation, gated activation, and the sampling of tokens.

On the CPU in float32 each is one pass in C++ (`ops.cpp`), once it has reproduced torch. On GPUs norms and activations
are one launch each (`parts/cuda/ops.py`). Otherwise torch computes, and `kernels().reason` says why.

Shape suffixes: N packed tokens, D model dim, H query heads, J kv heads, K head dim, F feed-forward dim, B sampled rows,
V vocabulary, R rotated channels of a head.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.kernels import gpu
from llamarl.kernels.build import Kernel, load

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@functools.cache
def kernels() -> Kernel:
    """Compiles the kernels, and checks them against torch, at the first call."""
    loaded = load("ops")
    library = loaded.library
    if library is None:
        return loaded
    library.rms_norm.argtypes = (_P, _P, _P, _I, _I, _F)
    library.rotate.argtypes = (_P, _I, _I, _P, _P, _P, _I, _I, _I, _I, _F)
    library.silu_mul.argtypes = (_P, _I, _P, _I, _P, _I, _I)
    library.draw.argtypes = (_P, _I, _I, _P, _P, _P, _P)
    library.rms_norm_backward.argtypes = (_P, _P, _P, _P, _P, _I, _I, _F)
    library.silu_mul_backward.argtypes = (_P, _P, _P, _P, _P, _I)
    for name in ("rms_norm", "rotate", "silu_mul", "draw", "rms_norm_backward", "silu_mul_backward"):
        getattr(library, name).restype = None
    wrong = _wrong(library)
    return Kernel(library=None, reason=f"ops.cpp: {wrong} differs from torch on this processor") if wrong else loaded


def rms_norm(
    x_N_D: Tensor, weight_D: Tensor, eps: float, delta_N_D: Tensor | None = None, takes: torch.dtype | None = None
) -> Any:
    """Returns x / sqrt(mean(x^2) + eps) * weight, in the type of the weight, after adding `delta` to x in place.

    With `takes`, see `Linear.takes`, it returns quantized rows: values and scales.
    """
    library = _library(x_N_D)
    if library is None and x_N_D.ndim == 2 and (fused := gpu.kernel("ops", x_N_D.device)):
        return fused.rms_norm(x_N_D, weight_D, eps, delta_N_D, takes)
    if delta_N_D is not None:
        x_N_D.add_(delta_N_D)
    if library is None:
        return F.rms_norm(x_N_D, weight_D.shape, weight_D.to(x_N_D.dtype), eps).to(weight_D.dtype)
    num_rows, width = x_N_D.shape
    assert x_N_D.is_contiguous()
    assert is_vector(weight_D, width)
    y_N_D = torch.empty_like(x_N_D)
    library.rms_norm(x_N_D.data_ptr(), weight_D.data_ptr(), y_N_D.data_ptr(), num_rows, width, eps)
    return y_N_D


def rotate(
    q_N_H_K: Tensor, k_N_J_K: Tensor, rotation: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Norms each head by RMS if `norms` has weights [K] for queries and keys, then rotates the first R channels by
    (cos, sin), each [N, 1, R].

    The sine's first half is negative, as in `models/transformer.py`. May overwrite its inputs.
    """
    library = _library(q_N_H_K)
    weights = norms or (None, None)
    pairs = (q_N_H_K, weights[0]), (k_N_J_K, weights[1])
    if library is None:
        normed = (x if weight is None else rms_norm(x, weight, eps) for x, weight in pairs)
        q, k = (rotate_by_torch(x, rotation).to(x.dtype) for x in normed)
        return q, k
    cos_N_1_R, sin_N_1_R = rotation
    rotary_dim, head_dim = cos_N_1_R.shape[-1], q_N_H_K.shape[-1]
    for x in (*rotation, q_N_H_K, k_N_J_K):
        assert x.dtype == torch.float32
        assert x.stride(2) == 1
        assert x.shape[1] == 1 or x.stride(1) == head_dim, "the heads of a row must be contiguous"
    for x_N_H_K, weight_K in pairs:
        assert weight_K is None or is_vector(weight_K, head_dim)
        library.rotate(
            x_N_H_K.data_ptr(), x_N_H_K.stride(0), x_N_H_K.shape[1], None if weight_K is None else weight_K.data_ptr(),
            cos_N_1_R.data_ptr(), sin_N_1_R.data_ptr(), cos_N_1_R.stride(0), len(x_N_H_K), head_dim, rotary_dim, eps,
        )  # fmt: skip
    return q_N_H_K, k_N_J_K


def rms_norm_backward(grad_N_D: Tensor, x_N_D: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns gradients of `rms_norm`'s x and weight. Needs kernels; all tensors are contiguous."""
    grad_x_N_D, grad_weight_D = torch.empty_like(x_N_D), torch.empty_like(weight_D)
    pointers = [x.data_ptr() for x in (grad_N_D, x_N_D, weight_D, grad_x_N_D, grad_weight_D)]
    _required().rms_norm_backward(*pointers, x_N_D.numel() // len(weight_D), len(weight_D), eps)
    return grad_x_N_D, grad_weight_D


def silu_mul_backward(grad_N_F: Tensor, gate_N_F: Tensor, up_N_F: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gradients of gate and up. Needs kernels; all tensors are contiguous."""
    grad_gate_N_F, grad_up_N_F = torch.empty_like(gate_N_F), torch.empty_like(up_N_F)
    pointers = [x.data_ptr() for x in (grad_N_F, gate_N_F, up_N_F, grad_gate_N_F, grad_up_N_F)]
    _required().silu_mul_backward(*pointers, grad_N_F.numel())
    return grad_gate_N_F, grad_up_N_F


def rotated(x_N_H_K: Tensor, cos_N_1_R: Tensor, sin_N_1_R: Tensor) -> Tensor:
    """Returns `rotate_by_torch` of float32 heads. Needs kernels."""
    made = x_N_H_K.clone(memory_format=torch.contiguous_format)
    num_rows, num_heads, head_dim = made.shape
    table = torch.cat((cos_N_1_R, sin_N_1_R), 1)
    _required().rotate(
        made.data_ptr(), num_heads * head_dim, num_heads, None, table[:, 0].data_ptr(),
        table[:, 1].data_ptr(), table.stride(0), num_rows, head_dim, table.shape[-1], 0.0,
    )  # fmt: skip
    return made


def rotate_by_torch(x_N_H_K: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates channel i with channel i + R/2, and keeps channels from R on. The table includes the sine's sign, so
    swapping halves needs no negation."""
    cos_N_1_R, sin_N_1_R = rotation
    size = cos_N_1_R.shape[-1]
    x_N_H_R, rest = x_N_H_K[..., :size], x_N_H_K[..., size:]
    swapped_N_H_R = x_N_H_R.roll(size // 2, dims=-1)
    # Not addcmul: its fused multiply-add rounds once where transformers rounds twice.
    rotated_N_H_R = x_N_H_R * cos_N_1_R + swapped_N_H_R * sin_N_1_R
    return torch.cat((rotated_N_H_R, rest.to(rotated_N_H_R.dtype)), -1) if rest.shape[-1] else rotated_N_H_R


def gate_by_torch(gate_N_F: Tensor, up_N_F: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    return F.silu(gate_N_F) * up_N_F


def silu_mul(gate_N_F: Tensor, up_N_F: Tensor, takes: torch.dtype | None = None) -> Any:
    """Returns silu(gate) * up. Both may be halves of one matrix. Quantizes like `rms_norm`."""
    library = _library(gate_N_F)
    if library is None and (fused := gpu.kernel("ops", gate_N_F.device)):
        return fused.silu_mul(gate_N_F, up_N_F, takes)
    if library is None:
        return gate_by_torch(gate_N_F, up_N_F)
    assert gate_N_F.shape == up_N_F.shape
    assert gate_N_F.stride(1) == up_N_F.stride(1) == 1
    assert gate_N_F.dtype == up_N_F.dtype == torch.float32
    y_N_F = torch.empty(gate_N_F.shape)
    library.silu_mul(
        gate_N_F.data_ptr(), gate_N_F.stride(0), up_N_F.data_ptr(), up_N_F.stride(0), y_N_F.data_ptr(), *y_N_F.shape
    )
    return y_N_F


def draw(logits_B_V: Tensor, temperature_B: np.ndarray, noise_B: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Samples one token per row by inverting the cumulative softmax of logits / temperature at `noise_B`. None means
    that there are no kernels.

    Temperature 0 takes the first of the largest logits, with its log-probability at temperature 1.

    Returns:
        Token ids, int64 [B], and log-probabilities, float32 [B]. A non-finite row has NaN and an arbitrary valid id.
    """
    library = _library(logits_B_V)
    if library is None:
        return None
    num_rows, vocab_size = logits_B_V.shape
    logits_B_V = logits_B_V.contiguous()
    inputs = [np.ascontiguousarray(values_B, np.float32) for values_B in (temperature_B, noise_B)]
    assert all(values_B.shape == (num_rows,) for values_B in inputs)
    tokens_B, logprobs_B = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
    pointers = [array.ctypes.data for array in (*inputs, tokens_B, logprobs_B)]
    library.draw(logits_B_V.data_ptr(), num_rows, vocab_size, *pointers)
    return tokens_B, logprobs_B


def _library(x: Tensor) -> ctypes.CDLL | None:
    return kernels().library if x.device.type == "cpu" and x.dtype == torch.float32 else None


def are_plain(*tensors: Tensor) -> bool:
    """Returns whether these are plain float32 tensors of a CPU and one thread computes, as kernels with gradients
    need."""
    has_one_thread = torch.get_num_threads() == 1 and not torch.compiler.is_compiling()
    return has_one_thread and all(
        type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors
    )


def _required() -> ctypes.CDLL:
    library = kernels().library
    assert library is not None, "there are no kernels"
    return library


def addresses(*names: str) -> ctypes.Array[ctypes.c_void_p]:
    """Returns kernels for C++ to call. Needs kernels."""
    return (_P * len(names))(*(ctypes.cast(getattr(_required(), name), _P) for name in names))


def is_vector(weight: Tensor, size: int) -> bool:
    """Returns whether a kernel can read this as `size` weights of a norm."""
    return weight.shape == (size,) and weight.dtype == torch.float32 and weight.is_contiguous()


def _wrong(library: ctypes.CDLL) -> str:
    """Returns the first kernel that does not reproduce torch, or ""."""
    generator = torch.Generator().manual_seed(0)
    x, up, cos, sin = (torch.randn(3, 2, 22, generator=generator) * 4 for _ in range(4))
    weight, noise, temperature = torch.rand(22, generator=generator), torch.full((3,), 0.6), torch.ones(3)
    y, tokens, logprobs = torch.empty(6, 22), torch.empty(3, dtype=torch.int64), torch.empty(3)
    x_6_22, pointers = x.view(6, 22), [t.data_ptr() for t in (x, weight, y)]
    library.rms_norm(*pointers, 6, 22, 1e-6)
    if not torch.allclose(y, F.rms_norm(x_6_22, (22,), weight, 1e-6), 1e-5, 1e-6):
        return "rms_norm"
    for size in (22, 10):  # all channels, and the first ones
        rotated = x.clone()
        library.rotate(rotated.data_ptr(), 44, 2, None, cos.data_ptr(), sin.data_ptr(), 44, 3, 22, size, 1e-6)
        if not torch.allclose(rotated, rotate_by_torch(x, (cos[:, :1, :size], sin[:, :1, :size])), 1e-5, 1e-5):
            return "rotate"
    library.silu_mul(x.data_ptr(), 22, up.data_ptr(), 22, y.data_ptr(), 6, 22)
    if not torch.allclose(y, F.silu(x_6_22) * up.view(6, 22), 1e-5, 1e-6):
        return "silu_mul"
    if wrong := _wrong_gradient(library, cos.reshape(6, 22), x_6_22, up.view(6, 22), weight):
        return wrong
    library.draw(x.data_ptr(), 3, 44, *(t.data_ptr() for t in (temperature, noise, tokens, logprobs)))
    logits = x.view(3, 44)
    expected = torch.searchsorted(torch.softmax(logits, 1).cumsum(1), noise[:, None])[:, 0]
    exact = torch.log_softmax(logits, 1)[range(3), tokens.clamp(0, 43)]
    return "" if tokens.equal(expected) and torch.allclose(logprobs, exact, 1e-5, 1e-5) else "draw"


def _wrong_gradient(library: ctypes.CDLL, grad: Tensor, x: Tensor, up: Tensor, weight: Tensor) -> str:
    """Returns the first gradient that differs from its formula, or "". Autograd has none in inference mode."""
    grads = torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight)
    grad_x, grad_up, grad_weight = (tensor.data_ptr() for tensor in grads)
    pointers = [tensor.data_ptr() for tensor in (grad, x, weight)]
    library.rms_norm_backward(*pointers, grad_x, grad_weight, *x.shape, 1e-6)
    inverse = torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
    along = (grad * weight * x).mean(1, keepdim=True) * inverse**2
    expected = (grad * weight - x * along) * inverse, (grad * x * inverse).sum(0)
    if not all(torch.allclose(*pair, 1e-4, 1e-5) for pair in zip(grads[::2], expected, strict=True)):
        return "rms_norm_backward"
    library.silu_mul_backward(grad.data_ptr(), x.data_ptr(), up.data_ptr(), grad_x, grad_up, x.numel())
    share = torch.sigmoid(x)
    expected = grad * up * share * (1 + x * (1 - share)), grad * x * share
    is_right = all(torch.allclose(*pair, 1e-4, 1e-5) for pair in zip(grads[:2], expected, strict=True))
    return "" if is_right else "silu_mul_backward"
