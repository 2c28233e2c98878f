"""Log-probabilities of given tokens, in float32 at least, without ever holding all logits.

Shape suffixes: R target tokens, C tokens of one chunk, D model dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 1 << 22
"""Logits held at once, in elements: 16 MiB of float32."""


def target_logprobs(hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ head.T / temperature)[target], [R], differentiable in `hidden` and `head`.

    Float32, and float64 for float64 inputs.

    Forward and backward go through the tokens in chunks and compute each chunk's logits twice instead of keeping
    them: memory is O(chunk * V) instead of O(R * V).
    """
    return _TargetLogprobs.apply(hidden_R_D, head_V_D, targets_R, temperature)


def _chunk_tokens(vocab_size: int) -> int:
    return max(1, CHUNK_LOGITS // vocab_size)


def _compute_type(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
        logprobs, normalizers = list[Tensor](), list[Tensor]()
        chunk, dtype = _chunk_tokens(head_V_D.shape[0]), _compute_type(hidden_R_D)
        for hidden_C_D, targets_C in zip(hidden_R_D.split(chunk), targets_R.split(chunk), strict=True):
            logits_C_V = (hidden_C_D @ head_V_D.T).to(dtype).div_(temperature)
            normalizers.append(logits_C_V.logsumexp(1))
            logprobs.append(logits_C_V.gather(1, targets_C[:, None]).squeeze(1) - normalizers[-1])
        ctx.save_for_backward(hidden_R_D, head_V_D, targets_R, torch.cat(normalizers))
        ctx.temperature = temperature
        return torch.cat(logprobs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor, None, None]:  # pyrefly: ignore[bad-override]
        (grad_R,) = grad_outputs
        hidden_R_D, head_V_D, targets_R, normalizers_R = ctx.saved_tensors
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
            grad_C_V.scatter_add_(1, targets_R[rows, None], scale_C_1)
            grad_C_V = grad_C_V.to(hidden_C_D.dtype)
            grad_hidden_R_D[rows] = grad_C_V @ head_V_D
            grad_head_V_D += grad_C_V.T @ hidden_C_D
        return grad_hidden_R_D, grad_head_V_D.to(head_V_D.dtype), None, None
