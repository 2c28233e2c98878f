"""Muon against torch's own, and against a singular value decomposition."""

import pytest
import torch

from llamarl.config.roles import TrainerConfig
from llamarl.parts.sft.muon import Muon, orthogonalized
from llamarl.training.optimizer import set_learning_rate


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12)])
def test_orthogonalized_keeps_directions(shape) -> None:
    matrices = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    values = (left.mT @ orthogonalized(matrices) @ right.mT).diagonal(dim1=1, dim2=2)
    assert values.min() > 0.6
    assert values.max() < 1.25
    off_diagonal = left.mT @ orthogonalized(matrices) @ right.mT - torch.diag_embed(values)
    assert off_diagonal.abs().max() < 1e-8


def test_steps_are_torchs_up_to_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (24, 8), (8, 24), (8, 8)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in start] for _ in range(2))
    optimizers = [Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0)]
    for _ in range(4):
        for weight, other in zip(ours, theirs, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator)
            other.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for weight, other, first in zip(ours, theirs, start, strict=True):
        assert (weight - first).norm() > 0.5
        assert (weight - other).norm() < 0.03 * (weight - first).norm()


def test_a_stack_moves_as_its_matrices_do() -> None:
    generator = torch.Generator().manual_seed(0)
    start, slope = (torch.randn(3, 24, 8, generator=generator) for _ in range(2))
    stack, matrices = torch.nn.Parameter(start.clone()), [torch.nn.Parameter(one.clone()) for one in start]
    stack.grad = slope
    for matrix, one in zip(matrices, slope, strict=True):
        matrix.grad = one
    for weights in ([stack], matrices):
        Muon(weights, lr=0.1).step()
    torch.testing.assert_close(stack.detach(), torch.stack([one.detach() for one in matrices]))
    assert (stack - start).norm() > 0.5


def test_weights_without_gradient_stay() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    weights[0].grad = torch.ones(2, 3)
    Muon(weights, lr=0.1).step()
    assert not torch.equal(weights[0], torch.ones(2, 3))
    assert torch.equal(weights[1], torch.ones(2, 3))


def test_rates_of_both_optimizers_keep_their_ratio() -> None:
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    muon = Muon([matrix], 0.02, torch.optim.AdamW([bias], 0.008))
    set_learning_rate(muon, 0, TrainerConfig(learning_rate=0.004))
    assert [group["lr"] for group in muon.param_groups] == pytest.approx([0.01, 0.004])
