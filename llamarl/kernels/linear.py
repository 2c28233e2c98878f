"""`Linear`: x W^T with row-major weights in float32, bfloat16, int8 or float8, on whatever computes it fastest here.

On the CPU activations and results are float32: own kernels (`linear.cpp`) widen the weights as they read them. Of a
row of x they give the same bits whatever rows lie beside it, which torch's matmul does not. They are used after they
have reproduced a product in float64; otherwise, and on other devices, torch computes.

What int8 does to the activations, per row: with VNNI instructions and on GPUs they get 8 bits, with other CPU kernels
as many of 16 as the sums hold (K = 2048: 14), on torch's CPU path they stay float32.

Shape suffixes: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels import build
from llamarl.kernels.build import Kernel

_P, _I = ctypes.c_void_p, ctypes.c_int64
_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}
_TORCH_MARGIN = 1.2
"""torch's bfloat16 replaces the kernel when it is this much faster: a near tie must not fall differently each time."""


@functools.cache
def kernels() -> Kernel:
    """The compiled functions, checked against float64 at the first call, or why torch does their work."""
    loaded = build.load("linear")
    if loaded.library is None:
        return loaded
    library = loaded.library
    for kind in _KINDS.values():
        pointers = 5 if kind == "int8" else 4
        getattr(library, f"linear_{kind}").argtypes = (*[_P] * pointers, _I, _I, _I, ctypes.c_int)
        getattr(library, f"linear_{kind}").restype = None
        getattr(library, f"path_{kind}").restype = ctypes.c_char_p
    for function in (library.quantize_int8, library.quantize_float8_e4m3fn):
        function.argtypes, function.restype = (_P, _I, _I, _I, ctypes.c_int, _P, _P), _I
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.int8, 2e-2)):
        error = _error(library, dtype)
        if not error <= tolerance:
            reason = f"linear.cpp is off by {error:.1g} in {_KINDS[dtype]} ({_name(library, dtype)}) on this processor"
            return Kernel(library=None, reason=reason)
    return loaded


@functools.cache
def path(dtype: torch.dtype, device: torch.device) -> str:
    """What multiplies weights of `dtype`: `torch`, or the instructions that the kernel uses."""
    library = kernels().library if device.type == "cpu" else None
    if library is None or dtype not in _KINDS:
        return "torch"
    if dtype == torch.bfloat16 and _torch_has_fast_bfloat16() and _torch_wins(library):
        return "torch"
    return _name(library, dtype)


class Linear:
    """y = x W^T + b. Holds pointers, never copies of the weights."""

    __slots__ = ("_arguments", "_bias_N", "_function", "_scales_N", "_shape", "_values_N_K")

    def __init__(self, values_N_K: Tensor, scales_N: Tensor | None = None, bias_N: Tensor | None = None) -> None:
        """
        Args:
            values_N_K: contiguous; int8 and float8_e4m3fn need scales.
            scales_N: float32 factor of each row of the values.
            bias_N: of the dtype of the results.
        """
        quantized = values_N_K.dtype in (torch.int8, torch.float8_e4m3fn)
        assert (scales_N is not None) == quantized
        for tensor in (values_N_K, scales_N, bias_N):
            assert tensor is None or (tensor.is_contiguous() and len(tensor) == len(values_N_K))
        self._values_N_K, self._scales_N, self._bias_N = values_N_K, scales_N, bias_N
        self._shape = tuple(values_N_K.shape)
        self._function = None
        if path(values_N_K.dtype, values_N_K.device) != "torch":
            assert all(v is None or v.dtype == torch.float32 for v in (scales_N, bias_N))
            self._function = getattr(kernels().library, f"linear_{_KINDS[values_N_K.dtype]}")
            vectors = ([scales_N] if quantized else []) + [bias_N]
            self._arguments = (values_N_K.data_ptr(), *(None if v is None else v.data_ptr() for v in vectors))

    def __call__(self, x_M_K: Tensor, add_to_M_N: Tensor | None = None) -> Tensor:
        """The product; with `add_to_M_N`, that tensor with the product added in place."""
        if self._function is None:
            y_M_N = _torch_linear(x_M_K, self._values_N_K, self._scales_N, self._bias_N)
            return y_M_N if add_to_M_N is None else add_to_M_N.add_(y_M_N)
        (m, width), (n, k) = x_M_K.shape, self._shape
        assert width == k, f"{width} columns, not {k}"
        y_M_N = torch.empty(m, n) if add_to_M_N is None else add_to_M_N
        assert y_M_N.shape == (m, n), f"result of shape {tuple(y_M_N.shape)}, not {m, n}"
        assert all(map(_is_plain, (x_M_K, y_M_N))), "the kernel takes contiguous float32 on the CPU"
        self._function(x_M_K.data_ptr(), *self._arguments, y_M_N.data_ptr(), m, n, k, add_to_M_N is not None)
        return y_M_N


def quantize(library: ctypes.CDLL, weight_N_K: Tensor, power_of_two: bool, values_N_K: Tensor, scales_N: Tensor) -> int:
    """The arithmetic of `models/quantize.py` on float32 rows; the first that is not finite, or -1."""
    kind = "int8" if values_N_K.dtype == torch.int8 else "float8_e4m3fn"
    n, k = weight_N_K.shape
    pointers = values_N_K.data_ptr(), scales_N.data_ptr()
    return getattr(library, f"quantize_{kind}")(
        weight_N_K.data_ptr(), weight_N_K.stride(0), n, k, power_of_two, *pointers
    )


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu"


def _torch_linear(x_M_K: Tensor, values_N_K: Tensor, scales_N: Tensor | None, bias_N: Tensor | None) -> Tensor:
    if scales_N is not None:
        y_M_N = _scaled_product(x_M_K, values_N_K, scales_N)
        return y_M_N if bias_N is None else y_M_N + bias_N
    if x_M_K.dtype == values_N_K.dtype:
        return F.linear(x_M_K, values_N_K, bias_N)
    if _torch_has_fast_bfloat16():
        y_M_N = F.linear(x_M_K.to(values_N_K.dtype), values_N_K).to(x_M_K.dtype)
        return y_M_N if bias_N is None else y_M_N + bias_N
    return F.linear(x_M_K, values_N_K.to(x_M_K.dtype), bias_N)


def _scaled_product(x_M_K: Tensor, values_N_K: Tensor, scales_N: Tensor) -> Tensor:
    if x_M_K.device.type == "cpu":
        return F.linear(x_M_K, values_N_K.to(x_M_K.dtype)) * scales_N
    x_M_K, dtype = x_M_K.float(), x_M_K.dtype
    most = 127.0 if values_N_K.dtype == torch.int8 else 448.0
    # A row that is not finite keeps a scale that is not, so its products are NaN.
    scale_M_1 = x_M_K.abs().amax(1, keepdim=True).clamp_min(1e-30) / most
    if values_N_K.dtype == torch.float8_e4m3fn:
        scaled = (x_M_K / scale_M_1).to(torch.float8_e4m3fn)
        return torch._scaled_mm(scaled, values_N_K.t(), scale_M_1, scales_N[None], out_dtype=dtype)
    rows = x_M_K.shape[0]
    # cuBLAS multiplies int8 from 17 rows on, in multiples of 8.
    scaled = F.pad((x_M_K / scale_M_1).round().to(torch.int8), (0, 0, 0, max(24, -(-rows // 8) * 8) - rows))
    return (torch._int_mm(scaled, values_N_K.t())[:rows] * scale_M_1 * scales_N).to(dtype)


def _torch_has_fast_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _torch_wins(library: ctypes.CDLL) -> bool:
    x, w = torch.ones(32, 768), torch.ones(768, 768, dtype=torch.bfloat16)
    y = torch.empty(32, 768)

    def own() -> None:
        library.linear_bfloat16(x.data_ptr(), w.data_ptr(), None, y.data_ptr(), 32, 768, 768, 0)

    own_s, torch_s = _fastest_s(own), _fastest_s(lambda: F.linear(x.bfloat16(), w).float())
    return torch_s * _TORCH_MARGIN < own_s


def _fastest_s(call: Callable[[], object]) -> float:
    times = list[float]()
    for _ in range(6):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def _name(library: ctypes.CDLL, dtype: torch.dtype) -> str:
    return getattr(library, f"path_{_KINDS[dtype]}")().decode()


def _error(library: ctypes.CDLL, dtype: torch.dtype) -> float:
    """Relative to float64, on odd sizes that span two blocks of K."""
    m, n, k = 7, 21, 1700
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(size, generator=generator) for size in ((m, k), (n, k), (n,)))
    scales = torch.full((n,), 1 / 32)
    values = (w * 32).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else w.to(dtype)
    exact = x.double() @ (values.double() / (32 if dtype == torch.int8 else 1)).T + bias + 1
    y = torch.ones(m, n)
    vectors = [scales, bias] if dtype == torch.int8 else [bias]
    pointers = [tensor.data_ptr() for tensor in (x, values, *vectors, y)]
    getattr(library, f"linear_{_KINDS[dtype]}")(*pointers, m, n, k, 1)
    return ((y - exact).norm() / exact.norm()).item()
