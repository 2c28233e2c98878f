"""Reference attention over packed documents.

Shape suffixes: N packed tokens, H query heads, J kv heads, K head dim, T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.models.transformer import Attend


def causal_attend(lengths: Sequence[int]) -> Attend:
    """Causal attention inside each of the documents that lie one after the other, `lengths` tokens each."""
    lengths = list(lengths)

    def attend(_layer: int, q_N_H_K: Tensor, k_N_J_K: Tensor, v_N_J_K: Tensor) -> Tensor:
        documents = zip(*(x.split(lengths) for x in (q_N_H_K, k_N_J_K, v_N_J_K)), strict=True)
        return torch.cat([_attend_one(q, k, v) for q, k, v in documents])

    return attend


def _attend_one(q_T_H_K: Tensor, k_T_J_K: Tensor, v_T_J_K: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_T_H_K, k_T_J_K, v_T_J_K))
    grouped = q.shape[1] != k.shape[1]
    out_1_H_T_K = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out_1_H_T_K.squeeze(0).transpose(0, 1)
