"""The same bits from C++ and torch, errors within half a step, and nothing that is not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llamarl.kernels import build, linear
from llamarl.models.quantize import NonFiniteWeights, dequantize_rows, quantize_rows
from tests.nightly import examples

DTYPES = ["int8", "float8_e4m3fn"]


@pytest.fixture(params=["kernel", "torch"])
def path(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(linear, "kernels", lambda: build.Kernel(library=None, reason="off"))
    elif linear.kernels().library is None:
        pytest.skip(linear.kernels().reason)
    return request.param


def rows_of_all_magnitudes(seed: int, columns: int) -> Tensor:
    """Normal values from the smallest to the largest floats, long tails, zeros, denormals and halves of a step."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(200, columns, generator=generator)
    exponents = torch.randint(-38, 37, (200, 1), generator=generator)
    halves = (torch.arange(columns) % 255 - 127.5) / 127.5
    special = torch.stack([torch.zeros(columns), torch.full((columns,), 1e-40), torch.full((columns,), 3.4e38), halves])
    return torch.cat([noise * 10.0**exponents, noise**5, noise * 2.0**-130, special])


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**31), columns=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_kernel_and_torch_give_the_same_bits(seed, columns, dtype):
    if linear.kernels().library is None:
        pytest.skip(linear.kernels().reason)
    weight = rows_of_all_magnitudes(seed, columns)
    values, scales = quantize_rows(weight, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "kernels", lambda: build.Kernel(library=None, reason="off"))
        expected, expected_scales = quantize_rows(weight, dtype)
    assert torch.equal(scales.view(torch.int32), expected_scales.view(torch.int32))
    # float8 has two zeros, which are the same weight.
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


def test_int8_is_off_by_half_a_step_at_most(path):
    weight = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_rows(weight, "int8")
    assert ((dequantize_rows(values, scales) - weight).abs() <= scales[:, None] * 0.50001).all()
    assert (values.abs().amax(1) == 127).all()


def test_float8_is_off_by_a_sixteenth_at_most(path):
    weight = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_rows(weight, "float8_e4m3fn")
    error = (dequantize_rows(values, scales) - weight).abs()
    assert (error <= weight.abs() / 16 * 1.0001 + scales[:, None] * 2**-10).all()
    assert (values.float().abs().amax(1) == 448).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_stay_zero(path, dtype):
    values, scales = quantize_rows(torch.zeros(3, 8), dtype)
    assert not values.float().any()
    assert (scales > 0).all()
    assert not dequantize_rows(values, scales).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(path, dtype, bad):
    weight = torch.ones(5, 9)
    weight[3, 8] = bad
    with pytest.raises(NonFiniteWeights, match="row 3"):
        quantize_rows(weight, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_weight_and_given_memory(path, dtype):
    """A rank's columns, though they are strided, are quantized as if they lay alone; bfloat16 as its float32."""
    weight = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    for part in (weight[:, 10:20], weight[5:9], weight.float()[:, 10:20], weight.float().t()):
        expected = quantize_rows(part.float().contiguous(), dtype)
        memory = torch.empty(part.shape, dtype=expected[0].dtype), torch.empty(len(part))
        assert quantize_rows(part, dtype, out=memory) == memory
        assert torch.equal(memory[0].float(), expected[0].float())
        assert torch.equal(memory[1], expected[1])
