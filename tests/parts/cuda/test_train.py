"""The Triton kernels of training against torch in float64: by the interpreter, or on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels import half
from llamarl.kernels.ops import rotate_by_torch
from llamarl.parts.cuda import checks
from tests.parts.cuda.interpreter import needs_interpreter

train = pytest.importorskip("llamarl.parts.cuda.train")
logprobs = pytest.importorskip("llamarl.parts.cuda.logprobs")
pytestmark = needs_interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = torch.device("cuda", 0)
EPS = 1e-5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def exact(*given: Tensor) -> list[Tensor]:
    return [one.double().detach().requires_grad_() for one in given]


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 1024), (5, 100), (11, 24), (9, 8200)])
def test_norms_of_some_rows_and_of_more_than_programs(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_ROWS", 4)
    x, weight, grad = drawn(rows, width), drawn(width, seed=1), drawn(rows, width, seed=2)
    x_exact, weight_exact = exact(x, weight)
    y = F.rms_norm(x_exact, (width,), weight_exact, EPS)
    assert_near(train.rms_norm(x, weight, EPS, torch.float32), y)
    expected = torch.autograd.grad(y, (x_exact, weight_exact), grad.double())
    for one, other in zip(train.rms_norm_backward(grad, x, weight, EPS), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (3, 5000)])
def test_gated_activations(shape: tuple[int, int]) -> None:
    gate, up, grad = (drawn(*shape, seed=seed) for seed in range(3))
    inputs = exact(gate, up)
    y = F.silu(inputs[0]) * inputs[1]
    assert_near(train.silu_mul(gate, up), y)
    for one, other in zip(
        train.silu_mul_backward(grad, gate, up), torch.autograd.grad(y, inputs, grad.double()), strict=True
    ):
        assert_near(one, other)


@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(1, 16, 16), (3, 24, 24), (6, 20, 8)])
def test_rotations_of_heads_that_are_a_part_of_a_row(heads: int, head_dim: int, rotary_dim: int) -> None:
    x = drawn(5, heads * head_dim + 7)[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    angles = drawn(5, 1, rotary_dim // 2, seed=1)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    table = torch.cat((cos, sin), 1)  # as `Rope` has them
    cos, sin, grad = table[:, :1], table[:, 1:], drawn(5, heads, head_dim, seed=2)
    (x_exact,) = exact(x)
    y = rotate_by_torch(x_exact, (cos.double(), sin.double()))
    assert_near(train.rotated(x, cos, sin), y)
    assert_near(train.rotated(grad, cos, sin, back=True), torch.autograd.grad(y, x_exact, grad.double())[0])


@pytest.mark.parametrize("widths", [(40,), (7, 33), (3000, 100)])
def test_log_probs_in_tiles(widths: tuple[int, ...]) -> None:
    logits, targets = drawn(4, sum(widths)) * 3, torch.tensor([0, 6, sum(widths) - 1, 20], device=DEVICE)
    largest, sums, found = (torch.full((4, 1), start, device=DEVICE) for start in (-torch.inf, 0.0, 0.0))
    tiles, starts = [one.contiguous() for one in logits.split(widths, 1)], [0, widths[0]]
    for start, tile in zip(starts, tiles, strict=False):
        logprobs.add_tile(tile, targets - start, largest, sums, found)
    normalizers, scales = largest + sums.log(), drawn(4, 1, seed=1)
    (logits_exact,) = exact(logits)
    y = logits_exact.log_softmax(1).gather(1, targets[:, None])
    assert_near(found - normalizers, y)
    (expected,) = torch.autograd.grad(y, logits_exact, scales.double())
    for start, tile in zip(starts, tiles, strict=False):
        grad = logprobs.gradient(tile, targets - start, normalizers.squeeze(1), scales, torch.float32)
        assert_near(grad, expected[:, start : start + tile.shape[1]])


def test_what_a_gpu_checks_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.train_error(train, DEVICE) < 1e-4
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with torch.inference_mode():  # a reference's first forward
        found, reason = checks.load(GPU, {"train": lambda kernels, _: checks.train_error(kernels, DEVICE)})
    assert found == {"train": train}, reason
    assert checks.logprobs_error(logprobs, DEVICE) < 1e-4


@pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU")
def test_products_add_their_gradients_up_unrounded() -> None:
    half.prepare(DEVICE)
    product, x, grad = half.Product(), drawn(300, 64), drawn(300, 48, seed=2).bfloat16()
    weight, bias = (torch.nn.Parameter(drawn(*shape, seed=1)) for shape in ((48, 64), (48,)))
    for turn in (1, 2):
        x_exact, weight_exact = exact(x.bfloat16(), weight.bfloat16())
        with torch.autocast("cuda", torch.bfloat16):
            y = product(x.requires_grad_(), weight, bias)
        y.backward(grad)
        exact_y = F.linear(x_exact, weight_exact, bias.double())
        assert ((y.double() - exact_y).norm() / exact_y.norm()).item() < 0.01
        (expected,) = torch.autograd.grad(exact_y, weight_exact, grad.double())
        assert weight.grad is not None
        assert ((weight.grad.double() - turn * expected).norm() / expected.norm()).item() < 1e-5
    optimizer = torch.optim.AdamW([weight], 0.1, fused=True)

    def add_one() -> None:
        with torch.no_grad():
            weight.add_(1.0)

    for change in (add_one, lambda: (optimizer.step(), product.forget())):  # a fused step keeps the version
        change()
        with torch.autocast("cuda", torch.bfloat16):  # keeps a copy of its own
            assert torch.equal(product(x, weight), F.linear(x, weight))
