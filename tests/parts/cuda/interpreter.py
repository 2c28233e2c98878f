"""Triton's interpreter: whether it runs here, and with bfloat16 as GPUs have it. Its own multiplies the raw bits of
tiles, and cuts off in casts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from llamarl.parts.cuda import decode


def _broken() -> str:
    """Triton 3.6 asks numpy for what 2.5 no longer does."""
    if torch.cuda.is_available():
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = torch.zeros(1)
            _count_up[(1,)](one, torch.ones(1, dtype=torch.int32))  # pyrefly: ignore
    except triton.runtime.errors.InterpreterError as error:
        return f"Triton {triton.__version__}'s interpreter does not run on numpy {np.__version__}: {error}"
    return ""


@triton.jit
def _count_up(target, length):
    for place in range(0, tl.load(length), 1):
        tl.store(target + place, 1.0)


_REASON = _broken()
needs_interpreter = pytest.mark.skipif(bool(_REASON), reason=_REASON)


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
        patch.setattr(decode, "_attend_to_part", _Inexact(decode._attend_to_part))
        yield
