"""Deltas turn one version into the next, bit for bit, or say that they don't fit.

Shape suffix: E elements.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.weight_sync.delta import BLOCK_ELEMENTS, apply, encode, from_message, message_bytes, to_message

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
@settings(deadline=None, max_examples=25)
def test_base_and_delta_make_the_new_version(dtype, size, share, seed) -> None:
    base, new = versions(dtype, size, share, seed)
    number, pieces = to_message(base, new)
    message = torch.cat(pieces)
    assert len(message) == message_bytes(number, size, dtype.itemsize) <= new.nbytes
    assert torch.equal(bits(from_message(base, number, message)), bits(new))
    if (delta := encode(base, new)) is None:
        assert number == size
        return
    target = base.clone()
    apply(delta, target)
    assert torch.equal(bits(target), bits(new))
    assert delta.num_bytes == delta.num_changes * (2 + dtype.itemsize) + 4 * -(-size // BLOCK_ELEMENTS)


def test_shapes_are_kept() -> None:
    base, new = versions(torch.bfloat16, 600, 0.05)
    target = base.clone().view(20, 30)
    apply(encode(base.view(20, 30), new.view(20, 30)), target)
    assert torch.equal(bits(target), bits(new.view(20, 30)))


def test_dense_is_sent_when_a_delta_does_not_pay() -> None:
    base, new = versions(torch.int8, 10_000, 0.5)
    assert encode(base, new) is None
    assert encode(*versions(torch.int8, 10_000, 0.01)) is not None


def test_a_delta_for_another_tensor_is_refused() -> None:
    delta = encode(*versions(torch.int8, 70_000, 0.01))
    for target in (torch.zeros(60_000, dtype=torch.int8), torch.zeros(70_000, dtype=torch.bfloat16)):
        before = target.clone()
        with pytest.raises(ValueError, match="does not fit"):
            apply(delta, target)
        assert torch.equal(target, before)
    with pytest.raises(ValueError, match="does not fit"):
        apply(replace(delta, values_C=delta.values_C[:-1]), torch.zeros(70_000, dtype=torch.int8))
