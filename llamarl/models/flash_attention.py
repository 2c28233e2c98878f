"""Packed attention on GPUs by torch's flash attention, without masks or a copy of the prompt per response.

There are two calls for a whole microbatch. In the first, prompts and responses attend to themselves, causally. In the
second, responses attend to their group's prompt. A softmax over the keys of both calls is the mean of the two outputs,
weighted by their sums: with log-sum-exps a and b and L = log(e^a + e^b), the output is e^(a - L) of the first and e^(b
- L) of the second. Backward gives each call the merged output and L, so its probabilities are those of the whole
softmax, and adds the gradients (as over the blocks of ring attention, arXiv 2310.01889).

A context rank computes slices of the packed tokens (`FlashSlices`). A slice of a document attends to the document up to
its own end: the kernel aligns causal queries with the last keys. Keys of documents that two slices share are copied.

Shape suffixes: N packed tokens, M rows of this rank, C copied keys, S tokens of a sequence, Q queries among them, R
response tokens with a prompt, P tokens of the prompts of these, H heads, J key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of queries and of keys. Queries see the keys of the same number."""

    queries: Tensor
    """Index at which each segment of queries begins, and the last one ends, int32."""
    keys: Tensor
    max_queries: int
    max_keys: int
    is_causal: bool


class FlashAttend:
    """`attend` of a microbatch on one GPU."""

    def __init__(
        self, prompt_lengths: Sequence[int], response_lengths: Sequence[tuple[int, ...]], device: torch.device
    ) -> None:
        own, responses, prompts, rows_R, rows_P, start = list[int](), list[int](), list[int](), [], [], 0
        for prompt, lengths in zip(prompt_lengths, response_lengths, strict=True):
            if len(lengths) == 1:  # one causal document with its prompt
                own.append(prompt + lengths[0])
            else:
                own += [prompt, *lengths]
            if len(lengths) > 1 and prompt:
                responses.append(sum(lengths))
                prompts.append(prompt)
                rows_P.append(torch.arange(start, start + prompt))
                rows_R.append(torch.arange(start + prompt, start + prompt + sum(lengths)))
            start += prompt + sum(lengths)
        own = [length for length in own if length]
        self._own = _segments(own, own, True, device)
        self._others = _segments(responses, prompts, False, device) if responses else None
        self._rows_R = torch.cat(rows_R).to(device, non_blocking=True) if responses else None
        self._rows_P = torch.cat(rows_P).to(device, non_blocking=True) if responses else None

    def __call__(self, _layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        arguments = (q_N_H_K, k_N_J_K, v_N_J_K, self._own, self._others, self._rows_R, self._rows_P, None)
        return _FlashFunction.apply(*arguments)


class FlashSlices:
    """`attend` of the rows of one context rank, to keys of all tokens."""

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        response_lengths: Sequence[tuple[int, ...]],
        slices: Sequence[range],
        device: torch.device,
    ) -> None:
        """
        Args:
            slices: this rank's rows of the packed tokens, ascending.
        """
        queries, keys, index_C = list[int](), list[int](), list[Tensor]()
        of_prompt, start = dict[int, tuple[range, list[Tensor]]](), 0
        documents = list[tuple[range, range | None]]()
        """Tokens of each document, and of the prompt that comes before it elsewhere."""
        for prompt, lengths in zip(prompt_lengths, response_lengths, strict=True):
            if len(lengths) == 1:  # one causal document with its prompt
                documents.append((range(start, start + prompt + lengths[0]), None))
            else:
                before, end = range(start, start + prompt), start + prompt
                documents.append((before, None))
                for length in lengths:
                    documents.append((range(end, end + length), before if prompt else None))
                    end += length
            start += prompt + sum(lengths)
        done = 0
        for rows in slices:
            for document, before in documents:
                low, high = max(rows.start, document.start), min(rows.stop, document.stop)
                if low >= high:
                    continue
                queries.append(high - low)
                keys.append(high - document.start)
                index_C.append(torch.arange(document.start, high))
                if before is not None:
                    own = torch.arange(done + low - rows.start, done + high - rows.start)
                    of_prompt.setdefault(before.start, (before, []))[1].append(own)
            done += len(rows)
        self._own = _segments(queries, keys, True, device)
        self._index_C = torch.cat(index_C).to(device, non_blocking=True)
        self._others, self._rows_R, self._rows_P = None, None, None
        if of_prompt:
            prompts = list(of_prompt.values())
            lengths_R = [sum(map(len, rows_R)) for _, rows_R in prompts]
            self._others = _segments(lengths_R, [len(before) for before, _ in prompts], False, device)
            rows = torch.cat([one for _, rows_R in prompts for one in rows_R])
            seen = torch.cat([torch.arange(before.start, before.stop) for before, _ in prompts])
            self._rows_R, self._rows_P = (one.to(device, non_blocking=True) for one in (rows, seen))

    def __call__(self, _layer: int, q_M_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        arguments = (q_M_H_K, k_N_J_K, v_N_J_K, self._own, self._others, self._rows_R, self._rows_P, self._index_C)
        return _FlashFunction.apply(*arguments)


def can_serve(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Returns whether torch has a kernel for these."""
    return device.type == "cuda" and dtype in DTYPES and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


def _segments(queries: Sequence[int], keys: Sequence[int], is_causal: bool, device: torch.device) -> Segments:
    begins_q, begins_k = (
        torch.tensor((0, *accumulate(lengths)), dtype=torch.int32).to(device, non_blocking=True)
        for lengths in (queries, keys)
    )
    return Segments(begins_q, begins_k, max(queries, default=0), max(keys, default=0), is_causal)


class _FlashFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_N_H_K: Tensor,
        k_N_J_K: Tensor,
        v_N_J_K: Tensor,
        own: Segments,
        others: Segments | None,
        rows_R: Tensor | None,
        rows_P: Tensor | None,
        index_C: Tensor | None,
    ) -> Tensor:
        q_N_H_K, k_N_J_K, v_N_J_K = (x.contiguous() for x in (q_N_H_K, k_N_J_K, v_N_J_K))
        out_N_H_K, lse_H_N = flash_forward(q_N_H_K, *_chosen(k_N_J_K, v_N_J_K, index_C), own)
        if others is not None and rows_R is not None:
            q, k, v = q_N_H_K[rows_R], k_N_J_K[rows_P], v_N_J_K[rows_P]
            out_R_H_K, lse_H_R = flash_forward(q, k, v, others)
            own_H_R = lse_H_N[:, rows_R]
            both_H_R = torch.logaddexp(own_H_R, lse_H_R)
            shares = ((lse - both_H_R).exp().t()[:, :, None] for lse in (own_H_R, lse_H_R))
            own_share, others_share = shares
            merged_R_H_K = own_share * out_N_H_K[rows_R] + others_share * out_R_H_K
            out_N_H_K = out_N_H_K.index_copy(0, rows_R, merged_R_H_K.to(out_N_H_K.dtype))
            lse_H_N = lse_H_N.index_copy(1, rows_R, both_H_R)
        ctx.save_for_backward(q_N_H_K, k_N_J_K, v_N_J_K, out_N_H_K, lse_H_N, rows_R, rows_P, index_C)
        ctx.segments = own, others
        return out_N_H_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, k, v, out_N_H_K, lse_H_N, rows_R, rows_P, index_C = ctx.saved_tensors
        own, others = ctx.segments
        grad_N_H_K = grads[0].contiguous()
        dq, dk, dv = flash_backward(grad_N_H_K, q, *_chosen(k, v, index_C), out_N_H_K, lse_H_N, own)
        if index_C is not None:  # a key may have been copied for two slices
            dk, dv = (_added(x, index_C, dx) for x, dx in ((k, dk), (v, dv)))
        if others is not None:
            lse_H_R = lse_H_N[:, rows_R].contiguous()
            kept = grad_N_H_K[rows_R], q[rows_R], k[rows_P], v[rows_P], out_N_H_K[rows_R], lse_H_R
            more = flash_backward(*kept, others)
            for whole, rows, part in zip((dq, dk, dv), (rows_R, rows_P, rows_P), more, strict=True):
                whole.index_copy_(0, rows, whole[rows] + part)  # no row comes twice
        return dq, dk, dv, None, None, None, None, None


def _added(x_N_J_K: Tensor, index_C: Tensor, parts_C_J_K: Tensor) -> Tensor:
    """Adds the rows of `parts` up, in float32 at least. Returns them in the shape and type of x."""
    dtype = torch.promote_types(x_N_J_K.dtype, torch.float32)
    return torch.zeros_like(x_N_J_K, dtype=dtype).index_add_(0, index_C, parts_C_J_K.to(dtype)).to(x_N_J_K.dtype)


def _chosen(k_N_J_K: Tensor, v_N_J_K: Tensor, index_C: Tensor | None) -> tuple[Tensor, Tensor]:
    if index_C is None:
        return k_N_J_K, v_N_J_K
    return k_N_J_K.index_select(0, index_C), v_N_J_K.index_select(0, index_C)


def flash_forward(q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Returns output [N, H, K] and log-sum-exp [H, N], float32."""
    out_N_H_K, lse_H_N, *_ = torch.ops.aten._flash_attention_forward(
        q_N_H_K, k_N_J_K, v_N_J_K, segments.queries, segments.keys, segments.max_queries, segments.max_keys, 0.0,
        segments.is_causal, False,
    )  # fmt: skip
    return out_N_H_K, lse_H_N


def flash_of_last(q_1_H_Q_K: Tensor, k_1_J_S_K: Tensor, v_1_J_S_K: Tensor) -> Tensor:
    """Returns causal attention of the last Q of S tokens."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q_1_H_Q_K, k_1_J_S_K, v_1_J_S_K, 0.0, True)[0]


def flash_backward(
    grad_N_H_K: Tensor,
    q_N_H_K: Tensor,
    k_N_J_K: Tensor,
    v_N_J_K: Tensor,
    out_N_H_K: Tensor,
    lse_H_N: Tensor,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of q, k and v."""
    state = torch.zeros(2, dtype=torch.uint64, device=q_N_H_K.device)  # of the dropout, which is 0
    return torch.ops.aten._flash_attention_backward(
        grad_N_H_K, q_N_H_K, k_N_J_K, v_N_J_K, out_N_H_K, lse_H_N, segments.queries, segments.keys,
        segments.max_queries, segments.max_keys, 0.0, segments.is_causal, state, torch.empty(0, device=state.device),
    )  # fmt: skip
