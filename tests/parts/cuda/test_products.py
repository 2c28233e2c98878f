"""Products of a few rows against the separate operations: by the interpreter, or on the GPU where there is one.

In float32 only the order of sums differs. That Triton compiles the kernel for other types says `test_compile.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.parts.cuda import checks
from tests.nightly import nightly
from tests.parts.cuda.interpreter import needs_interpreter

products = pytest.importorskip("llamarl.parts.cuda.products")
pytestmark = needs_interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def squares_of(x_M_D: Tensor) -> Tensor:
    return torch.stack([part.square().sum(1) for part in x_M_D.split(64, 1)]).contiguous()


@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 64, 64), (5, 100, 130), (17, 96, 40)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_and_products(rows: int, width: int, outputs: int, has_bias: bool) -> None:
    """Rows, inputs and outputs that fill no tile."""
    x, norm, weight = drawn(rows, width), drawn(width, seed=1), drawn(outputs, width, seed=2)
    bias = drawn(outputs, seed=3) if has_bias else None
    normed = F.rms_norm(x, (width,), norm, EPS)
    found = products.normed(x, squares_of(x), norm, EPS, weight, bias)
    torch.testing.assert_close(found, F.linear(normed, weight, bias), rtol=1e-4, atol=1e-4)


def test_gated_activations() -> None:
    x, norm, weight = drawn(3, 96), drawn(96, seed=1), drawn(2 * 70, 96, seed=2) / 4
    gate, up = F.linear(F.rms_norm(x, (96,), norm, EPS), weight).chunk(2, 1)
    found = products.gated(x, squares_of(x), norm, EPS, weight)
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@nightly("Triton's interpreter is slow; by day single products are beside torch")
@pytest.mark.parametrize("width", [96, 4200])
def test_sums_in_place_and_their_squares(width: int) -> None:
    """Short inputs, and inputs that several programs share."""
    a, weight, x = drawn(5, width), drawn(130, width, seed=1) / width**0.5, drawn(5, 130, seed=2)
    expected, squares = x + F.linear(a, weight), torch.full((products.num_parts(130), 5), torch.nan, device=DEVICE)
    products.added(a, weight, x, squares)
    torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(squares, squares_of(expected), rtol=1e-4, atol=1e-3)
    assert not products._tickets(DEVICE).any(), "counters are ready for the next launch"


def test_int8_is_exact() -> None:
    """Sums beyond what float32 counts, shared by several programs, are those of integers."""
    generator = torch.Generator().manual_seed(0)
    rows, values = (torch.randint(-127, 128, (size, 4200), generator=generator, dtype=torch.int8) for size in (5, 72))
    rows[0], values[0] = 127, 127
    scales, bias = (torch.rand(5, 1, generator=generator), torch.rand(72, generator=generator)), drawn(72, seed=1)
    exact = rows.long() @ values.long().t() * scales[0].double() * scales[1].double() + bias.cpu().double()
    given = (one.to(DEVICE) for one in (rows, scales[0], values, scales[1]))
    found = products.scaled(*given, bias, torch.float32)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-6, atol=1e-3)


@nightly("Triton's interpreter is slow; by day single products are beside torch")
def test_results_do_not_depend_on_the_other_rows() -> None:
    a, weight = drawn(16, 4200), drawn(64, 4200, seed=1)
    whole, alone = (drawn(rows, 64, seed=2) for rows in (16, 16))
    products.added(a, weight, whole, torch.empty(1, 16, device=DEVICE))
    one = alone[:1].contiguous()
    products.added(a[:1].contiguous(), weight, one, torch.empty(1, 1, device=DEVICE))
    assert torch.equal(one, whole[:1])


@nightly("Triton's interpreter is slow; by day single products are beside torch")
def test_what_a_gpu_checks_at_start() -> None:
    assert checks.products_error(products, DEVICE) < 1e-4
