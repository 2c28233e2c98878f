"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024), in the type of the weights.

torch's implementation iterates in bfloat16, which processors without bfloat16 instructions emulate: it took ten times
as long as forward and backward of a small model. Matrices of the same shape, including those of experts, are
orthogonalized in one batch.

Shape suffixes: B matrices of one shape, R rows, C columns, R <= C.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from llamarl.training.optimizer import Uncompiled

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the iteration x -> a x + b x^3 + c x^5. The slope at 0 is steep, so small singular values grow in few
steps."""
NUM_STEPS = 5


class Muon(Uncompiled):
    """Momentum optimizer whose update is the nearest matrix with equal singular values. For matrices only."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, others: torch.optim.Optimizer | None = None) -> None:
        """`others` is an optimizer for other weights that steps together with this one. The ratio of the rates is
        kept."""
        super().__init__(matrices, {"lr": lr})
        (self._matrices,) = self.param_groups
        assert all(weight.ndim >= 2 for weight in self._matrices["params"]), "matrices, and stacks of them, only"
        self._others = others
        if others is not None:
            self._matrices["lr_scale"] = lr / others.param_groups[0]["lr"]
            self.param_groups += others.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        """Applies one update with Nesterov momentum, scaled by sqrt(rows / columns) for tall matrices."""
        assert closure is None, "no closure is supported"
        by_shape = defaultdict[torch.Size, list[Tensor]](list)
        for weight in self._matrices["params"]:
            if weight.grad is not None:
                by_shape[weight.shape].append(weight)
        for shape, weights in by_shape.items():
            momenta = torch.stack([self._momentum(weight) for weight in weights])
            updates = orthogonalized(momenta.flatten(0, -3)).reshape(momenta.shape)
            rate = self._matrices["lr"] * math.sqrt(max(1.0, shape[-2] / shape[-1]))
            for weight, update in zip(weights, updates, strict=True):
                weight.sub_(update, alpha=rate)
        if self._others is not None:
            self._others.step()

    def _momentum(self, weight: Tensor) -> Tensor:
        gradient = weight.grad
        assert gradient is not None
        average = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        average.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(average, MOMENTUM)


def orthogonalized(matrices_B_R_C: Tensor) -> Tensor:
    """Returns each matrix with singular values of about 1 (0.7 to 1.2), same shape."""
    if matrices_B_R_C.shape[1] > matrices_B_R_C.shape[2]:
        return orthogonalized(matrices_B_R_C.mT).mT
    a, b, c = COEFFICIENTS
    # The iteration converges below 1; the Frobenius norm is at least the largest singular value.
    x_B_R_C = matrices_B_R_C / matrices_B_R_C.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NUM_STEPS):
        gram_B_R_R = x_B_R_C @ x_B_R_C.mT
        x_B_R_C = torch.baddbmm(
            x_B_R_C, torch.baddbmm(gram_B_R_R, gram_B_R_R, gram_B_R_R, beta=b, alpha=c), x_B_R_C, beta=a
        )
    return x_B_R_C
