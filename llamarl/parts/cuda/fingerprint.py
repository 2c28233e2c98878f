"""The fingerprint of `copy.cpp` on GPUs: one pass over the memory, in words of 4 bytes.

The coefficient of a word is the product of its block's coefficient and a coefficient from a table, the same for every
block. The block's coefficient is computed once per block. Integer sums wrap, so the order of the additions does not
matter. Without a GPU, Triton's interpreter runs the kernel (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS: tl.constexpr = tl.constexpr(2048)
"""Words per block."""
_BLOCKS = 8
"""Blocks per program."""


@triton.jit
def _mix(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit(do_not_specialize=["programs"])
def _add_up(words, table, sums, start, columns, whole_columns, programs, BLOCKS: tl.constexpr):
    row = (tl.program_id(0) // programs).to(tl.int64)
    first = start + row * whole_columns
    word = tl.arange(0, _WORDS)
    of_word = tl.load(table + word).to(tl.uint64)
    total = tl.zeros((_WORDS,), tl.uint64)
    block = first // _WORDS + (tl.program_id(0) % programs).to(tl.int64) * BLOCKS
    for _ in range(BLOCKS):
        place = block * _WORDS + word - first
        value = tl.load(words + row * columns + place, mask=(place >= 0) & (place < columns), other=0)
        of_block = _mix(block.to(tl.uint64) ^ 0x5851F42D4C957F2D) | 1
        total += value.to(tl.uint32, bitcast=True).to(tl.uint64) * of_word * of_block
        block += 1
    tl.atomic_add(sums, tl.sum(total.to(tl.int64, bitcast=True), 0))


def share(words: Tensor, rows: int, start: int, whole_columns: int, word_coefficients: Callable[[], Tensor]) -> Tensor:
    """Returns the contribution of a part of a tensor to a fingerprint: int64, as unsigned numbers, on the device.

    Args:
        words: int32, contiguous: rows of the part.
        start: offset of the part in the whole tensor, in words.
        whole_columns: words between the starts of two rows of the part.
        word_coefficients: int64 [2048].
    """
    columns = words.numel() // rows
    sums = torch.zeros((), dtype=torch.int64, device=words.device)
    blocks = -(-columns // _WORDS.value) + 1
    programs = -(-blocks // _BLOCKS)  # per row; all in one dimension, because other dimensions are limited to 65,535
    table = _table(words.device, word_coefficients)
    with torch.cuda.device_of(words):  # threads that fetch weights start with the first GPU
        arguments = words, table, sums, start, columns, whole_columns, programs
        _add_up[(rows * programs,)](*arguments, BLOCKS=_BLOCKS)  # pyrefly: ignore
    return sums


@functools.cache
def _table(device: torch.device, word_coefficients: Callable[[], Tensor]) -> Tensor:
    return word_coefficients().to(device)
