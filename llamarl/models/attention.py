"""Attention over packed documents, or groups of them: every response sees its group's prompt and itself, nothing else.

With context parallelism each rank computes the queries of its rows and gathers all keys and values. Its rows are two of
2 * ranks equal slices, one from the front and one from the back, as later queries see more keys.

Shape suffixes: N packed tokens, M this rank's rows of them, S tokens of a group, G its responses, Q queries of a group
(of responses: the longest part), T the longest part of a response among the keys, P prompt tokens, H heads, J key/value
heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.distributed.mesh import ALONE, CPU, Axis, gather_rows
from llamarl.kernels import train_attention
from llamarl.models.delta_rule import Branches, Packed, Recur
from llamarl.models.flash_attention import FlashAttend, FlashSlices, can_serve
from llamarl.models.transformer import Attend


def own_rows(num_tokens: int, cp: Axis) -> list[range]:
    """Returns the slices of the packed tokens that this rank computes. `num_tokens` is a multiple of 2 * ranks."""
    if cp.size == 1:
        return [range(num_tokens)]
    size = num_tokens // (2 * cp.size)
    return [range(part * size, (part + 1) * size) for part in (cp.rank, 2 * cp.size - 1 - cp.rank)]


def own_index(num_tokens: int, cp: Axis) -> Tensor:
    """Returns `own_rows` as positions among the packed tokens, int64 [M]."""
    return torch.cat([torch.arange(rows.start, rows.stop) for rows in own_rows(num_tokens, cp)])


def causal_attend(lengths: Sequence[int]) -> PackedAttend:
    """Returns causal attention inside each of several consecutive documents of these lengths."""
    return packed_attend(lengths, [()] * len(lengths))


def packed_attend(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[tuple[int, ...]],
    device: torch.device = CPU,
    cp: Axis = ALONE.cp,
    *,
    fused: bool = False,
    shared: int = 0,
) -> PackedAttend:
    """Returns causal attention for group after group, a prompt and then its responses. Uses flash attention in bfloat16
    on GPUs.

    Elsewhere the responses of a group are padded to the longest of them for one batched call. Padding comes after every
    valid query, so the causal mask excludes it, and its outputs are never read. A prompt and its only response are one
    causal document: one call without a mask or copies, which takes half of the time for many short ones.

    Args:
        device: for masks and indices. Documents without responses need none, except with context parallelism.
        fused: whether a kernel of this package computes float32 on CPUs. Its bits differ from torch's.
        shared: number of first tokens that every prompt continues. If the kernel cannot serve, torch computes them by
            one mask over all tokens. 0 with context ranks.
    """
    assert not shared or cp.size == 1, "context ranks share no beginnings"

    @cache
    def masked() -> Attend:
        if shared:
            return _whole_attend(train_attention.mask(segments()).to(device))
        return _masked_attend(prompt_lengths, response_lengths, device, cp)

    @cache
    def segments() -> np.ndarray:
        return train_attention.segments(prompt_lengths, response_lengths, shared)

    @cache
    def flash(where: torch.device) -> Attend:
        if cp.size > 1:
            return _flash_slices(prompt_lengths, response_lengths, where, cp)
        return FlashAttend(prompt_lengths, response_lengths, where)

    def attend(layer: int, q_M_H_K: Tensor, k_M_J_K: Tensor, v_M_J_K: Tensor) -> Tensor:
        if not shared and can_serve(v_M_J_K.device, v_M_J_K.dtype, v_M_J_K.shape[-1]):
            q_M_H_K, k_M_J_K = q_M_H_K.to(v_M_J_K.dtype), k_M_J_K.to(v_M_J_K.dtype)  # rotation may have widened them
            return flash(v_M_J_K.device)(layer, q_M_H_K, k_M_J_K, v_M_J_K)
        if fused and cp.size == 1 and train_attention.can_serve(q_M_H_K, k_M_J_K, v_M_J_K):
            return train_attention.attend(q_M_H_K, k_M_J_K, v_M_J_K, segments())
        return masked()(layer, q_M_H_K, k_M_J_K, v_M_J_K)

    num_tokens = shared + sum(prompt_lengths) + sum(map(sum, response_lengths))

    def branches() -> Branches:
        return Branches.of_groups(prompt_lengths, response_lengths, shared)

    return PackedAttend(attend, Packed(branches, num_tokens, device, fused))


class PackedAttend:
    """Attention of packed documents, and the recurrent part of delta nets over the same documents."""

    def __init__(self, attend: Attend, recur: Packed) -> None:
        self.recur: Recur = recur
        self._attend, self._packed = attend, recur

    def in_recurrent_form(self) -> PackedAttend:
        """Returns the same with delta nets in the form of generators, which has no gradients."""
        found = PackedAttend(self._attend, self._packed)
        found.recur = self._packed.recurrent_form()
        return found

    def __call__(self, place: int, q_M_H_K: Tensor, k_M_J_K: Tensor, v_M_J_K: Tensor) -> Tensor:
        return self._attend(place, q_M_H_K, k_M_J_K, v_M_J_K)


def _whole_attend(sees_N_N: Tensor) -> Attend:
    def attend(_layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        rep = q_N_H_K.shape[1] // k_N_J_K.shape[1]
        k_H_N_K, v_H_N_K = (x.transpose(0, 1).repeat_interleave(rep, 0) for x in (k_N_J_K, v_N_J_K))
        out_H_N_K = F.scaled_dot_product_attention(q_N_H_K.transpose(0, 1), k_H_N_K, v_H_N_K, attn_mask=sees_N_N)
        return out_H_N_K.transpose(0, 1)

    return attend


def _flash_slices(
    prompt_lengths: Sequence[int], response_lengths: Sequence[tuple[int, ...]], device: torch.device, cp: Axis
) -> Attend:
    """Returns attention of a context rank's rows by flash attention, to the gathered keys of all ranks."""
    num_tokens = sum(prompt_lengths) + sum(map(sum, response_lengths))
    computed = FlashSlices(prompt_lengths, response_lengths, own_rows(num_tokens, cp), device)
    packed_N = _packed_index(num_tokens, cp).to(device, non_blocking=True)

    def attend(layer: int, q_M_H_K: Tensor, k_M_J_K: Tensor, v_M_J_K: Tensor) -> Tensor:
        kv_N_J_2K = gather_rows(torch.cat((k_M_J_K, v_M_J_K), -1), cp).index_select(0, packed_N)
        return computed(layer, q_M_H_K, *kv_N_J_2K.chunk(2, -1))

    return attend


def _packed_index(num_tokens: int, cp: Axis) -> Tensor:
    """Returns the index of each packed token among the gathered ones."""
    return torch.cat([own_index(num_tokens, Axis(rank, cp.size)) for rank in range(cp.size)]).argsort()


def _masked_attend(
    prompt_lengths: Sequence[int], response_lengths: Sequence[tuple[int, ...]], device: torch.device, cp: Axis
) -> Attend:
    """Returns attention by torch's scaled dot product, group by group: for context ranks, and if no kernel serves."""
    groups = [
        (prompt + sum(responses), ()) if len(responses) == 1 else (prompt, responses)
        for prompt, responses in zip(prompt_lengths, response_lengths, strict=True)
    ]
    sizes = [prompt + sum(responses) for prompt, responses in groups]
    starts = [0, *accumulate(sizes)]
    plans = [
        (index, _GroupPlan(*groups[index], overlap, device))
        for rows in own_rows(starts[-1], cp)
        for index, size in enumerate(sizes)
        if (overlap := range(max(rows.start - starts[index], 0), min(rows.stop - starts[index], size)))
    ]
    num_queries = [len(plan.rows) for _, plan in plans]
    packed_N = _packed_index(starts[-1], cp).to(device, non_blocking=True)

    def attend(_layer: int, q_M_H_K: Tensor, k_M_J_K: Tensor, v_M_J_K: Tensor) -> Tensor:
        k_N_J_K, v_N_J_K = k_M_J_K, v_M_J_K
        if cp.size > 1:
            kv_N_J_2K = gather_rows(torch.cat((k_M_J_K, v_M_J_K), -1), cp).index_select(0, packed_N)
            k_N_J_K, v_N_J_K = kv_N_J_2K.chunk(2, -1)
        # Split, not sliced: the gradient of each slice would be as large as the whole.
        keys, values, outputs = k_N_J_K.split(sizes), v_N_J_K.split(sizes), list[Tensor]()
        for (index, plan), q in zip(plans, q_M_H_K.split(num_queries), strict=True):
            outputs += plan.attend(q, keys[index], values[index])
        return torch.cat(outputs)

    return attend


class _GroupPlan:
    """The queries among one group's tokens, and the keys that they see. Positions count from the group's first
    token."""

    def __init__(self, prompt: int, responses: tuple[int, ...], rows: range, device: torch.device) -> None:
        """
        Args:
            rows: the queries.
        """
        self.prompt, self.rows = prompt, rows
        self.seen = min(rows.stop, prompt)
        self.num_prompt_queries = max(0, self.seen - rows.start)
        self.mask_P_P = None
        if self.num_prompt_queries and rows.start:
            sees_P_P = torch.ones(self.num_prompt_queries, self.seen, dtype=torch.bool, device=device)
            self.mask_P_P = sees_P_P.tril(rows.start)
        begins = [prompt + before for before in accumulate((0, *responses[:-1]))]
        parts = [
            (begin, max(rows.start - begin, 0), min(rows.stop - begin, length))
            for begin, length in zip(begins, responses, strict=False)
        ]
        parts = [part for part in parts if part[2] > part[1]]
        self.num_responses = len(parts)
        if parts:
            self._plan_responses(torch.tensor(parts), device)

    def _plan_responses(self, parts_G_3: Tensor, device: torch.device) -> None:
        """Plans the queries, tokens low to high of each response that begins at `begin`, and their keys, up to high."""
        begins_G, lows_G, highs_G = parts_G_3.unbind(1)
        queries_Q, keys_T = torch.arange(int((highs_G - lows_G).max())), torch.arange(int(highs_G.max()))
        valid_G_Q = queries_Q < (highs_G - lows_G)[:, None]
        # Padding reads the first row of its response. Any finite row would do.
        queries_G_Q = (begins_G + lows_G - self.rows.start)[:, None] + queries_Q.where(valid_G_Q, 0)
        keys_G_T = begins_G[:, None] + keys_T.where(keys_T < highs_G[:, None], 0)
        sees_G_1_Q_T = keys_T <= (lows_G[:, None] + queries_Q)[:, None, :, None]
        index = queries_G_Q.flatten(), keys_G_T.flatten(), valid_G_Q.flatten().nonzero().squeeze(1)
        self.queries, self.keys, self.valid = (rows.to(device, non_blocking=True) for rows in index)
        if not lows_G.any():
            sees_G_1_Q_T = sees_G_1_Q_T[:1]
        self.mask_G_1_Q_S = F.pad(sees_G_1_Q_T, (self.prompt, 0), value=True).to(device, non_blocking=True)

    def attend(self, q_Q_H_K: Tensor, k_S_J_K: Tensor, v_S_J_K: Tensor) -> list[Tensor]:
        """Returns outputs of the group's queries in order, from all of its keys."""
        outputs, rep = list[Tensor](), q_Q_H_K.shape[1] // k_S_J_K.shape[1]
        k_P, v_P = (x[: self.prompt].transpose(0, 1)[None].repeat_interleave(rep, 1) for x in (k_S_J_K, v_S_J_K))
        if self.num_prompt_queries:
            q_P = q_Q_H_K[: self.num_prompt_queries].transpose(0, 1)[None]
            k, v, mask = k_P[:, :, : self.seen], v_P[:, :, : self.seen], self.mask_P_P
            out_P = F.scaled_dot_product_attention(q_P, k, v, attn_mask=mask, is_causal=mask is None)
            outputs.append(out_P[0].transpose(0, 1))
        if G := self.num_responses:
            q_G, k_G, v_G = (
                x.index_select(0, index).unflatten(0, (G, -1)).transpose(1, 2)
                for x, index in ((q_Q_H_K, self.queries), (k_S_J_K, self.keys), (v_S_J_K, self.keys))
            )
            k_G = torch.cat((k_P.expand(G, -1, -1, -1), k_G.repeat_interleave(rep, 1)), 2)
            v_G = torch.cat((v_P.expand(G, -1, -1, -1), v_G.repeat_interleave(rep, 1)), 2)
            out_G = F.scaled_dot_product_attention(q_G, k_G, v_G, attn_mask=self.mask_G_1_Q_S)
            outputs.append(out_G.transpose(1, 2).flatten(0, 1).index_select(0, self.valid))
        return outputs
