"""Log-probabilities of given tokens, in float32 at least, without ever holding all logits.

Shape suffixes: R target tokens, D model dim, V (this rank's part of the) vocabulary, T tokens of the vocabulary in one
tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llamarl.distributed.mesh import ALONE, Axis
from llamarl.kernels import gpu
from llamarl.kernels.linear import Room, multiply_rounded
from llamarl.kernels.products import INPUT, OUTPUT, WEIGHT, multiply
from llamarl.models.masking import UnusedIds
from llamarl.models.memory import TILE_LOGITS

_ROWS = 1024
"""Rows whose targets' rows of the head are copied at once."""
ALL_USED = UnusedIds(())


def target_logprobs(
    hidden_R_D: Tensor,
    head_V_D: Tensor,
    targets_R: Tensor,
    temperature: float,
    tp: Axis = ALONE.tp,
    cutoffs_R: Tensor | None = None,
    unused_ids: UnusedIds = ALL_USED,
    *,
    rounds: bool = False,
) -> Tensor:
    """log softmax(hidden @ head.T / temperature)[target], [R], differentiable in `hidden` and `head`. Ids that are not
    used have no probability and no gradient; no target is one of them.

    Float32, and float64 for float64 inputs.

    With `cutoffs` the softmax is that of the candidates alone: the target, and all tokens whose logit over the
    temperature is at least the target's plus the cutoff, 0 or less. Others get no gradient.

    Forward and backward go through the vocabulary in tiles and compute each tile's logits twice instead of keeping
    them: memory is O(tile) instead of O(R * V). Forward keeps a running maximum and sum (online softmax, arXiv
    1805.02867). Tiles of the vocabulary, not of the tokens, as each then reads its rows of the head, and writes their
    gradient, once.

    With several ranks on `tp` each has an equal part of the head, in rank order. All get the same log-probs, and the
    gradient of `hidden` is this rank's part of a sum over the ranks.

    Args:
        rounds: the factors of all products are rounded to bfloat16, on a CPU and of float32 inputs. Logits are float32
            sums, by the kernel that generators use. Gradients are those of the unrounded inputs.
    """
    return _TargetLogprobs.apply(hidden_R_D, head_V_D, targets_R, temperature, tp, cutoffs_R, unused_ids, rounds)


class _Tiles:
    """Tiles of logits, one after the other, on processors in the same memory: fresh pages for each would take a tenth
    of the time."""

    def __init__(
        self,
        hidden_R_D: Tensor,
        head_V_D: Tensor,
        temperature: float,
        unused_ids: UnusedIds = ALL_USED,
        first: int = 0,
    ) -> None:
        """
        Args:
            first: token id of the first row of the head.
        """
        self._unused_ids, self._first = unused_ids, first
        self.dtype = torch.promote_types(hidden_R_D.dtype, torch.float32)
        self._hidden_R_D, self._head_V_D, self._temperature = hidden_R_D, head_V_D, temperature
        # A power of two: products by oneDNN keep code for every size that they have met.
        most = 1 << (max(1, tile_logits(hidden_R_D) // max(1, len(hidden_R_D))).bit_length() - 1)
        self._size, self._room = min(most, len(head_V_D)), None
        self._packed = Room()
        if not hidden_R_D.is_cuda:
            self._room = hidden_R_D.new_empty(len(hidden_R_D) * self._size, dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """First token, rows of the head, and their logits over the temperature [R, T], valid until the next ones."""
        num_rows = len(self._hidden_R_D)
        for start in range(0, len(self._head_V_D), self._size):
            head_T_D = self._head_V_D[start : start + self._size]
            if self._room is None:
                logits_R_T = wide_product(self._hidden_R_D, head_T_D.T)
            else:
                logits_R_T = self._room[: num_rows * len(head_T_D)].view(num_rows, len(head_T_D))
                if head_T_D.dtype != self._hidden_R_D.dtype:
                    multiply_rounded(self._hidden_R_D, head_T_D, self._packed, logits_R_T)
                elif self._hidden_R_D.dtype == self.dtype:
                    multiply(OUTPUT, self._hidden_R_D, head_T_D, logits_R_T)
                else:
                    logits_R_T.copy_(wide_product(self._hidden_R_D, head_T_D.T))
            logits_R_T = logits_R_T if self._temperature == 1 else logits_R_T.div_(self._temperature)
            yield start, head_T_D, self._unused_ids.remove(logits_R_T, self._first + start)


def tile_logits(hidden_R_D: Tensor) -> int:
    """Logits of a tile at most. On GPUs there are no fewer columns than hidden channels: adding their gradient up takes
    less time than products then, and as much memory as a tile."""
    return max(TILE_LOGITS, hidden_R_D.numel()) if hidden_R_D.is_cuda else TILE_LOGITS


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of bfloat16 factors, on GPUs as the float32 sums that their units make: rounded, logits are off by 0.02
    nats. Torch knows no such product on processors."""
    is_rounded = a.is_cuda and a.dtype == torch.bfloat16
    return torch.mm(a, b, out_dtype=torch.float32) if is_rounded else a @ b


def _place(targets_R: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Column of each target in a tile, [R, 1], and whether it is there, [R, 1]; elsewhere it is 0."""
    columns_R_1 = (targets_R - start)[:, None]
    there_R_1 = (columns_R_1 >= 0) & (columns_R_1 < size)
    return columns_R_1.where(there_R_1, 0), there_R_1


def _target_logits(hidden_R_D: Tensor, head_V_D: Tensor, targets_R: Tensor, tp: Axis, dtype: torch.dtype) -> Tensor:
    """Logits of the targets, [R, 1], the same on all ranks; those that are no rows of this head are another rank's."""
    there_R = (targets_R >= 0) & (targets_R < len(head_V_D))
    parts = (
        torch.linalg.vecdot(hidden_C_D.to(dtype), head_V_D[targets_C].to(dtype))
        for hidden_C_D, targets_C in zip(hidden_R_D.split(_ROWS), targets_R.where(there_R, 0).split(_ROWS), strict=True)
    )
    logits_R_1 = torch.cat([*parts, hidden_R_D.new_empty(0, dtype=dtype)]).where(there_R, 0)[:, None]
    return tp.sum(logits_R_1) if tp.size > 1 else logits_R_1


def _leave_out(logits_R_T: Tensor, floors_R_1: Tensor | None, columns_R_1: Tensor, there_R_1: Tensor) -> None:
    """Logits below the floors become -inf, but for the targets'."""
    if floors_R_1 is not None:
        is_out_R_T = logits_R_T < floors_R_1
        is_out_R_T.scatter_(1, columns_R_1, is_out_R_T.gather(1, columns_R_1) & ~there_R_1)
        logits_R_T.masked_fill_(is_out_R_T, -torch.inf)


def _kernels(x_R_D: Tensor, cutoffs_R: Tensor | None) -> Any:
    """`parts/cuda/logprobs.py` on a GPU; None: torch does its work."""
    return gpu.kernel("logprobs", x_R_D.device) if cutoffs_R is None and x_R_D.dtype != torch.float64 else None


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_R_D: Tensor,
        head_V_D: Tensor,
        targets_R: Tensor,
        temperature: float,
        tp: Axis,
        cutoffs_R: Tensor | None,
        unused_ids: UnusedIds,
        rounds: bool,
    ) -> Tensor:
        if rounds:
            hidden_R_D, head_V_D = hidden_R_D.bfloat16().float(), head_V_D.bfloat16()
        first = tp.rank * len(head_V_D)
        targets_R, ctx.kernels = targets_R - first, _kernels(hidden_R_D, cutoffs_R)
        tiles = _Tiles(hidden_R_D, head_V_D, temperature, unused_ids, first)
        logits_R_1, floors_R_1 = hidden_R_D.new_zeros(len(hidden_R_D), 1, dtype=tiles.dtype), None
        largest_R_1, sums_R_1 = torch.full_like(logits_R_1, -torch.inf), torch.zeros_like(logits_R_1)
        if cutoffs_R is not None:
            largest_R_1 = _target_logits(hidden_R_D, head_V_D, targets_R, tp, tiles.dtype) / temperature  # a candidate
            floors_R_1 = largest_R_1 + cutoffs_R[:, None]
        for start, _, logits_R_T in tiles:
            if ctx.kernels:
                ctx.kernels.add_tile(logits_R_T, targets_R - start, largest_R_1, sums_R_1, logits_R_1)
                continue
            columns_R_1, there_R_1 = _place(targets_R, start, logits_R_T.shape[1])
            logits_R_1 += logits_R_T.gather(1, columns_R_1).where(there_R_1, 0)
            _leave_out(logits_R_T, floors_R_1, columns_R_1, there_R_1)
            before_R_1, largest_R_1 = largest_R_1, torch.maximum(largest_R_1, logits_R_T.amax(1, keepdim=True))
            sums_R_1 *= (before_R_1 - largest_R_1).exp_()
            sums_R_1 += logits_R_T.sub_(largest_R_1).exp_().sum(1, keepdim=True)
        normalizers_R, logits_R = (sums_R_1.log_() + largest_R_1).squeeze(1), logits_R_1.squeeze(1)
        if tp.size > 1:
            parts_2_R = torch.stack((normalizers_R, logits_R))
            normalizers_tp_R, logits_tp_R = tp.gather(parts_2_R).unflatten(0, (-1, 2)).unbind(1)
            normalizers_R, logits_R = normalizers_tp_R.logsumexp(0), logits_tp_R.sum(0)
        ctx.save_for_backward(hidden_R_D, head_V_D, targets_R, normalizers_R, floors_R_1)
        ctx.temperature, ctx.unused = temperature, (unused_ids, first)
        return logits_R - normalizers_R

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, Tensor | None, None, None, None, None, None, None]:
        (grad_R,) = grad_outputs
        hidden_R_D, head_V_D, targets_R, normalizers_R, floors_R_1 = ctx.saved_tensors
        tiles = _Tiles(hidden_R_D, head_V_D, ctx.temperature, *ctx.unused)
        grad_hidden_R_D = torch.zeros_like(hidden_R_D, dtype=tiles.dtype)
        rounds = head_V_D.dtype != hidden_R_D.dtype
        head_dtype = hidden_R_D.dtype if rounds else head_V_D.dtype
        grad_head_V_D = torch.empty_like(head_V_D, dtype=head_dtype) if ctx.needs_input_grad[1] else None
        half_R_D = hidden_R_D.bfloat16() if rounds else hidden_R_D
        scale_R_1 = (grad_R / ctx.temperature)[:, None]
        for start, head_T_D, logits_R_T in tiles:
            if ctx.kernels:
                dtype = hidden_R_D.dtype
                grad_R_T = ctx.kernels.gradient(logits_R_T, targets_R - start, normalizers_R, scale_R_1, dtype)
            else:
                columns_R_1, there_R_1 = _place(targets_R, start, len(head_T_D))
                _leave_out(logits_R_T, floors_R_1, columns_R_1, there_R_1)
                # d logprob / d logits = onehot(target) - probs, over the temperature
                grad_R_T = logits_R_T.sub_(normalizers_R[:, None]).exp_().mul_(-scale_R_1)
                grad_R_T.scatter_add_(1, columns_R_1, scale_R_1.where(there_R_1, 0))
            if head_T_D.dtype == tiles.dtype:
                multiply(INPUT, grad_R_T, head_T_D, grad_hidden_R_D, add=True)
            else:
                grad_R_T = grad_R_T.to(head_T_D.dtype)
                grad_hidden_R_D += wide_product(grad_R_T, head_T_D)
            if grad_head_V_D is not None:
                rows = slice(start, start + len(head_T_D))
                if rounds:
                    grad_head_V_D[rows] = grad_R_T.t() @ half_R_D
                else:
                    multiply(WEIGHT, grad_R_T, hidden_R_D, grad_head_V_D[rows])
        return grad_hidden_R_D.to(hidden_R_D.dtype), grad_head_V_D, None, None, None, None, None, None
