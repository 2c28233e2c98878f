"""Dense layers of a decoder in one call on the CPU (`stack.cpp`), with the same bits as their separate kernels.

A layer is nine kernels. In a small model each takes microseconds, and its call from Python as long again: a decode step
of 88 rows of the demo's model took 1.9 ms with separate calls, of which its kernels take half.

Shape suffixes: N packed tokens, D model dim, K head dim, L layers, C blocks of the cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from llamarl.kernels import ops
from llamarl.kernels.attention import PagedAttention
from llamarl.kernels.build import Kernel, load
from llamarl.kernels.linear import Linear, Matrix

_P, _I = ctypes.c_void_p, ctypes.c_int64


Norms = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Weights of a layer's norms: of its input [D], of query and key heads [K] or None, and of the input of its
feed-forward [D]."""
Linears = tuple[Linear, ...]
"""The four products of a layer: joined queries, keys and values; the attention's output; joined gate and up; down."""
NUM_LINEARS = 4


class _LayerPointers(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
    )


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, _I) for name in ("num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "inner")
    )


@functools.cache
def kernel() -> Kernel:
    """Compiles the kernel at the first call. It is missing if kernels that it calls are missing."""
    loaded = load("stack") if ops.kernels().library is not None else ops.kernels()
    if loaded.library is not None:
        run = loaded.library.run_layers
        run.argtypes, run.restype = (*[_P] * 4, ctypes.c_float, _P, _P, _I, _P, _I, _P), None
    return loaded


class LayerStack:
    """Layers all of whose kernels exist."""

    def __init__(
        self, layers: Sequence[tuple[Norms, Linears]], *, num_heads: int, num_kv_heads: int, head_dim: int,
        rotary_dim: int, eps: float,
    ) -> None:  # fmt: skip
        """Takes layers of which `can_stack` accepts all linears."""
        run, self._layers, self._eps = kernel().library, tuple(layers), eps
        assert run is not None
        self._run = run.run_layers
        width, inner = layers[0][1][-1].shape
        self._sizes = _Sizes(len(layers), width, num_heads, num_kv_heads, head_dim, rotary_dim, inner)
        heads, others = num_heads * head_dim, 2 * num_kv_heads * head_dim
        self._row_floats = width + heads + others + heads + 3 * inner
        for norms, linears in layers:
            shapes = tuple(linear.shape for linear in linears)
            assert shapes == ((heads + others, width), (width, heads), (2 * inner, width), (width, inner))
            sizes = width, head_dim, head_dim, width
            pairs = zip(norms, sizes, strict=True)
            assert all(ops.is_vector(weight, size) for weight, size in pairs if weight is not None)
        self._linears = [linear for _, linears in layers for linear in linears]
        self._matrices = (_LayerPointers * len(layers))(*map(_as_structure, layers))
        self._kernels = ops.addresses("rms_norm", "rotate", "silu_mul")

    def __call__(
        self, x_N_D: Tensor, rotation: tuple[Tensor, Tensor], attend: PagedAttention,
        keys_L_C_J_K_S: Tensor, values_L_C_J_S_K: Tensor,
    ) -> None:  # fmt: skip
        """Runs the tokens' residual stream through all layers, in place, and stores their keys and values.

        Args:
            rotation: as in `ops.rotate`.
            attend: attention of this step.
        """
        cos_N_1_R, sin_N_1_R = rotation
        num_rows, sizes, shape = len(x_N_D), self._sizes, keys_L_C_J_K_S.shape
        assert x_N_D.shape == (num_rows, sizes.width)
        assert x_N_D.is_contiguous()
        for tensor in (x_N_D, cos_N_1_R, sin_N_1_R):
            assert tensor.dtype == torch.float32
            assert len(tensor) == num_rows
        assert cos_N_1_R.shape[-1] == sin_N_1_R.shape[-1] == sizes.rotary_dim
        assert cos_N_1_R.stride() == sin_N_1_R.stride()
        assert cos_N_1_R.stride(2) == 1
        for linear in self._linears:
            linear.renew()
        workspace = torch.empty(num_rows * self._row_floats)
        assert (shape[0], *shape[2:4]) == (sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)
        step = attend.step(num_rows, keys_L_C_J_K_S, values_L_C_J_S_K)
        self._run(
            ctypes.addressof(sizes), ctypes.addressof(self._kernels), ctypes.addressof(self._matrices),
            ctypes.addressof(step), self._eps, cos_N_1_R.data_ptr(), sin_N_1_R.data_ptr(), cos_N_1_R.stride(0),
            x_N_D.data_ptr(), num_rows, workspace.data_ptr(),
        )  # fmt: skip


def can_stack(linears: Sequence[Linear]) -> bool:
    """Returns whether C++ kernels serve all of these."""
    return bool(linears) and all(linear.path != "torch" for linear in linears) and kernel().library is not None


def _as_structure(layer: tuple[Norms, Linears]) -> _LayerPointers:
    norms, linears = layer
    return _LayerPointers(
        *(None if weight is None else weight.data_ptr() for weight in norms),
        *(linear.matrix() for linear in linears),
    )
