"""Copying, casting and fingerprints: kernel and torch agree bit for bit, and what differs is found."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llamarl.kernels import copy
from llamarl.kernels.build import VARIABLE
from tests.nightly import examples

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    if dtype.is_floating_point:  # any bits but those of NaN, which a cast may change
        return torch.randn(shape, generator=generator).to(dtype)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def whole(tensor: Tensor) -> int:
    """By the definition: a sum over bytes."""
    return copy.share_by_torch(tensor, tuple(tensor.shape), (0,) * tensor.dim())


@pytest.fixture(params=["kernel", "torch"])
def path(request, monkeypatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(copy, "kernel", lambda: copy.Kernel(library=None, reason="test"))
    elif os.environ.get(VARIABLE) == "torch":
        pytest.skip(f"{VARIABLE}=torch: there are no kernels to compare with")
    else:
        assert copy.kernel().library is not None, copy.kernel().reason
    return request.param


@st.composite
def parts(draw) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """A shape, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 70), min_size=0, max_size=3)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, [(start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)]


@settings(max_examples=examples(150), deadline=None)
@given(parts(), st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_kernel_and_torch_agree_on_any_part(part, dtype, cast, packed) -> None:
    shape, box = part
    index, starts = tuple(slice(*ends) for ends in box), tuple(start for start, _ in box)
    source = random_tensor(shape, torch.float32 if cast and dtype is torch.bfloat16 else dtype)[index]
    target = torch.zeros(shape, dtype=dtype)
    into = torch.zeros(source.shape, dtype=dtype) if packed else target[index]
    share = copy.copy_part(into, source, shape, starts)
    assert torch.equal(bits(into), bits(source.to(dtype)))
    assert share == copy.share_by_torch(into, shape, starts)
    if not packed:
        rest = torch.zeros(shape, dtype=dtype)
        rest[index] = into
        assert torch.equal(bits(target), bits(rest)), "nothing else was touched"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5000,), (37, 211), (3, 40, 70), (2, 4096), (1, 3), ()])
def test_shares_of_a_cut_tensor_add_up(path, dtype, shape) -> None:
    """Whatever the cut, also within words of the fingerprint."""
    source, total = random_tensor(shape, dtype), 0
    target = torch.zeros(shape, dtype=dtype)
    cuts = [source] if not shape else source.tensor_split([1, shape[-1] // 3, shape[-1] - 1], dim=-1)
    start = 0
    for piece in cuts:
        index = (..., slice(start, start + piece.shape[-1])) if shape else ()
        starts = (*(0,) * (len(shape) - 1), start) if shape else ()
        total += copy.copy_part(target[index], piece, shape, starts)
        start += piece.shape[-1] if shape else 0
    assert torch.equal(bits(target), bits(source))
    assert total % copy.MODULUS == copy.fingerprint(target) == whole(target)


def test_every_flipped_bit_is_found(path) -> None:
    tensor = random_tensor((131,), torch.float32)
    expected, raw = copy.fingerprint(tensor), tensor.view(torch.uint8)
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        assert copy.fingerprint(tensor) != expected, f"bit {bit}"
        raw[bit // 8] ^= 1 << bit % 8
    assert copy.fingerprint(tensor) == expected


@pytest.mark.parametrize("columns", [1, 7, 2048, 4096, 6000])
def test_exchanged_rows_are_found(columns: int) -> None:
    """Also rows that lie a multiple of the block size apart."""
    tensor = random_tensor((4, columns), torch.float32)
    found = {copy.fingerprint(tensor[list(order)].contiguous()) for order in ((0, 1, 2, 3), (1, 0, 2, 3), (3, 1, 2, 0))}
    assert len(found) == 3


def test_casts_round_as_torch_does_and_keep_nan(path) -> None:
    words = torch.arange(-(2**31), 2**31, 98_317, dtype=torch.int64).to(torch.int32)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, 0x00008000, -0x00800000], dtype=torch.int32)
    source = torch.cat((words, ties)).view(torch.float32)
    target = torch.empty(len(source), dtype=torch.bfloat16)
    copy.copy_part(target, source, tuple(source.shape), (0,))
    assert torch.equal(target.isnan(), source.isnan())
    assert torch.equal(bits(target[~source.isnan()]), bits(source.bfloat16()[~source.isnan()]))


def test_transposed_and_trained_tensors_can_be_copied(path) -> None:
    weight = torch.nn.Parameter(torch.randn(30, 40).T)
    target = torch.empty(40, 30)
    assert copy.copy_part(target, weight, (40, 30), (0, 0)) == copy.fingerprint(target)
    assert torch.equal(target, weight)


@pytest.mark.parametrize("offset", [0, 4, 20])
def test_all_ways_give_the_same(offset: int) -> None:
    """Across blocks, from and to places that are no multiple of a vector."""
    library = copy.kernel().library
    if library is None:
        pytest.skip(copy.kernel().reason)
    source, target = random_tensor((30_000,), torch.int8, seed=1), torch.zeros(30_000, dtype=torch.int8)
    try:
        for way in range(library.num_ways()):
            library.use_way(way)
            target.zero_()
            share = copy.copy_part(target[offset:29_001], source[offset + 8 : 29_009], (30_000,), (offset,))
            assert torch.equal(target[offset:29_001], source[offset + 8 : 29_009])
            assert not target[:offset].any() and not target[29_001:].any()
            assert share == copy.share_by_torch(target[offset:29_001], (30_000,), (offset,))
    finally:
        copy.kernel.cache_clear()


def test_another_shape_is_no_broadcast() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        copy.copy_part(torch.empty(3, 4), torch.ones(4), (3, 4), (0, 0))


def test_shares_are_read_at_once() -> None:
    shares = [5, torch.tensor(-1), copy.MODULUS + 2, torch.tensor(7)]
    assert copy.read(shares) == [5, copy.MODULUS - 1, 2, 7]
