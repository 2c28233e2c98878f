"""Copies a part of a tensor, casting on the way, and fingerprints the stored bytes in the same pass over memory.

The fingerprint of a tensor is the sum over its bytes of value * coefficient(position) mod 2^64, with the coefficients
of `copy.cpp`. It is linear, so the parts that several processes write add up to the fingerprint of the whole. It is
keyed by position, so exchanged rows change it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from llamarl.kernels import build, gpu
from llamarl.kernels.build import Kernel, load

BLOCK_BYTES = 8192
WORD_BYTES = 4
MODULUS = 1 << 64
CHUNK_ELEMENTS = 1 << 20
"""Largest number of elements that torch computes on at once."""
_TIMED_BYTES = 1 << 26
UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


Share = int | Tensor
"""Share of a fingerprint: a number, or, on a GPU, an int64 that `read` waits for."""


def read(shares: Sequence[Share]) -> list[int]:
    """Returns shares as numbers. Waits once for GPUs."""
    pending = [share for share in shares if isinstance(share, Tensor)]
    numbers = iter(torch.stack(pending).tolist() if pending else ())
    return [(next(numbers) if isinstance(share, Tensor) else share) % MODULUS for share in shares]


def copy_part(target: Tensor, source: Tensor, whole_shape: tuple[int, ...], starts: tuple[int, ...]) -> Share:
    """Stores `source` in `target`, cast to its type. Returns its share of the fingerprint.

    The share is that of a part of a tensor of `whole_shape` that begins at `starts`. `target` is that part of the
    tensor itself or a packed buffer. The source must not change meanwhile.
    """
    assert target.shape == source.shape, f"{tuple(source.shape)} does not fit into {tuple(target.shape)}"
    source, cast = source.detach(), source.dtype is torch.float32 and target.dtype is torch.bfloat16
    library = kernel().library if target.device.type == "cpu" else None
    if source.device != target.device:  # cast on the source's device, so that only stored bytes travel
        source, cast = target.copy_(source.to(target.dtype)), False
    if source.dtype != target.dtype and not (cast and library is not None):
        source = source.to(target.dtype)
    if library is None or not target.numel():
        if source is not target:
            target.copy_(source)
        return _share(target, whole_shape, starts)
    if source.dim() and source.stride(-1) != 1 and source.shape[-1] > 1:
        source = source.contiguous()
    return _run(library, target, source, whole_shape, starts)


def fingerprint(tensor: Tensor, first: int = 0) -> Share:
    """Returns the fingerprint of a whole, contiguous tensor, or the share of a part that begins at element `first` of a
    larger one."""
    assert tensor.is_contiguous()
    library = kernel().library if tensor.device.type == "cpu" else None
    size, num_elements = tensor.element_size(), tensor.numel()
    if library is None:
        return _share(tensor.view(-1), (first + num_elements,), (first,))
    return library.copy_rows(None, tensor.data_ptr(), 1, num_elements * size, 0, 0, first * size, 0, 0)


@functools.cache
def kernel() -> Kernel:
    """Returns the compiled loops, or why torch replaces them."""
    loaded = load("copy")
    if (library := loaded.library) is None:
        return loaded
    library.copy_rows.restype = ctypes.c_uint64
    library.copy_rows.argtypes = (
        *(ctypes.c_void_p,) * 2,
        *(ctypes.c_int64,) * 4,
        ctypes.c_uint64,
        ctypes.c_int64,
        ctypes.c_int32,
    )
    num_ways = library.num_ways()
    for way in range(num_ways):
        library.use_way(way)
        if not _agrees(library):
            return Kernel(library=None, reason=f"copy.cpp, way {way}, disagrees with torch on this machine")
    parts = build.source_text("copy"), str(num_ways)
    measured = build.remembered("copy", parts, lambda: {"seconds": [_seconds(library, way) for way in range(num_ways)]})
    library.use_way(measured["seconds"].index(min(measured["seconds"])))
    return loaded


def _seconds(library: ctypes.CDLL, way: int) -> float:
    """Returns the least seconds of copying, and then fingerprinting, more bytes than caches hold."""
    library.use_way(way)
    source, target = (torch.ones(_TIMED_BYTES, dtype=torch.uint8) for _ in range(2))
    times = list[float]()
    for _ in range(4):
        start = time.thread_time()
        for to in (target.data_ptr(), None):
            library.copy_rows(to, source.data_ptr(), 1, _TIMED_BYTES, 0, 0, 0, 0, 0)
        times.append(time.thread_time() - start)
    return min(times)


def _agrees(library: ctypes.CDLL) -> bool:
    """Returns whether the kernel stores and sums like torch, across a block's end and within words."""
    source = torch.linspace(-3, 3, 3 * 2999).view(3, 2999)
    target = torch.zeros(3, 2999, dtype=torch.bfloat16)
    share = _run(library, target, source, (5, 3001), (1, 1))
    return torch.equal(target, source.bfloat16()) and share == share_by_torch(target, (5, 3001), (1, 1))


def _run(
    library: ctypes.CDLL, target: Tensor, source: Tensor, whole_shape: tuple[int, ...], starts: tuple[int, ...]
) -> int:
    whole_strides = _strides(whole_shape)
    dims = _merged(target.shape, target.stride(), source.stride(), whole_strides)
    dims = [(1, 0, 0, 0)] * (2 - len(dims)) + dims
    assert dims[-1][1:] == (1, 1, 1), "rows must be contiguous"
    size, source_size = target.element_size(), source.element_size()
    (rows, target_row, source_row, whole_row), (columns, *_) = dims[-2:]
    start = sum(a * b for a, b in zip(starts, whole_strides, strict=True))
    increment_version(target)
    total = 0
    for outer in range(math.prod(dim[0] for dim in dims[:-2])):
        to, at, where = 0, 0, start
        for num, target_stride, source_stride, whole_stride in reversed(dims[:-2]):
            outer, index = divmod(outer, num)  # noqa: PLW2901
            to, at, where = to + index * target_stride, at + index * source_stride, where + index * whole_stride
        total += library.copy_rows(
            target.data_ptr() + to * size,
            source.data_ptr() + at * source_size,
            rows,
            columns * size,
            target_row * size,
            source_row * source_size,
            where * size,
            whole_row * size,
            source.dtype != target.dtype,
        )
    return total % MODULUS


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _merged(shape: tuple[int, ...], *strides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns (size, strides...) of the fewest dims that visit the same elements in the same order in all operands."""
    ones = (1,) * (1 + len(strides))
    merged: list[tuple[int, ...]] = [ones]
    for size, *steps in reversed(list(zip(shape, *strides, strict=True))):
        inner, *inner_steps = merged[0]
        if size == 1:
            continue
        if steps == [inner * step for step in inner_steps] or inner == 1:
            merged[0] = (size * inner, *(inner_steps if inner > 1 else steps))
        else:
            merged.insert(0, (size, *steps))
    return merged if merged[-1][1:] == ones[1:] else [*merged, ones]


def _mix(value: Tensor) -> Tensor:
    """Returns splitmix64 of int64 as unsigned numbers, as in the kernel."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, by: int) -> Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - MODULUS if value >= MODULUS // 2 else value


def _share(part: Tensor, whole_shape: tuple[int, ...], starts: tuple[int, ...]) -> Share:
    """Returns the share of a part that C++ does not serve."""
    kernel = gpu.kernel("fingerprint", part.device) if part.numel() else None
    share = share_of(kernel, part, whole_shape, starts) if kernel is not None else None
    return share_by_torch(part, whole_shape, starts) if share is None else share


def share_of(kernel: ModuleType, part: Tensor, whole_shape: tuple[int, ...], starts: tuple[int, ...]) -> Tensor | None:
    """Returns the share of a part by the GPU's kernel, or None if its rows begin or end within words, or if it has more
    dims than rows."""
    whole_strides, size = _strides(whole_shape), part.element_size()
    dims = _merged(part.shape, _strides(part.shape), whole_strides)
    (rows, _, whole_row), (columns, *_) = ([(1, 0, 0)] * (2 - len(dims)) + dims)[-2:]
    start = sum(a * b for a, b in zip(starts, whole_strides, strict=True))
    if len(dims) > 2 or any(number * size % WORD_BYTES for number in (columns, whole_row, start)):
        return None
    words = part.contiguous().view(-1).view(torch.uint8).view(torch.int32)
    return kernel.share(words, rows, start * size // WORD_BYTES, whole_row * size // WORD_BYTES, _word_coefficients)


def _word_coefficients() -> Tensor:
    return _shifted(_mix(torch.arange(BLOCK_BYTES // WORD_BYTES)), 32) | 1


def share_by_torch(part: Tensor, whole_shape: tuple[int, ...], starts: tuple[int, ...]) -> int:
    """Returns the share of `part` by torch, on any device. Integers wrap at 2^64 as in the kernel."""
    size, total = part.element_size(), 0
    values = part.contiguous().view(-1).view(UNSIGNED[size])
    for first in range(0, part.numel(), CHUNK_ELEMENTS):
        value = values[first : first + CHUNK_ELEMENTS].long() & ((1 << 8 * size) - 1)
        position = _positions(torch.arange(first, first + len(value), device=part.device), part, whole_shape, starts)
        word = _shifted(_mix(position // WORD_BYTES % (BLOCK_BYTES // WORD_BYTES)), 32) | 1
        coefficient = (_mix((position // BLOCK_BYTES) ^ 0x5851F42D4C957F2D) | 1) * word
        total += int((value * (coefficient << (position % WORD_BYTES * 8))).sum())
    return total % MODULUS


def _positions(index: Tensor, part: Tensor, whole_shape: tuple[int, ...], starts: tuple[int, ...]) -> Tensor:
    """Returns positions in bytes, in the whole tensor, of the elements `index` of `part`, counted row by row."""
    position = torch.zeros_like(index)
    for length, start, inner, stride in zip(
        part.shape, starts, _strides(part.shape), _strides(whole_shape), strict=True
    ):
        position += (index // inner % length + start) * stride
    return position * part.element_size()
