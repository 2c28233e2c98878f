"""The small Triton kernels against torch: by the interpreter, or on the GPU where there is one.

The interpreter rounds neither to bfloat16 nor to float8 as a GPU does, so bits are compared in float32 and int8.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels import gpu, ops
from llamarl.kernels.linear import Linear
from llamarl.models.quantize import quantize_rows
from llamarl.parts.cuda import checks
from tests.parts.cuda.interpreter import needs_interpreter

fused = pytest.importorskip("llamarl.parts.cuda.ops")
pytestmark = needs_interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def quantized(x_N_D: Tensor) -> tuple[Tensor, Tensor]:
    scale_N_1 = x_N_D.abs().amax(1, keepdim=True) / 127
    return (x_N_D / scale_N_1).round(), scale_N_1


def assert_quantized(found: tuple[Tensor, Tensor], x_N_D: Tensor) -> None:
    """The same int8 but where a value lies between two, which another order of operations decides."""
    values, scales = quantized(x_N_D)
    assert found[0].dtype == torch.int8
    torch.testing.assert_close(found[1], scales)
    assert (found[0] - values).abs().max() <= 1
    assert (found[0] != values).float().mean() < 0.01


@pytest.mark.parametrize("size", [1, 100, 1024])
@pytest.mark.parametrize("adds", [False, True])
def test_norms(size: int, adds: bool) -> None:
    x, weight, delta = drawn(3, size), drawn(size, seed=1), drawn(3, size, seed=2) if adds else None
    total = x + delta if adds else x.clone()
    expected = F.rms_norm(total, (size,), weight, EPS)
    torch.testing.assert_close(fused.rms_norm(x.clone(), weight, EPS, delta, None), expected)
    assert_quantized(fused.rms_norm(x, weight, EPS, delta, torch.int8), expected)
    assert torch.equal(x, total), "added in place"


def test_rows_in_float32_are_normed_to_the_type_of_the_weight() -> None:
    x, delta, weight = drawn(3, 100), drawn(3, 100, seed=2).bfloat16(), drawn(100, seed=1).bfloat16()
    total = x + delta.float()
    found = fused.rms_norm(x, weight, EPS, delta, None)
    assert found.dtype == torch.bfloat16 and torch.equal(x, total), "what is added up is not rounded"
    torch.testing.assert_close(found.float(), F.rms_norm(total, (100,), weight.float(), EPS), rtol=0.01, atol=0.01)


def test_activations_of_the_halves_of_a_matrix() -> None:
    gate, up = drawn(5, 140).split(70, 1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(fused.silu_mul(gate, up, None), expected)
    assert_quantized(fused.silu_mul(gate, up, torch.int8), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_rows(dtype: torch.dtype) -> None:
    x = drawn(6, 300) * torch.logspace(-6, 3, 6, device=DEVICE)[:, None]
    x[4] = 0
    values, scales = fused.quantize(x, dtype)
    most = fused.MOST[dtype]
    torch.testing.assert_close(scales, (x.abs().amax(1, keepdim=True) / most).clamp(min=1e-30 / most))
    # float8's steps are an eighth of the value, and the interpreter halves what it should carry.
    near = (values.float() * scales - x).abs() <= (
        scales / 2 * 1.001 if dtype == torch.int8 else x.abs() / 8 + scales / 64
    )
    assert near.float().mean() > (0.999 if dtype == torch.int8 else 0.9)
    for bad in (torch.nan, torch.inf):
        x[1, 7] = bad
        assert not fused.quantize(x, dtype)[1].isfinite()[1].any()
        assert fused.quantize(x, dtype)[1].isfinite()[[0, 2, 3, 4, 5]].all()


@pytest.mark.parametrize("head_dim", [8, 24])
@pytest.mark.parametrize("norms", [False, True])
def test_rotation_and_the_cache(head_dim: int, norms: bool) -> None:
    """Of heads that lie in one matrix; nothing else in the cache changes."""
    q, k, v = (
        x.unflatten(1, (-1, head_dim)) for x in drawn(5, 8 * head_dim).split([4 * head_dim] + [2 * head_dim] * 2, 1)
    )
    rotation = drawn(5, 2, head_dim, seed=1).split(1, 1)
    weights = (drawn(head_dim, seed=2), drawn(head_dim, seed=3)) if norms else None
    keys, values = drawn(2, 7, 2, 16, head_dim, seed=4)
    places = torch.tensor([3, 3, 0, 6, 1], device=DEVICE), torch.tensor([15, 2, 0, 7, 2], device=DEVICE)
    expected_q, expected_k = ops.rotate(q.clone(), k.clone(), rotation, weights, EPS)
    after = keys.clone(), values.clone()
    after[0][places[0], :, places[1]], after[1][places[0], :, places[1]] = expected_k, v
    found = fused.rotate_and_write(
        q, k, v, rotation, weights, EPS, (keys.transpose(2, 3), values), [place.int() for place in places]
    )
    torch.testing.assert_close(found, expected_q)
    torch.testing.assert_close(keys, after[0])
    assert torch.equal(values, after[1])


def test_what_is_too_large_for_the_cache_is_bounded() -> None:
    """Else float8's steps are an eighth of the value; the interpreter halves some, and makes a number of NaN."""
    q, k, v = (drawn(5, heads, 8, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    k, v = k * 1000, v * torch.logspace(-2, 5, 5, device=DEVICE)[:, None, None]
    rotation = torch.ones(5, 8, device=DEVICE), torch.zeros(5, 8, device=DEVICE)
    keys, values = torch.zeros(2, 7, 2, 16, 8, device=DEVICE).to(torch.float8_e4m3fn)
    places = torch.tensor([3, 3, 0, 6, 1], device=DEVICE), torch.tensor([15, 2, 0, 7, 2], device=DEVICE)
    fused.rotate_and_write(
        q, k, v, rotation, None, EPS, (keys.transpose(2, 3), values), [place.int() for place in places]
    )
    for stored, given in ((keys, k), (values, v)):
        found, bounded = stored.float()[places[0], :, places[1]], given.clamp(-448, 448)
        assert (found[given.abs() > 464].abs() == 448).all() and (given.abs() > 464).any()
        assert ((found - bounded).abs() <= bounded.abs() / 8 + 2.0**-9).float().mean() > 0.9


def test_a_product_takes_rows_that_are_quantized_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "kernel", lambda name, device: {"ops": fused}.get(name))
    x, weight = drawn(3, 64), drawn(40, 64, seed=1)
    linear = Linear(*quantize_rows(weight, "int8"))
    assert linear.takes == torch.int8
    exact = x.double() @ weight.double().T
    for rows in (x, fused.quantize(x, torch.int8)):
        y = linear(rows)
        assert ((y - exact).norm() / exact.norm()).item() < 2e-2
    assert torch.equal(linear(x), linear(fused.quantize(x, torch.int8)))


def test_what_a_gpu_checks_at_start() -> None:
    assert checks.ops_error(fused, DEVICE) < 1e-5
