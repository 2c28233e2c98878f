"""What flash attention computes over packed segments, by plain products: in place of the kernels, which need a GPU."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from llamarl.models.flash_attention import Segments


def probabilities(q: Tensor, k: Tensor, lse_H_Q: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """[H, Q, S] of one segment, relative to a log-sum-exp (its own, if none is given)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores_H_Q_S = torch.einsum("qhk,shk->hqs", q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        ahead = 1 + scores_H_Q_S.shape[2] - scores_H_Q_S.shape[1]  # the last query sees the last key
        assert ahead >= 1, "queries before all keys would see none"
        scores_H_Q_S = scores_H_Q_S.masked_fill(torch.ones_like(scores_H_Q_S, dtype=torch.bool).triu(ahead), -torch.inf)
    lse_H_Q = scores_H_Q_S.logsumexp(-1) if lse_H_Q is None else lse_H_Q
    return (scores_H_Q_S - lse_H_Q[:, :, None]).exp(), lse_H_Q


def parts(segments: Segments) -> list[tuple[slice, slice]]:
    queries, keys = segments.queries.tolist(), segments.keys.tolist()
    assert segments.queries.dtype == segments.keys.dtype == torch.int32
    assert segments.max_queries == max(b - a for a, b in pairwise(queries))
    assert segments.max_keys == max(b - a for a, b in pairwise(keys))
    return [
        (slice(a, b), slice(c, d))
        for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True)
    ]  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    assert segments.queries[-1] == len(q) and segments.keys[-1] == len(k) == len(v)
    for rows, seen in parts(segments):
        assert seen.start < seen.stop or rows.start == rows.stop, "of no keys the kernel says +inf"
        p_H_Q_S, lse[:, rows] = probabilities(q[rows], k[seen], None, segments.is_causal)
        out[rows] = torch.einsum("hqs,shk->qhk", p_H_Q_S, v[seen].repeat_interleave(q.shape[1] // k.shape[1], 1))
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """As the kernel does it: probabilities from `lse`, dS = P (dP - sum(dO * O)) (arXiv 2307.08691, algorithm 2)."""
    dq, dk, dv, ratio = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), q.shape[1] // k.shape[1]
    for rows, seen in parts(segments):
        p_H_Q_S, _ = probabilities(q[rows], k[seen], lse[:, rows], segments.is_causal)
        dp_H_Q_S = torch.einsum("qhk,shk->hqs", grad[rows], v[seen].repeat_interleave(ratio, 1))
        delta_H_Q = (grad[rows] * out[rows]).sum(-1).t()
        ds_H_Q_S = p_H_Q_S * (dp_H_Q_S - delta_H_Q[:, :, None]) / math.sqrt(q.shape[-1])
        dq[rows] = torch.einsum("hqs,shk->qhk", ds_H_Q_S, k[seen].repeat_interleave(ratio, 1))
        dk[seen] += torch.einsum("hqs,qhk->shk", ds_H_Q_S, q[rows]).unflatten(1, (-1, ratio)).sum(2)
        dv[seen] += torch.einsum("hqs,qhk->shk", p_H_Q_S, grad[rows]).unflatten(1, (-1, ratio)).sum(2)
    return dq, dk, dv
