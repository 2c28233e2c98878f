"""Mixtures of experts: the router, which is always float32, and the experts whose outputs a token's feed-forward sums.

Tensors of all experts of a layer are stacked: `experts.gate_proj` [E, F, D], `experts.up_proj` [E, F, D] and
`experts.down_proj` [E, D, F].

Shape suffixes: N packed tokens, D model dim, E experts, K experts of a token, F width of an expert, P places: rows once
for each of their experts, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.distributed.mesh import Axis, exchange_rows
from llamarl.models.shape import ModelShape, MoeShape

_LEAST_SUM = 1e-20
"""Added to the sum that sigmoid scores are divided by, as in the released models."""


def route(
    logits_N_E: Tensor, bias_E: Tensor | None, moe: MoeShape, ids_N_K: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, int64 [N, K], the likeliest first and the lower number first among equals, and
    their gates, float32 [N, K].

    Scores are a softmax over all experts. Or they are the sigmoid of each, with a bias for the choice only, among
    experts of the groups whose two best scores have the largest sums (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        ids_N_K: recorded experts. Their gates come from this router's scores, so a gradient reaches it. -1 means that
            the router chooses another expert itself.
    """
    scores_N_E = _scores(logits_N_E, moe)
    biased_N_E = scores_N_E.detach() if bias_E is None else scores_N_E.detach() + bias_E
    chosen_N_K = _chosen(biased_N_E, moe) if ids_N_K is None else _completed(ids_N_K, biased_N_E, moe)
    gates_N_K = scores_N_E.gather(1, chosen_N_K)
    if moe.normalized:
        gates_N_K = gates_N_K / (gates_N_K.sum(-1, keepdim=True) + (_LEAST_SUM if moe.scoring == "sigmoid" else 0.0))
    return chosen_N_K, gates_N_K * moe.scaling


def _chosen(scores_N_E: Tensor, moe: MoeShape, taken_N_E: Tensor | None = None) -> Tensor:
    """Returns the best experts that are not taken, within the best groups of all."""
    if moe.num_groups > 1:
        scores_N_G_X = scores_N_E.unflatten(1, (moe.num_groups, -1))
        best_N_G = scores_N_G_X.topk(min(2, scores_N_G_X.shape[2])).values.sum(-1)
        others_N_x = best_N_G.sort(descending=True, stable=True).indices[:, moe.groups_per_token :]
        is_out_N_G = torch.zeros_like(best_N_G, dtype=torch.bool).scatter_(1, others_N_x, True)
        scores_N_E = scores_N_G_X.masked_fill(is_out_N_G[:, :, None], -math.inf).flatten(1)
    if taken_N_E is not None:
        scores_N_E = scores_N_E.masked_fill(taken_N_E, -math.inf)
    return scores_N_E.sort(descending=True, stable=True).indices[:, : moe.experts_per_token]


def _scores(logits_N_E: Tensor, moe: MoeShape) -> Tensor:
    logits_N_E = logits_N_E.to(torch.promote_types(logits_N_E.dtype, torch.float32))
    return logits_N_E.sigmoid() if moe.scoring == "sigmoid" else logits_N_E.softmax(-1)


def _completed(ids_N_K: Tensor, scores_N_E: Tensor, moe: MoeShape) -> Tensor:
    """Returns recorded experts, each once, and in the other places the best of the remaining experts."""
    is_repeated_N_K = (ids_N_K[:, :, None] == ids_N_K[:, None, :]).tril(-1).any(-1)
    is_open_N_K = (ids_N_K < 0) | is_repeated_N_K
    taken_N_E1 = scores_N_E.new_zeros(len(scores_N_E), moe.num_experts + 1, dtype=torch.bool)
    taken_N_E1.scatter_(1, ids_N_K.masked_fill(is_open_N_K, moe.num_experts), True)
    best_N_K = _chosen(scores_N_E, moe, taken_N_E1[:, :-1])
    return torch.where(is_open_N_K, best_N_K.gather(1, (is_open_N_K.cumsum(1) - 1).clamp(min=0)), ids_N_K)


class Router(nn.Module):
    """Chooses the experts of each token."""

    def __init__(self, shape: ModelShape, moe: MoeShape) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, shape.hidden_size, dtype=torch.float32))
        bias_E = torch.zeros(moe.num_experts, dtype=torch.float32) if moe.has_selection_bias else None
        self.register_buffer("e_score_correction_bias", bias_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keeps the router float32 at least, for any conversion of the whole model."""

        def exact(x: Tensor) -> Tensor:
            converted = fn(x)
            is_lower = torch.promote_types(converted.dtype, torch.float32) != converted.dtype
            return x.to(converted.device) if is_lower else converted

        return super()._apply(exact, recurse)

    def forward(self, x_N_D: Tensor, ids_N_K: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return route(self._logits(x_N_D), self.e_score_correction_bias, self.moe, ids_N_K)

    def scores(self, x_N_D: Tensor) -> Tensor:
        """Returns the likelihood of each expert, before any choice, [N, E]."""
        return _scores(self._logits(x_N_D), self.moe)

    def _logits(self, x_N_D: Tensor) -> Tensor:
        with torch.autocast(x_N_D.device.type, enabled=False):
            dtype = torch.promote_types(x_N_D.dtype, torch.float32)
            return F.linear(x_N_D.to(dtype), self.weight.to(dtype))


class _RowsByNumber(torch.autograd.Function):
    """Gathers rows of a matrix by their numbers. Its gradient is summed in a fixed order, on GPUs too."""

    @staticmethod
    def forward(ctx: Any, x_N_D: Tensor, numbers_P: Tensor, places_N_K: Tensor) -> Tensor:
        """
        Args:
            places_N_K: places to which each row is copied.
        """
        ctx.save_for_backward(places_N_K)
        return x_N_D.index_select(0, numbers_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places_N_K,), (grad_P_D,) = ctx.saved_tensors, grads
        grad_N_K_D = grad_P_D.index_select(0, places_N_K.flatten()).unflatten(0, places_N_K.shape)
        return grad_N_K_D.sum(1) if places_N_K.shape[1] > 1 else grad_N_K_D.squeeze(1), None, None


def _is_grouped(stack: Tensor) -> bool:
    """Returns whether torch multiplies all experts of a stack at once: rows begin at multiples of 16 bytes, and the
    device can."""
    is_odd = any(size * stack.itemsize % 16 for size in stack.shape[1:])
    if is_odd or stack.dtype not in (torch.bfloat16, torch.float32):
        return False
    return stack.device.type != "cuda" or (
        stack.dtype == torch.bfloat16 and torch.cuda.get_device_capability(stack.device) >= (8, 0)
    )


def _product(x_P_I: Tensor, stack_E_O_I: Tensor, offsets_E: Tensor) -> Tensor:
    y_P_O = F.grouped_mm(x_P_I, stack_E_O_I.transpose(1, 2), offs=offsets_E)
    if y_P_O.requires_grad:
        y_P_O.register_hook(Tensor.contiguous)  # `grouped_mm` needs a gradient that is not expanded
    return y_P_O


def _one_by_one(x_P_D: Tensor, stacks: Sequence[Tensor], counts: list[int]) -> Tensor:
    # Unbound once: the gradient of each indexing of a stack would be as large as the stack.
    matrices = zip(*(stack.unbind() for stack in stacks), strict=True)
    return torch.cat([
        F.linear(F.silu(F.linear(x_M_D, gate_F_D)) * F.linear(x_M_D, up_F_D), down_D_F)
        for x_M_D, (gate_F_D, up_F_D, down_D_F) in zip(x_P_D.split(counts), matrices, strict=True)
    ])  # fmt: skip


def _inverse(places_P: Tensor) -> Tensor:
    return torch.empty_like(places_P).scatter_(0, places_P, torch.arange(len(places_P), device=places_P.device))


class Experts(nn.Module):
    """Gated feed-forwards, one for each expert.

    Ranks of `ep` have equal numbers of experts, in order, and all of them are in this forward together. Rows travel to
    the rank of their expert, and the results travel back.
    """

    def __init__(self, shape: ModelShape, moe: MoeShape) -> None:
        super().__init__()
        self.num_experts, self.ep = moe.num_experts, Axis()
        into = moe.num_experts, moe.expert_size, shape.hidden_size
        self.gate_proj, self.up_proj = nn.Parameter(torch.empty(into)), nn.Parameter(torch.empty(into))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, shape.hidden_size, moe.expert_size))

    def forward(self, x_N_D: Tensor, ids_N_K: Tensor, gates_N_K: Tensor) -> Tensor:
        num_rows, per_row = ids_N_K.shape
        # Stable: otherwise the order of an expert's rows, and of sums over them, would vary.
        sorted_P, places_P = ids_N_K.flatten().sort(stable=True)
        order_P = _inverse(places_P)
        experts_E = torch.arange(self.num_experts, device=x_N_D.device)
        ends_E = torch.searchsorted(sorted_P, experts_E, right=True)
        x_P_D = _RowsByNumber.apply(x_N_D, places_P // per_row, order_P.view(num_rows, per_row))
        compute = self.segments if self.ep.size == 1 else self._spread
        y_P_D = compute(x_P_D, ends_E.diff(prepend=ends_E.new_zeros(1)))
        y_N_K_D = _RowsByNumber.apply(y_P_D, order_P, places_P[:, None]).view(num_rows, per_row, -1)
        return (y_N_K_D * gates_N_K[:, :, None].to(y_P_D.dtype)).sum(1)

    def _spread(self, x_P_D: Tensor, counts_E: Tensor) -> Tensor:
        """Returns outputs of all rows, each from the rank that has its expert; see `segments`."""
        ep, each, device = self.ep, [1] * self.ep.size, x_P_D.device
        if torch.is_autocast_enabled(device.type):  # halves the bytes to send
            x_P_D = x_P_D.to(torch.get_autocast_dtype(device.type))
        counts_R_E = counts_E.view(ep.size, -1)
        theirs_R_E = ep.all_to_all(counts_R_E, each, each)
        sends, receives = torch.stack([counts_R_E.sum(1), theirs_R_E.sum(1)]).tolist()
        experts_E = torch.arange(theirs_R_E.shape[1], device=device)
        # Stable: an expert's rows of the first rank come first, in the order of a single rank.
        places_P = (
            experts_E.repeat(ep.size)
            .repeat_interleave(theirs_R_E.flatten(), output_size=sum(receives))
            .sort(stable=True)
            .indices
        )
        order_P = _inverse(places_P)
        here_P_D = _RowsByNumber.apply(exchange_rows(x_P_D, sends, receives, ep), places_P, order_P[:, None])
        y_P_D = _RowsByNumber.apply(self.segments(here_P_D, theirs_R_E.sum(0)), order_P, places_P[:, None])
        return exchange_rows(y_P_D, receives, sends, ep)

    def segments(self, x_P_D: Tensor, counts_E: Tensor) -> Tensor:
        """Returns outputs of rows that are sorted by expert.

        Args:
            counts_E: number of rows of each expert.
        """
        stacks, device = [self.gate_proj, self.up_proj, self.down_proj], x_P_D.device.type
        if torch.is_autocast_enabled(device):  # autocast does not know grouped products
            dtype = torch.get_autocast_dtype(device)
            x_P_D, stacks = x_P_D.to(dtype), [stack.to(dtype) for stack in stacks]
        if not (len(x_P_D) and all(map(_is_grouped, stacks))):  # torch has no gradient of zero rows
            return _one_by_one(x_P_D, stacks, counts_E.tolist())
        offsets_E = counts_E.cumsum(0, dtype=torch.int32)
        gate_P_F, up_P_F = (_product(x_P_D, stack, offsets_E) for stack in stacks[:2])
        return _product(F.silu(gate_P_F) * up_P_F, stacks[2], offsets_E)


class MoeFeedForward(nn.Module):
    """The experts of a token, and the shared expert if there is one."""

    def __init__(self, shape: ModelShape, moe: MoeShape, shared: nn.Module | None) -> None:
        super().__init__()
        self.gate = Router(shape, moe)
        self.experts = Experts(shape, moe)
        self.shared_experts = shared
        self.shared_expert_gate = nn.Linear(shape.hidden_size, 1, bias=False) if moe.gates_shared else None

    def forward(self, x_N_D: Tensor, ids_N_K: Tensor | None = None) -> Tensor:
        y_N_D = self.experts(x_N_D, *self.gate(x_N_D, ids_N_K))
        if self.shared_experts is None:
            return y_N_D
        shared_N_D = self.shared_experts(x_N_D)
        if self.shared_expert_gate is not None:
            shared_N_D = self.shared_expert_gate(x_N_D).sigmoid() * shared_N_D
        return y_N_D + shared_N_D
