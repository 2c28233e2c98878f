"""`Linear`: x W^T with row-major weights in float32, bfloat16, int8 or float8, by the fastest code on this machine.

On the CPU activations and results are float32, and a row of x has the same bits for any other rows, unlike in torch's
matmul. `paths.py` chooses among the kernels for each type and shape of weights. Some paths need a copy of the weights
in another order, which is renewed when the weights change in place. Without kernels, and on other devices, torch
computes. It gets widened weights, so results are not rounded.

Activations are rounded as follows. bfloat16 units (AVX-512, AMX) round them to bfloat16. int8 units (VNNI, AMX, GPUs)
round them to 8 bits per row. Kernels without these units keep float32 for bfloat16 weights, and for int8 as many of 16
bits as the sums hold (K = 2048: 14). Torch on the CPU keeps float32.

Shape suffixes: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from llamarl.kernels import build, gpu, paths
from llamarl.kernels.build import Kernel

_P, _I = ctypes.c_void_p, ctypes.c_int64

QuantizedRows = tuple[Tensor, Tensor]
"""8-bit values [M, K], and float32 scales [M, 1]."""


@functools.cache
def kernels() -> Kernel:
    """Returns kernels that quantize and multiply weights, or why torch replaces them. Checked at the first call."""
    loaded = build.load("linear")
    if loaded.library is None:
        return loaded
    for function in (loaded.library.quantize_int8, loaded.library.quantize_float8_e4m3fn):
        function.argtypes, function.restype = (_P, _I, _I, _I, _P, _P), _I
    for kind in paths.KINDS.values():
        if not paths.offered(kind):
            return Kernel(library=None, reason=paths.fault(kind))
    return loaded


_EXACT = ContextVar("_EXACT", default=False)


@contextmanager
def exactly() -> Iterator[None]:
    """Computes products of this thread on the CPU by torch with widened weights, so only weights are rounded."""
    token = _EXACT.set(True)
    try:
        yield
    finally:
        _EXACT.reset(token)


def is_exact() -> bool:
    """Returns whether this thread is within `exactly`."""
    return _EXACT.get()


_FEW_ROWS = ContextVar("_FEW_ROWS", default=False)


@contextmanager
def few_rows(serve: bool) -> Iterator[None]:
    """Lets `parts/cuda/products.py` compute what it can in this thread. `parts/cuda/graphs.py` measures where that is
    faster."""
    token = _FEW_ROWS.set(serve)
    try:
        yield
    finally:
        _FEW_ROWS.reset(token)


def products_of_few_rows(num_rows: int, device: torch.device) -> Any:
    """Returns `parts/cuda/products.py` within `few_rows`, or None if it does not serve."""
    products = gpu.kernel("products", device) if _FEW_ROWS.get() else None
    return products if products and num_rows <= products.MOST_ROWS else None


def rounds_activations() -> bool:
    """Returns whether products with bfloat16 weights on this CPU round activations to bfloat16."""
    return kernels().library is not None and any(path.name.endswith("-bf16") for path in paths.offered("bfloat16"))


class Workspace:
    """Memory for packed copies, reused by callers that take the same amounts in the same order."""

    def __init__(self) -> None:
        self._parts, self._taken, self.begun = list[Tensor](), 0, 0

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._parts))

    def begin(self) -> int:
        """Begins another use of the memory: earlier copies are no longer used. Returns the number of the use."""
        self._taken, self.begun = 0, self.begun + 1
        return self.begun

    def take(self, num_bytes: int) -> Tensor:
        """Returns bytes that begin at a cache line."""
        index, self._taken = self._taken, self._taken + 1
        if index == len(self._parts) or len(self._parts[index]) != num_bytes:
            self._parts[index:] = [torch.empty(num_bytes, dtype=torch.uint8)]
        return self._parts[index]


class Matrix(ctypes.Structure):
    """Pointers to weights and to the function that multiplies them, for `stack.cpp`."""

    _fields_ = (*((name, _P) for name in ("multiply", "weights", "scales", "bias")), ("n", _I), ("k", _I))


class Linear:
    """y = x W^T + b. Holds pointers, and a packed copy of the weights if its path needs one."""

    __slots__ = ("_arguments", "_bias_N", "_packed", "_path", "_scales_N", "_values_N_K", "_version", "shape", "takes")

    def __init__(
        self,
        values_N_K: Tensor,
        scales_N: Tensor | None = None,
        bias_N: Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """
        Args:
            values_N_K: contiguous. int8 and float8_e4m3fn need scales.
            scales_N: float32 factor of each row of the values.
            bias_N: in the type of the results.
            workspace: buffer for a packed copy.
        """
        quantized = values_N_K.dtype in (torch.int8, torch.float8_e4m3fn)
        assert (scales_N is not None) == quantized
        for tensor in (values_N_K, scales_N, bias_N):
            assert tensor is None or (tensor.is_contiguous() and len(tensor) == len(values_N_K))
        self._values_N_K, self._scales_N, self._bias_N = values_N_K, scales_N, bias_N
        self.shape, self._packed = tuple(values_N_K.shape), None
        self.takes = values_N_K.dtype if quantized and gpu.kernel("ops", values_N_K.device) else None
        """Type of quantized rows that it multiplies, as `ops` returns them. None means unquantized rows."""
        kind = paths.KINDS.get(values_N_K.dtype) if values_N_K.device.type == "cpu" else None
        self._path = paths.chosen(kind, *self.shape) if kind and kernels().library else None
        if self._path is None:
            return
        assert all(v is None or v.dtype == torch.float32 for v in (scales_N, bias_N))
        if self._path.pack:
            assert not values_N_K.is_inference(), "changes of such a tensor cannot be seen"
            self._packed = (workspace or Workspace()).take(self._path.packed_bytes(*self.shape))
            self._pack()
        vectors = ([scales_N] if quantized else []) + [bias_N]
        weights = values_N_K if self._packed is None else self._packed
        self._arguments = (weights.data_ptr(), *(None if v is None else v.data_ptr() for v in vectors))

    @property
    def path(self) -> str:
        """Name of the path that multiplies, or `torch`."""
        return self._path.name if self._path else "torch"

    @property
    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Weights without scales, and the bias."""
        assert self._scales_N is None
        return self._values_N_K, self._bias_N

    def describe(self) -> str:
        """Returns the shape of the weights, and the measured speed of their path if it was chosen."""
        kind = paths.KINDS.get(self._values_N_K.dtype, "")
        choice = paths.record().get(f"{kind} {self.shape[0]}x{self.shape[1]}", paths.Choice(path="", measured_us={}))
        return choice.describe(kind, *self.shape)

    def __call__(self, x_M_K: Tensor | QuantizedRows, add_to_M_N: Tensor | None = None) -> Tensor:
        """Returns the product, or adds it to `add_to_M_N` in place and returns that."""
        if isinstance(x_M_K, tuple):
            assert self._scales_N is not None
            return _product_of_8_bits(*x_M_K, self._values_N_K, self._scales_N, torch.bfloat16, self._bias_N)
        if self.takes and (fused := gpu.kernel("ops", x_M_K.device)):
            return self(fused.quantize(x_M_K, self.takes))
        if self._path is None or _EXACT.get():
            y_M_N = by_torch(x_M_K, self._values_N_K, self._scales_N, self._bias_N)
            return y_M_N if add_to_M_N is None else add_to_M_N.add_(y_M_N)
        self.renew()
        (m, width), (n, k) = x_M_K.shape, self.shape
        assert width == k, f"{width} columns, not {k}"
        y_M_N = torch.empty(m, n) if add_to_M_N is None else add_to_M_N
        assert y_M_N.shape == (m, n), f"result of shape {tuple(y_M_N.shape)}, not {m, n}"
        assert all(map(_is_plain, (x_M_K, y_M_N))), "the kernel takes contiguous float32 on the CPU"
        self._path.multiply(x_M_K.data_ptr(), *self._arguments, y_M_N.data_ptr(), m, n, k, add_to_M_N is not None)
        return y_M_N

    def matrix(self) -> Matrix:
        """Returns pointers for C++, valid while this object exists. There must be a path. Call `renew` before each
        use."""
        assert self._path is not None
        weights, *vectors = self._arguments
        scales, bias = vectors if len(vectors) > 1 else (None, *vectors)
        return Matrix(ctypes.cast(self._path.multiply, _P), weights, scales, bias, *self.shape)

    def renew(self) -> None:
        """Packs the weights again if they have changed in place."""
        if self._packed is not None and self._values_N_K._version != self._version:
            self._pack()

    def _pack(self) -> None:
        assert self._path is not None
        assert self._packed is not None
        self._version = self._values_N_K._version
        self._path.pack(self._values_N_K.data_ptr(), *self.shape, self._packed.data_ptr())


def multiply_rounded(x_M_K: Tensor, weight_N_K: Tensor, workspace: Workspace, out_M_N: Tensor) -> None:
    """Writes x W^T as `Linear` computes it, for weights that are used once. Needs `rounds_activations()`.

    Args:
        weight_N_K: bfloat16; the other tensors are float32. All are contiguous, on the CPU.
        workspace: holds the packed weights until its next use.
    """
    path = paths.chosen("bfloat16", *weight_N_K.shape)
    assert path is not None, "this processor rounds no activations"
    assert weight_N_K.is_contiguous()
    assert all(map(_is_plain, (x_M_K, out_M_N)))
    workspace.begin()
    packed = workspace.take(path.packed_bytes(*weight_N_K.shape))
    path.pack(weight_N_K.data_ptr(), *weight_N_K.shape, packed.data_ptr())
    path.multiply(x_M_K.data_ptr(), packed.data_ptr(), None, out_M_N.data_ptr(), len(x_M_K), *weight_N_K.shape, False)


def quantize(library: ctypes.CDLL, weight_N_K: Tensor, values_N_K: Tensor, scales_N: Tensor) -> int:
    """Quantizes float32 rows by the arithmetic of `models/quantize.py`. Returns the first row that is not finite, or
    -1."""
    kind = "int8" if values_N_K.dtype == torch.int8 else "float8_e4m3fn"
    n, k = weight_N_K.shape
    pointers = values_N_K.data_ptr(), scales_N.data_ptr()
    increment_version(values_N_K)
    return getattr(library, f"quantize_{kind}")(weight_N_K.data_ptr(), weight_N_K.stride(0), n, k, *pointers)


def _is_plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous() and x.device.type == "cpu"


def by_torch(x_M_K: Tensor, values_N_K: Tensor, scales_N: Tensor | None = None, bias_N: Tensor | None = None) -> Tensor:
    """Returns the product without kernels, in the type of `x`. On the CPU only weights are rounded."""
    if scales_N is not None:
        return _scaled_product(x_M_K, values_N_K, scales_N, bias_N)
    if x_M_K.dtype == values_N_K.dtype:
        return F.linear(x_M_K, values_N_K, bias_N)
    return F.linear(x_M_K, values_N_K.to(x_M_K.dtype), bias_N)


def _scaled_product(x_M_K: Tensor, values_N_K: Tensor, scales_N: Tensor, bias_N: Tensor | None) -> Tensor:
    if x_M_K.device.type == "cpu":
        y_M_N = F.linear(x_M_K, values_N_K.to(x_M_K.dtype)) * scales_N
        return y_M_N if bias_N is None else y_M_N + bias_N
    x_M_K, dtype = x_M_K.float(), x_M_K.dtype
    most = 127.0 if values_N_K.dtype == torch.int8 else 448.0
    # A non-finite row keeps a non-finite scale, so its products are NaN.
    scale_M_1 = x_M_K.abs().amax(1, keepdim=True).clamp_min(1e-30) / most
    rows_M_K = x_M_K / scale_M_1
    rows_M_K = rows_M_K.round() if values_N_K.dtype == torch.int8 else rows_M_K
    return _product_of_8_bits(rows_M_K.to(values_N_K.dtype), scale_M_1, values_N_K, scales_N, dtype, bias_N)


def _product_of_8_bits(
    rows_M_K: Tensor,
    scale_M_1: Tensor,
    values_N_K: Tensor,
    scales_N: Tensor,
    dtype: torch.dtype,
    bias_N: Tensor | None = None,
) -> Tensor:
    device, is_int8 = rows_M_K.device, values_N_K.dtype == torch.int8
    if products := products_of_few_rows(len(rows_M_K), device):
        return products.scaled(rows_M_K, scale_M_1, values_N_K, scales_N, bias_N, dtype)
    if not is_int8:
        scales = scale_M_1, scales_N[None]
        y_M_N = torch._scaled_mm(rows_M_K, values_N_K.t(), *scales, out_dtype=dtype, use_fast_accum=True)
        return y_M_N if bias_N is None else y_M_N + bias_N
    rows = len(rows_M_K)
    # cuBLAS multiplies int8 with at least 17 rows, in multiples of 8. Padding copies even where it adds nothing.
    if missing := max(24, -(-rows // 8) * 8) - rows:
        rows_M_K = F.pad(rows_M_K, (0, 0, 0, missing))
    sums_M_N = torch._int_mm(rows_M_K, values_N_K.t())[:rows]
    if ops := gpu.kernel("ops", device):
        return ops.rescale(sums_M_N, scale_M_1, scales_N, bias_N, dtype)
    y_M_N = (sums_M_N * scale_M_1 * scales_N).to(dtype)
    return y_M_N if bias_N is None else y_M_N + bias_N
