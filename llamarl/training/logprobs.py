"""Log-probabilities of given tokens, in float32 at least, without ever holding all logits.

Shape suffixes: R target tokens, C tokens of one chunk, D model dim, V (this rank's part of the) vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.distributed.mesh import ALONE, Axis

CHUNK_LOGITS = 1 << 22
"""Logits held at once, in elements: 16 MiB of float32."""


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


def _chunk_tokens(vocab_size: int) -> int:
    return max(1, CHUNK_LOGITS // vocab_size)


def _compute_type(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, temperature: float, tp: Axis
    ) -> Tensor:
        logits, normalizers = list[Tensor](), list[Tensor]()
        targets_R = targets_R - tp.rank * len(head_V_D)
        own_R = (targets_R >= 0) & (targets_R < len(head_V_D)) | (tp.size == 1)
        targets_R = targets_R.where(own_R, 0)
        chunk, dtype = _chunk_tokens(head_V_D.shape[0]), _compute_type(hidden_R_D)
        for hidden_C_D, targets_C in zip(hidden_R_D.split(chunk), targets_R.split(chunk), strict=True):
            logits_C_V = (hidden_C_D @ head_V_D.T).to(dtype).div_(temperature)
            normalizers.append(logits_C_V.logsumexp(1))
            logits.append(logits_C_V.gather(1, targets_C[:, None]).squeeze(1))
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
        chunk, dtype = _chunk_tokens(head_V_D.shape[0]), _compute_type(hidden_R_D)
        grad_head_V_D = torch.zeros_like(head_V_D, dtype=dtype)
        for start in range(0, len(targets_R), chunk):
            rows = slice(start, start + chunk)
            hidden_C_D = hidden_R_D[rows]
            logits_C_V = (hidden_C_D @ head_V_D.T).to(dtype).div_(ctx.temperature)
            probs_C_V = (logits_C_V - normalizers_R[rows, None]).exp_()
            # d logprob / d logits = onehot(target) - probs, over the temperature
            scale_C_1 = (grad_R[rows] / ctx.temperature)[:, None]
            grad_C_V = probs_C_V.mul_(-scale_C_1)
            grad_C_V.scatter_add_(1, targets_R[rows, None], scale_C_1.where(own_R[rows, None], 0))
            grad_C_V = grad_C_V.to(hidden_C_D.dtype)
            grad_hidden_R_D[rows] = grad_C_V @ head_V_D
            grad_head_V_D += grad_C_V.T @ hidden_C_D
        return grad_hidden_R_D, grad_head_V_D.to(head_V_D.dtype), None, None, None
