"""One of two ranks that share the output head."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from llamarl.training import logprobs
from llamarl.training.logprobs import target_logprobs
from tests.training.layouts import joined


def part(
    meeting: Path, number: int, hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, weights_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, and this rank's gradients of hidden states and of its half of the head."""
    mesh = joined(meeting, number, {"tp": 2})
    own_V_D = head_V_D.chunk(2)[number].clone().requires_grad_()
    hidden_R_D.requires_grad_()
    logprobs.TILE_LOGITS = 4 * len(own_V_D)
    try:
        values_R = target_logprobs(hidden_R_D, own_V_D, targets_R, 0.7, mesh.tp)
        (values_R @ weights_R).backward()
        assert hidden_R_D.grad is not None
        assert own_V_D.grad is not None
        return values_R.detach(), hidden_R_D.grad, own_V_D.grad
    finally:
        mesh.close()
