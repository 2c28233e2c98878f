"""The fingerprint of `copy.cpp` on GPUs: one read of the memory, in words of 4 bytes.

A coefficient is that of the block times that of the word in it. Those of words are the same in every block and come
from a table; that of the block is computed once for all of its words. Sums are of integers and wrap, so that the order
in which programs add theirs does not matter. Without a GPU Triton's interpreter runs it (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS: tl.constexpr = tl.constexpr(2048)
"""Words of a block."""
_BLOCKS = 8
"""Blocks of a program."""


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
    """Share of a fingerprint by a part of a tensor: int64, as unsigned numbers, on the device.

    Args:
        words: int32, contiguous: the part's rows.
        start: word of the whole tensor at which the part begins.
        whole_columns: words from one row of the part to the next.
        word_coefficients: int64 [2048].
    """
    columns = words.numel() // rows
    sums = torch.zeros((), dtype=torch.int64, device=words.device)
    blocks = -(-columns // _WORDS.value) + 1
    programs = -(-blocks // _BLOCKS)  # of a row; all in one dimension, as others end at 65,535
    table = _table(words.device, word_coefficients)
    with torch.cuda.device_of(words):  # threads that fetch weights begin on the first GPU
        arguments = words, table, sums, start, columns, whole_columns, programs
        _add_up[(rows * programs,)](*arguments, BLOCKS=_BLOCKS)  # pyrefly: ignore
    return sums


@functools.cache
def _table(device: torch.device, word_coefficients: Callable[[], Tensor]) -> Tensor:
    return word_coefficients().to(device)
