"""Attention over packed groups: every response sees its group's prompt and itself, nothing else.

With context parallelism each rank computes the queries of its own rows and gathers all keys and values. Its rows are
two of 2 * ranks equal slices, one from the front and one from the back, as later queries see more keys.

Shape suffixes: N packed tokens, M this rank's rows of them, G responses of a group, Q longest part of a response among
the queries, T the same among the keys, P prompt tokens, H heads, J key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.distributed.mesh import ALONE, Axis
from llamarl.models.transformer import Attend
from llamarl.training.collectives import gather_rows


def own_rows(num_tokens: int, cp: Axis) -> list[range]:
    """The slices of the packed tokens that this rank computes; `num_tokens` is a multiple of 2 * ranks."""
    if cp.size == 1:
        return [range(num_tokens)]
    size = num_tokens // (2 * cp.size)
    return [range(part * size, (part + 1) * size) for part in (cp.rank, 2 * cp.size - 1 - cp.rank)]


def own_index(num_tokens: int, cp: Axis) -> Tensor:
    """The same as positions among the packed tokens, int64 [M]."""
    return torch.cat([torch.arange(rows.start, rows.stop) for rows in own_rows(num_tokens, cp)])


def shared_prefix_attend(
    prompt_lengths: tuple[int, ...],
    response_lengths: tuple[tuple[int, ...], ...],
    device: torch.device,
    cp: Axis = ALONE.cp,
) -> Attend:
    """Causal attention for the layout of `packing`: group after group, a prompt and then its responses.

    The responses of a group are padded to the longest of them for one batched call. Padding sits behind every valid
    query, so the causal mask alone keeps it out; its outputs are never read.
    """
    num_tokens = sum(prompt_lengths) + sum(map(sum, response_lengths))
    plans, num_before = list[_GroupPlan](), 0
    for rows in own_rows(num_tokens, cp):
        plans += _plans(prompt_lengths, response_lengths, rows, num_before, device)
        num_before += len(rows)
    ranks = [own_index(num_tokens, Axis(rank, cp.size)) for rank in range(cp.size)]
    packed_N = torch.cat(ranks).argsort().to(device)  # where each packed token is among the gathered ones

    def attend(_layer: int, q_M_H_K: Tensor, k_M_J_K: Tensor, v_M_J_K: Tensor) -> Tensor:
        k_N_J_K, v_N_J_K = k_M_J_K, v_M_J_K
        if cp.size > 1:
            kv_N_J_2K = gather_rows(torch.cat((k_M_J_K, v_M_J_K), -1), cp).index_select(0, packed_N)
            k_N_J_K, v_N_J_K = kv_N_J_2K.chunk(2, -1)
        outputs = list[Tensor]()
        for plan in plans:
            outputs += plan.attend(q_M_H_K, k_N_J_K, v_N_J_K)
        return torch.cat(outputs)

    return attend


class _GroupPlan:
    """Where one group's tokens lie, which of its queries are among some rows, and what these see."""

    def __init__(
        self, start: int, prompt: int, responses: tuple[int, ...], rows: range, num_before: int, device: torch.device
    ) -> None:
        """
        Args:
            rows: a slice of the packed tokens.
            num_before: queries that this rank has before it.
        """
        shift = num_before - rows.start
        first, last = max(rows.start, start), min(rows.stop, start + prompt)
        self.num_prompt_queries = max(0, last - first)
        self.prompt_queries = slice(first + shift, last + shift)
        self.prompt, self.seen = slice(start, start + prompt), last - start
        self.mask_P_P = None
        if self.num_prompt_queries and first > start:
            self.mask_P_P = torch.ones(last - first, last - start, dtype=torch.bool, device=device).tril(first - start)
        begins = (torch.tensor([0, *responses[:-1]]).cumsum(0) + start + prompt).tolist() if responses else []
        parts = [
            (begin, max(rows.start - begin, 0), min(rows.stop - begin, length))
            for begin, length in zip(begins, responses, strict=True)
        ]
        parts = [part for part in parts if part[2] > part[1]]
        self.num_responses = len(parts)
        if parts:
            self._plan_responses(torch.tensor(parts), shift, prompt, device)

    def _plan_responses(self, parts_G_3: Tensor, shift: int, prompt: int, device: torch.device) -> None:
        """Queries are the tokens from low to high of each response, which begins somewhere, keys those up to high."""
        begins_G, lows_G, highs_G = parts_G_3.unbind(1)
        queries_Q, keys_T = torch.arange(int((highs_G - lows_G).max())), torch.arange(int(highs_G.max()))
        valid_G_Q = queries_Q < (highs_G - lows_G)[:, None]
        # Padding reads the response's own first row (any finite row would do).
        queries_G_Q = (begins_G + lows_G + shift)[:, None] + queries_Q.where(valid_G_Q, 0)
        keys_G_T = begins_G[:, None] + keys_T.where(keys_T < highs_G[:, None], 0)
        sees_G_1_Q_T = keys_T <= (lows_G[:, None] + queries_Q)[:, None, :, None]
        self.queries, self.keys = queries_G_Q.flatten().to(device), keys_G_T.flatten().to(device)
        self.valid = valid_G_Q.flatten().nonzero().squeeze(1).to(device)
        if not lows_G.any():
            sees_G_1_Q_T = sees_G_1_Q_T[:1]
        self.mask_G_1_Q_S = F.pad(sees_G_1_Q_T, (prompt, 0), value=True).to(device)

    def attend(self, q_M_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> list[Tensor]:
        outputs, rep = list[Tensor](), q_M_H_K.shape[1] // k_N_J_K.shape[1]
        k_P, v_P = (x[self.prompt].transpose(0, 1)[None].repeat_interleave(rep, 1) for x in (k_N_J_K, v_N_J_K))
        if self.num_prompt_queries:
            q_P = q_M_H_K[self.prompt_queries].transpose(0, 1)[None]
            k, v, mask = k_P[:, :, : self.seen], v_P[:, :, : self.seen], self.mask_P_P
            out_P = F.scaled_dot_product_attention(q_P, k, v, attn_mask=mask, is_causal=mask is None)
            outputs.append(out_P[0].transpose(0, 1))
        if G := self.num_responses:
            q_G, k_G, v_G = (
                x.index_select(0, index).unflatten(0, (G, -1)).transpose(1, 2)
                for x, index in ((q_M_H_K, self.queries), (k_N_J_K, self.keys), (v_N_J_K, self.keys))
            )
            k_G = torch.cat((k_P.expand(G, -1, -1, -1), k_G.repeat_interleave(rep, 1)), 2)
            v_G = torch.cat((v_P.expand(G, -1, -1, -1), v_G.repeat_interleave(rep, 1)), 2)
            out_G = F.scaled_dot_product_attention(q_G, k_G, v_G, attn_mask=self.mask_G_1_Q_S)
            outputs.append(out_G.transpose(1, 2).flatten(0, 1).index_select(0, self.valid))
        return outputs


def _plans(
    prompt_lengths: tuple[int, ...],
    response_lengths: tuple[tuple[int, ...], ...],
    rows: range,
    num_before: int,
    device: torch.device,
) -> Iterator[_GroupPlan]:
    """Of the groups that have tokens among `rows`."""
    start = 0
    for prompt, responses in zip(prompt_lengths, response_lengths, strict=True):
        stop = start + prompt + sum(responses)
        if start < rows.stop and rows.start < stop:
            yield _GroupPlan(start, prompt, responses, rows, num_before, device)
        start = stop
