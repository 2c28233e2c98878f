"""Deltas turn one version into the next, bit for bit, or say that they don't fit.

Shape suffix: E elements.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.weight_sync.delta import BLOCK_ELEMENTS, decode, encode, message_bytes
from tests.nightly import examples

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def versions(dtype: torch.dtype, size: int, share: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits (NaN and infinities among them), and the same with some bytes changed."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    changes = torch.rand(len(base), generator=generator) < share
    new = torch.where(changes, base ^ 0x5A, base)
    return base.view(dtype), new.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    size=st.sampled_from([1, 7, 300, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 5]),
    share=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=examples(25))
def test_base_and_delta_make_the_new_version(dtype, size, share, seed) -> None:
    base, new = versions(dtype, size, share, seed)
    number, message = encoded(base, new)
    assert len(message) == message_bytes(number, size, dtype.itemsize) <= new.nbytes
    assert torch.equal(bits(decode(base, number, message)), bits(new))
    num_changed = int((bits(base) != bits(new)).view(size, -1).any(1).sum())
    sparse_bytes = num_changed * (2 + dtype.itemsize) + 4 * -(-size // BLOCK_ELEMENTS)
    assert number == (num_changed if sparse_bytes < new.nbytes else size)


def encoded(base: torch.Tensor, new: torch.Tensor) -> tuple[int, torch.Tensor]:
    number, pieces = encode(base, new)
    return number, torch.cat(pieces)


def test_shapes_are_kept_and_layouts_need_not_be() -> None:
    base, new = versions(torch.bfloat16, 600, 0.05)
    number, message = encoded(base.view(20, 30), new.view(20, 30))
    assert number < 600
    strided = base.view(20, 30).T.contiguous().T
    assert torch.equal(bits(decode(strided, number, message)), bits(new.view(20, 30)))


def test_dense_is_sent_when_a_delta_does_not_pay() -> None:
    base, new = versions(torch.int8, 10_000, 0.5)
    assert encoded(base, new)[0] == 10_000
    assert encoded(*versions(torch.int8, 10_000, 0.01))[0] < 1000


def test_a_delta_for_another_tensor_is_refused() -> None:
    base, new = versions(torch.int8, 70_000, 0.01)
    number, message = encoded(base, new)
    wrong_count = message.clone()
    wrong_count[:8].view(torch.int32)[:] += torch.tensor([-70_000, 70_000], dtype=torch.int32)
    for target, sent in (
        (torch.zeros(60_000, dtype=torch.int8), message),
        (torch.zeros(65_536 + 1, dtype=torch.int8), message),
        (torch.zeros(70_000, dtype=torch.bfloat16), message),
        (base, message[:-1]),
        (base, wrong_count),
    ):
        before = target.clone()
        with pytest.raises(ValueError, match="does not fit"):
            decode(target, number, sent)
        assert torch.equal(target, before)
