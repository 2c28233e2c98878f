"""Attention over packed groups: every response sees its group's prompt and itself, nothing else.

Shape suffixes: N packed tokens, G responses of a group, T longest response, P prompt tokens, H heads, J key/value
heads, K head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.transformer import Attend


def shared_prefix_attend(
    prompt_lengths: tuple[int, ...], response_lengths: tuple[tuple[int, ...], ...], device: torch.device
) -> Attend:
    """Causal attention for the layout of `rollouts.packing`: group after group, a prompt and then its responses.

    The responses of a group are padded to the longest of them for one batched call. Padding sits behind every valid
    query, so the causal mask alone keeps it out; its outputs are never read.
    """
    plans = _plan(prompt_lengths, response_lengths, device)

    def attend(_layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        outputs = list[Tensor]()
        for plan in plans:
            outputs += plan.attend(q_N_H_K, k_N_J_K, v_N_J_K)
        return torch.cat(outputs)

    return attend


class _GroupPlan:
    """Where one group's tokens lie, and the mask of its responses."""

    def __init__(self, start: int, prompt: int, responses: tuple[int, ...], device: torch.device) -> None:
        self.prompt = slice(start, start + prompt)
        self.num_prompt = prompt
        self.lengths = responses
        self.longest = longest = max(responses)
        if longest == 0:
            return
        begins = torch.tensor([0, *responses[:-1]]).cumsum(0) + start + prompt
        offsets_T = torch.arange(longest)
        lengths_G = torch.tensor(responses)
        # Padding reads the response's own first row (any finite row would do).
        index_G_T = begins[:, None] + torch.where(offsets_T < lengths_G[:, None], offsets_T, 0)
        self.rows = index_G_T.clamp(max=start + prompt + sum(responses) - 1).flatten().to(device)
        self.valid = (offsets_T < lengths_G[:, None]).flatten().nonzero().squeeze(1).to(device)
        self.mask_T_S = torch.ones(longest, prompt + longest, dtype=torch.bool, device=device).tril(prompt)

    def attend(self, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> list[Tensor]:
        q_P, k_P, v_P = (x[self.prompt].transpose(0, 1)[None] for x in (q_N_H_K, k_N_J_K, v_N_J_K))
        rep = q_P.shape[1] // k_P.shape[1]
        k_P, v_P = k_P.repeat_interleave(rep, 1), v_P.repeat_interleave(rep, 1)
        out_P = F.scaled_dot_product_attention(q_P, k_P, v_P, is_causal=True)
        outputs = [out_P[0].transpose(0, 1)]
        if self.longest:
            G = len(self.lengths)
            q_G, k_G, v_G = (
                x.index_select(0, self.rows).unflatten(0, (G, self.longest)).transpose(1, 2)
                for x in (q_N_H_K, k_N_J_K, v_N_J_K)
            )
            k_G = torch.cat((k_P.expand(G, -1, -1, -1), k_G.repeat_interleave(rep, 1)), 2)
            v_G = torch.cat((v_P.expand(G, -1, -1, -1), v_G.repeat_interleave(rep, 1)), 2)
            out_G = F.scaled_dot_product_attention(q_G, k_G, v_G, attn_mask=self.mask_T_S)
            outputs.append(out_G.transpose(1, 2).flatten(0, 1).index_select(0, self.valid))
        return outputs


def _plan(
    prompt_lengths: tuple[int, ...], response_lengths: tuple[tuple[int, ...], ...], device: torch.device
) -> list[_GroupPlan]:
    plans, start = list[_GroupPlan](), 0
    for prompt, responses in zip(prompt_lengths, response_lengths, strict=True):
        plans.append(_GroupPlan(start, prompt, responses, device))
        start += prompt + sum(responses)
    return plans
