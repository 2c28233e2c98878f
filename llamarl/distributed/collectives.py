"""Collectives that gradients pass through. With one rank on the axis they give back what they get.

The gradient of gathering is the sum of what all ranks want of one's rows, and the other way around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llamarl.distributed.mesh import Axis


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """The rows of all ranks in rank order; the gradient is each rank's share of the sum over what all ranks give."""
    return _Gather.apply(x, axis) if axis.size > 1 else x


def scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """This rank's share of the rows of the sum over all ranks."""
    return _Scatter.apply(x, axis) if axis.size > 1 else x


def summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over all ranks, for what each rank then computes alike: the gradient stays as it is."""
    return _Sum.apply(x, axis) if axis.size > 1 else x


def spread_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
    """So many rows, in rank order, to each rank, and those that each sends here; gradients go the other way."""
    return _Spread.apply(x, sends, receives, axis) if axis.size > 1 else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return ctx.axis.scatter(grads[0]), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return ctx.axis.gather(grads[0]), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
        ctx.axis, ctx.sends, ctx.receives = axis, sends, receives
        return axis.spread(x, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        return ctx.axis.spread(grads[0], ctx.receives, ctx.sends), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return grads[0], None
