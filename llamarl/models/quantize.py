"""Symmetric quantization of weight rows, the same for the trainer that sends and the generator that loads.

The bits are the same everywhere: every step is one correctly rounded float32 operation, in C++ on the CPU and in torch
elsewhere.

Shape suffixes: N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamarl.kernels import linear

QUANTIZED_DTYPES: dict[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""Magnitude of a row's largest value, by type. int8 does not use -128."""
_LEAST = 1e-30
"""A row with smaller values becomes zeros. Its scale and the inverse are normal numbers."""


class NonFiniteWeights(ValueError):
    """A row holds NaN or infinity, which no scale can represent."""

    def __init__(self, row: int, dtype: str, name: str = "the weight") -> None:
        super().__init__(row, dtype, name)
        self.row, self.dtype, self.name = row, dtype, name

    def __str__(self) -> str:
        return f"row {self.row} of {self.name} is not finite, so it cannot be quantized to {self.dtype}"


def quantize_rows(
    weight_N_K: Tensor,
    dtype: str,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (values_N_K, scales_N) with weight ~ values * scales, off by at most half a step of the row's largest
    value. For a stack of matrices [E, N, K] both have the dimension E too.

    Args:
        out: tensors to write into. Each matrix and its scales are contiguous, and scales are float32.

    Raises:
        NonFiniteWeights: names the first row, counted through all matrices. `out` is partly written.
    """
    if out is None:
        values_N_K = torch.empty_like(weight_N_K, dtype=getattr(torch, dtype), memory_format=torch.contiguous_format)
        out = values_N_K, weight_N_K.new_empty(weight_N_K.shape[:-1], dtype=torch.float32)
    if weight_N_K.ndim == 3 and all(tensor.is_contiguous() for tensor in (weight_N_K, *out)):
        quantize_rows(weight_N_K.flatten(0, 1), dtype, (out[0].flatten(0, 1), out[1].flatten()))
        return out
    if weight_N_K.ndim == 3:
        for number, (matrix_N_K, *halves) in enumerate(zip(weight_N_K, *out, strict=True)):
            try:
                quantize_rows(matrix_N_K, dtype, (halves[0], halves[1]))
            except NonFiniteWeights as error:
                raise NonFiniteWeights(number * len(matrix_N_K) + error.row, dtype) from None
        return out
    values_N_K, scales_N = out
    assert (values_N_K.dtype, scales_N.dtype) == (getattr(torch, dtype), torch.float32)
    assert (values_N_K.shape, scales_N.shape) == (weight_N_K.shape, weight_N_K.shape[:1])
    assert all(tensor.is_contiguous() for tensor in out)
    weight_N_K = weight_N_K.detach().float()
    library = linear.kernels().library
    tensors = (weight_N_K, values_N_K, scales_N)
    if library is None or weight_N_K.stride(1) != 1 or any(tensor.device.type != "cpu" for tensor in tensors):
        row = _quantize_in_torch(weight_N_K, QUANTIZED_DTYPES[dtype], values_N_K, scales_N)
    else:
        row = linear.quantize(library, weight_N_K, values_N_K, scales_N)
    if row >= 0:
        raise NonFiniteWeights(row, dtype)
    return values_N_K, scales_N


def dequantize_rows(values_N_K: Tensor, scales_N: Tensor) -> Tensor:
    """Returns the weight of these values and scales, float32."""
    return values_N_K.float() * scales_N[..., None]


def _quantize_in_torch(weight_N_K: Tensor, most: float, values_N_K: Tensor, scales_N: Tensor) -> int:
    """Returns the first row that is not finite, or -1."""
    largest_N = weight_N_K.abs().amax(1)
    bad = (~largest_N.isfinite()).nonzero()
    if len(bad):
        return int(bad[0])
    largest_N = largest_N.clamp_min_(_LEAST)
    # The dividend is a tensor: with a number torch would multiply by a rounded reciprocal.
    inverse_N = torch.full_like(largest_N, most) / largest_N
    scaled_N_K = weight_N_K * inverse_N[:, None]
    # Cast on this device: the values may go to another one.
    values_N_K.copy_((scaled_N_K.round_() if values_N_K.dtype == torch.int8 else scaled_N_K).to(values_N_K.dtype))
    scales_N.copy_(largest_N * (1 / most))
    return -1
