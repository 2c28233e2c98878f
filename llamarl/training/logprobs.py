"""Log-probabilities of given tokens, in float32 at least, without ever holding all logits.

Shape suffixes: R target tokens, C tokens of one chunk, D model dim, V (this rank's part of the) vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.distributed.mesh import ALONE, Axis

CHUNK_LOGITS = 1 << 25
"""Logits held at once, in elements: 128 MiB of float32. With a vocabulary of 128 k, fewer tokens at a time take longer,
as each chunk reads the whole head (`benchmarks/training.py`)."""


def target_logprobs(
    hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, temperature: float, tp: Axis = ALONE.tp
) -> Tensor:
    """log softmax(hidden @ head.T / temperature)[target], [R], differentiable in `hidden` and `head`.

    Float32, and float64 for float64 inputs.

    Forward and backward go through the tokens in chunks and compute each chunk's logits twice instead of keeping
    them: memory is O(chunk * V) instead of O(R * V).

    With several ranks on `tp` each has an equal part of the head, in rank order. All get the same log-probs, and the
    gradient of `hidden` is this rank's part of a sum over the ranks.
    """
    return _TargetLogprobs.apply(hidden_R_D, head_V_D, targets_R, temperature, tp)


class _Logits:
    """Chunks of logits, one after the other in the same memory: fresh pages for each would take a tenth of the time."""

    def __init__(self, hidden_R_D: Tensor, head_V_D: Tensor, temperature: float) -> None:
        self.num_tokens = min(max(1, CHUNK_LOGITS // len(head_V_D)), max(1, len(hidden_R_D)))
        self.dtype = torch.promote_types(hidden_R_D.dtype, torch.float32)
        self._head_D_V = head_V_D.T
        self._temperature = temperature
        self._room_C_V = hidden_R_D.new_empty(self.num_tokens, len(head_V_D), dtype=self.dtype)

    def of(self, hidden_C_D: Tensor) -> Tensor:
        """Over the temperature, [C, V]; valid until the next call."""
        logits_C_V = self._room_C_V[: len(hidden_C_D)]
        if hidden_C_D.dtype == self.dtype:
            torch.mm(hidden_C_D, self._head_D_V, out=logits_C_V)
        else:
            logits_C_V.copy_(hidden_C_D @ self._head_D_V)
        return logits_C_V if self._temperature == 1 else logits_C_V.div_(self._temperature)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, temperature: float, tp: Axis
    ) -> Tensor:
        logits, normalizers = list[Tensor](), list[Tensor]()
        targets_R = targets_R - tp.rank * len(head_V_D)
        own_R = (targets_R >= 0) & (targets_R < len(head_V_D)) | (tp.size == 1)
        targets_R = targets_R.where(own_R, 0)
        chunks = _Logits(hidden_R_D, head_V_D, temperature)
        for hidden_C_D, targets_C in zip(
            hidden_R_D.split(chunks.num_tokens), targets_R.split(chunks.num_tokens), strict=True
        ):
            logits_C_V = chunks.of(hidden_C_D)
            logits.append(logits_C_V.gather(1, targets_C[:, None]).squeeze(1))
            largest_C_1 = logits_C_V.amax(1, keepdim=True)
            normalizers.append(logits_C_V.sub_(largest_C_1).exp_().sum(1).log_() + largest_C_1.squeeze(1))
        normalizers_R, logits_R = torch.cat(normalizers), torch.cat(logits)
        if tp.size > 1:
            parts_2_R = torch.stack((normalizers_R, logits_R.where(own_R, 0)))
            normalizers_tp_R, logits_tp_R = tp.gather(parts_2_R).unflatten(0, (-1, 2)).unbind(1)
            normalizers_R, logits_R = normalizers_tp_R.logsumexp(0), logits_tp_R.sum(0)
        ctx.save_for_backward(hidden_R_D, head_V_D, targets_R, own_R, normalizers_R)
        ctx.temperature = temperature
        return logits_R - normalizers_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        (grad_R,) = grad_outputs
        hidden_R_D, head_V_D, targets_R, own_R, normalizers_R = ctx.saved_tensors
        grad_hidden_R_D = torch.empty_like(hidden_R_D)
        chunks = _Logits(hidden_R_D, head_V_D, ctx.temperature)
        grad_head_V_D = torch.zeros_like(head_V_D, dtype=chunks.dtype)
        for start in range(0, len(targets_R), chunks.num_tokens):
            rows = slice(start, start + chunks.num_tokens)
            hidden_C_D = hidden_R_D[rows]
            probs_C_V = chunks.of(hidden_C_D).sub_(normalizers_R[rows, None]).exp_()
            # d logprob / d logits = onehot(target) - probs, over the temperature
            scale_C_1 = (grad_R[rows] / ctx.temperature)[:, None]
            grad_C_V = probs_C_V.mul_(-scale_C_1)
            grad_C_V.scatter_add_(1, targets_R[rows, None], scale_C_1.where(own_R[rows, None], 0))
            grad_C_V = grad_C_V.to(hidden_C_D.dtype)
            grad_hidden_R_D[rows] = grad_C_V @ head_V_D
            if hidden_C_D.dtype == chunks.dtype:
                grad_head_V_D.addmm_(grad_C_V.T, hidden_C_D)
            else:
                grad_head_V_D += grad_C_V.T @ hidden_C_D
        return grad_hidden_R_D, grad_head_V_D.to(head_V_D.dtype), None, None, None
