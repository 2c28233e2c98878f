"""Small operations of training with their gradients, against float64, and a whole step against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.config.schema import TrainerConfig
from llamarl.kernels import fused, ops
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Attention, FeedForward, RMSNorm
from llamarl.training.policy import set_compute
from tests.kernels.test_ops import needs_kernel, randn
from tests.training.conftest import SHAPE

pytestmark = needs_kernel
CPU = torch.device("cpu")


def agree(own: Callable[..., Tensor], exact: Callable[..., Tensor], *given: Tensor, differ_in: int) -> None:
    """Outputs, and the gradients of the first `differ_in` inputs, in float32 as in float64."""
    found = list[list[Tensor]]()
    for function, dtype in ((own, torch.float32), (exact, torch.float64)):
        inputs = [one.detach().to(dtype) for one in given]
        for one in inputs[:differ_in]:
            one.requires_grad_()
        output = function(*inputs)
        grads = torch.autograd.grad(output, inputs[:differ_in], randn(*output.shape).to(dtype))
        found.append([output.detach(), *grads])
    for ours, theirs in zip(*found, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(7, 22), (200, 128), (5, 3, 33), (0, 8)])
def test_norm_equals_float64(shape: tuple[int, ...]) -> None:
    width = shape[-1:]
    agree(
        lambda x, w: fused.rms_norm(x, width, w, 1e-6),
        lambda x, w: F.rms_norm(x, width, w, 1e-6),
        *(randn(*shape) * 3, randn(*width) + 1),
        differ_in=2,
    )


def test_gradient_of_a_norm_s_weight_does_not_lose_rows() -> None:
    """Sums of many rows of one sign, in which float32 alone would drop what is small."""
    x, weight = torch.ones(100_000, 16), torch.ones(16, requires_grad=True)
    fused.rms_norm(x, (16,), weight, 0.0).backward(torch.full_like(x, 0.1))
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((16,), 1e4), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [(6, 8), (3, 770), (5, 2, 9), (0, 4)])
def test_gate_equals_float64(size: tuple[int, ...]) -> None:
    """Also where sigmoids are full or empty."""
    gate = randn(*size) * torch.logspace(-1, 2, max(size[-1], 1))
    agree(fused.silu_mul, lambda g, u: F.silu(g) * u, gate, randn(*size), differ_in=2)


@pytest.mark.parametrize(("head_dim", "rotary"), [(8, 8), (32, 24), (22, 10)])
def test_rotation_equals_float64(head_dim: int, rotary: int) -> None:
    """Heads that are a part of wider rows, and all channels or the first of them."""
    table = randn(6, 2, rotary)
    wide = randn(6, 5, head_dim)
    agree(
        lambda x, t: fused.rotate(x[:, 1:4], (t[:, :1], t[:, 1:])),
        lambda x, t: ops.rotate_by_torch(x[:, 1:4], (t[:, :1], t[:, 1:])),
        *(wide, table),
        differ_in=1,
    )


def test_inputs_stay_as_they_are() -> None:
    x, table = randn(4, 2, 8), randn(4, 2, 8)
    before = x.clone()
    fused.rotate(x, (table[:, :1], table[:, 1:]))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_serves_other_types(dtype: torch.dtype) -> None:
    x, weight, table = randn(4, 2, 8).to(dtype), randn(8).to(dtype), randn(4, 2, 8).to(dtype)
    rotation = table[:, :1], table[:, 1:]
    assert torch.equal(fused.rms_norm(x, (8,), weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))
    assert torch.equal(fused.silu_mul(x, x), F.silu(x) * x)
    assert torch.equal(fused.rotate(x, rotation), ops.rotate_by_torch(x, rotation))


def test_no_library_no_difference_but_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = randn(4, 8)
    served = fused.silu_mul(x, x)
    monkeypatch.setattr(ops, "kernels", lambda: ops.Kernel(library=None, reason="none"))
    assert torch.equal(fused.silu_mul(x, x), F.silu(x) * x)
    torch.testing.assert_close(served, F.silu(x) * x)


@pytest.mark.parametrize(("dtype", "serves"), [("float32", True), ("bfloat16", True)])
def test_it_serves_training_on_processors(dtype: str, serves: bool) -> None:
    model = new_model(ModelShape(**SHAPE), seed=0, std=0.1)
    set_compute(model, TrainerConfig(dtype=dtype), CPU)
    kinds = {RMSNorm: ("normalize", fused.rms_norm), Attention: ("rotate", fused.rotate),
             FeedForward: ("activate", fused.silu_mul)}  # fmt: skip
    for module in model.modules():
        for kind, (name, function) in kinds.items():
            if isinstance(module, kind):
                assert (getattr(module, name) is function) == serves
