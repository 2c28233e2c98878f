"""Triton's interpreter with bfloat16 as GPUs have it: its own multiplies the raw bits of tiles, and cuts off in casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from llamarl.kernels import triton_decode


def _widened(tile: TensorHandle) -> TensorHandle:
    if tile.dtype.scalar != tl.bfloat16:
        return tile
    return TensorHandle((tile.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


class _Inexact:
    """`_attend_to_part` told that it runs on a GPU."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self._kernel[grid](*arguments, **options | {"EXACT": False})


@contextmanager
def computing_as_a_gpu() -> Iterator[None]:
    """Decode attention takes its branch for GPUs; products have float32 sums, casts round to even."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, _widened(a), _widened(b), *rest)

    def cast_impl(self: Any, source: TensorHandle, target: Any, *_: Any) -> TensorHandle:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).bfloat16().view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
        patch.setattr(triton_decode, "_attend_to_part", _Inexact(triton_decode._attend_to_part))
        yield
