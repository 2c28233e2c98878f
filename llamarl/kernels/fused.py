"""The small operations of training on CPUs, in float32 with their gradients: one pass over memory each.

Torch makes several passes for a norm and twice as many for its gradient: on small models a fifth of a step. Torch
serves everything except plain float32 tensors of a CPU, and serves with several threads, inside of `torch.compile`, and
without a compiled `ops.cpp`.

Shape suffixes: N packed tokens, D model dim, H heads, K head dim, F feed-forward dim, R rotated channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.kernels import ops, train_attention, train_delta


def rms_norm(x: Tensor, shape: tuple[int, ...], weight_D: Tensor, eps: float) -> Tensor:
    """Computes `F.rms_norm` over the last dimension."""
    if x.shape[-1:] != shape or not _are_served(x, weight_D):
        return F.rms_norm(x, shape, weight_D, eps)
    return _NormFunction.apply(x, weight_D, eps)


def rotate(x_N_H_K: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Computes `ops.rotate_by_torch`."""
    if not _are_served(x_N_H_K, *rotation):
        return ops.rotate_by_torch(x_N_H_K, rotation)
    return _RotationFunction.apply(x_N_H_K, *rotation)


def silu_mul(gate_N_F: Tensor, up_N_F: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    return (
        GateFunction.apply(gate_N_F, up_N_F, ops)
        if _are_served(gate_N_F, up_N_F)
        else ops.gate_by_torch(gate_N_F, up_N_F)
    )


def describe(has_delta: bool) -> str:
    """Returns a line for the log: which kernels serve in float32 on a CPU. Those of delta nets are compiled only for
    models that have some."""
    threads = "kernels need one thread" if torch.get_num_threads() > 1 else ""
    reasons = {
        "norms, rotations and activations": threads or ops.kernels().reason,
        "attention": threads or train_attention.kernels().reason,
    }
    if has_delta:
        reasons["delta nets"] = threads or train_delta.kernels().reason
    return "; ".join(f"{name}: {f'torch ({reason})' if reason else 'fused'}" for name, reason in reasons.items())


def _are_served(*tensors: Tensor) -> bool:
    return ops.are_plain(*tensors) and ops.kernels().library is not None


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x, weight_D = x.contiguous(), weight_D.contiguous()
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return ops.rms_norm(x.view(-1, x.shape[-1]), weight_D, eps).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight_D = ctx.saved_tensors
        return *ops.rms_norm_backward(grads[0].contiguous(), x, weight_D, ctx.eps), None


class _RotationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N_H_K: Tensor, cos_N_1_R: Tensor, sin_N_1_R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N_1_R, sin_N_1_R)
        return ops.rotated(x_N_H_K, cos_N_1_R, sin_N_1_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        cos_N_1_R, sin_N_1_R = ctx.saved_tensors
        # The transpose: the gradient from the upper half to the lower one has the upper one's sine.
        return ops.rotated(grads[0], cos_N_1_R, sin_N_1_R.roll(sin_N_1_R.shape[-1] // 2, -1)), None, None


class GateFunction(torch.autograd.Function):
    """The gated activation, by the `silu_mul` and `silu_mul_backward` of a module of kernels."""

    @staticmethod
    def forward(ctx: Any, gate_N_F: Tensor, up_N_F: Tensor, kernels: Any) -> Tensor:
        gate_N_F, up_N_F = gate_N_F.contiguous(), up_N_F.contiguous()
        ctx.save_for_backward(gate_N_F, up_N_F)
        ctx.kernels = kernels
        return kernels.silu_mul(gate_N_F.flatten(0, -2), up_N_F.flatten(0, -2)).view_as(gate_N_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return *ctx.kernels.silu_mul_backward(grads[0].contiguous(), *ctx.saved_tensors), None
