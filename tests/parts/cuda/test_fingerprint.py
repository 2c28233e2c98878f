"""The GPU's fingerprint, in Triton's interpreter, against torch's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.nightly import nightly
from tests.parts.cuda.interpreter import needs_interpreter

triton = pytest.importorskip("triton")
PARTS = [  # shape of the part, of the whole, where it begins, type
    ((5000,), (5000,), (0,), torch.int32),
    ((4100,), (9000,), (2040,), torch.bfloat16),
    ((3, 2048), (3, 2048), (0, 0), torch.float32),
    ((7, 130), (40, 514), (3, 96), torch.bfloat16),
    ((6, 64), (6, 64), (0, 0), torch.int8),
    ((2, 40_000), (5, 40_000), (1, 0), torch.float32),
    ((1, 1), (5, 7), (4, 6), torch.float32),
]
CODE = """
import torch
from tests.parts.cuda.test_fingerprint import PARTS, part_of
from llamarl.kernels import copy
from llamarl.parts.cuda import fingerprint
for number, (shape, whole, starts, dtype) in enumerate(PARTS):
    part = part_of(number)
    (found,) = copy.read([copy.share_of(fingerprint, part, whole, starts)])
    assert found == copy.share_by_torch(part, whole, starts), (number, found)
    part.view(-1).view(torch.uint8)[-1] ^= 1
    (changed,) = copy.read([copy.share_of(fingerprint, part, whole, starts)])
    assert changed != found
odd = torch.zeros(4, 3, dtype=torch.bfloat16)
assert copy.share_of(fingerprint, odd, (4, 5), (0, 1)) is None, "its rows begin within words"
"""


def part_of(number: int) -> torch.Tensor:
    shape, _, _, dtype = PARTS[number]
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@nightly("Triton's interpreter is slow; by day the fingerprint of the CPU is that of torch")
@needs_interpreter
def test_it_is_that_of_torch() -> None:
    """In a process of its own, as Triton is told to interpret before it is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("rows", "columns"), [(1, 128_256 * 16_384), (128_256, 16_384)], ids=str)
def test_the_largest_embedding_has_programs(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """That of 405B in float32, whole and by rows: CUDA takes 2^31 - 1 programs in the first dimension, 65,535 else."""
    from llamarl.parts.cuda import fingerprint

    grids = list[tuple[int, ...]]()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_, **__: grids.append(grid)

    monkeypatch.setattr(fingerprint, "_add_up", Kernel())
    words = torch.zeros(1, dtype=torch.int32).expand(rows * columns)
    fingerprint.share(words, rows, 0, columns, lambda: torch.zeros(2048, dtype=torch.int64))
    ((programs, *others),) = grids
    assert programs >= rows * columns / 2048 / fingerprint._BLOCKS
    assert programs < 2**31 and max(others, default=0) < 65_536
