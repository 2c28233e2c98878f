"""`Sampler`: one token per row, and the log-probability with which it was drawn.

Noise is one uniform number per token, a hash of (seed, group id, rollout index, position in the response). It picks the
token by inverting the cumulative distribution, so what a rollout samples depends neither on the rows beside it nor on
the engine that runs it, up to the rounding of its logits.

The log-probability is natural and that of the distribution really sampled: logits / temperature, then top-k, then
top-p of what is left, then min-p, renormalized. A greedy row (temperature 0) takes the most likely token and gets its
log-probability at temperature 1, without truncation: that of the token actually drawn would be 0 and tell nothing.

What was left out is told by a cutoff: the candidates are the tokens that are at least as likely as the drawn one times
e^cutoff, and it lies halfway, in nats, between the least likely candidate and the most likely other token, so that a
trainer whose logits differ by less than half of that gap finds the same ones (`llamarl/training/logprobs.py`).

Shape suffixes: R rows (capacity), B rows of this step, V vocabulary, U truncated rows; C blocks of the vocabulary, S
tokens of one block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.kernels.ops import draw
from llamarl.types import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_BLOCK = 256
"""Tokens of a block of the vocabulary."""
_BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1."""


def _mix(x: int) -> int:
    """Output function of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits that passes BigCrush."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@lru_cache(maxsize=4096)  # a rollout joins once per turn
def noise_key(seed: int, group_id: int, index: int) -> int:
    """64 bits that start the noise of one rollout."""
    key = 0
    for part in (seed, group_id, index):
        key = _mix((key + _GOLDEN) & _MASK ^ (part & _MASK))
    return key


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """float32 [B] in [0, 1), multiples of 2^-24: draw number `position` of the splitmix64 stream of each key."""
    x = keys_B + (positions_B.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


class Drawn(NamedTuple):
    """One token for each row."""

    token_ids_B: np.ndarray
    """int64."""
    logprobs_B: np.ndarray
    """float32; NaN where a row's logits were not finite, and its token means nothing."""
    cutoffs_B: np.ndarray | None = None
    """float32, as in `llamarl.types.COLUMNS`; -inf where all tokens are candidates. None: they are for all rows."""


class SamplingRows:
    """Keys and parameters with which each row is drawn, as arrays."""

    def __init__(self, capacity: int) -> None:
        self.keys_R = np.zeros(capacity, np.uint64)
        self.params_R_4 = np.zeros((capacity, 4), np.float32)  # temperature, top-p, top-k, min-p

    def set(self, row: int, params: SamplingParams, key: int) -> None:
        self.keys_R[row] = key
        self.params_R_4[row] = (params.temperature, params.top_p, params.top_k, params.min_p)

    def move(self, source: int, target: int) -> None:
        self.keys_R[target] = self.keys_R[source]
        self.params_R_4[target] = self.params_R_4[source]


class Sampler:
    """Stateless but for the device that the logits are on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, logits_B_V: Tensor, rows: SamplingRows, positions_B: np.ndarray, settings_5_B: Tensor | None = None
    ) -> Drawn:
        """Draw one token per row.

        Args:
            settings_5_B: what `settings` gives, where it is on the device already.
        """
        params_B_4 = rows.params_R_4[: len(positions_B)]
        truncated_B, greedy = truncated(params_B_4), bool((params_B_4[:, 0] == 0).any())
        logits_B_V = logits_B_V.float()
        if settings_5_B is not None:
            return _draw(logits_B_V, settings_5_B, bool(truncated_B.any()), greedy)
        noise_B = uniforms(rows.keys_R[: len(positions_B)], positions_B)
        if truncated_B.all() or (drawn := draw(logits_B_V, params_B_4[:, 0], noise_B)) is None:
            return _draw(logits_B_V, self._tensor(settings(rows, positions_B)), bool(truncated_B.any()), greedy)
        token_ids_B, logprobs_B = drawn
        if not truncated_B.any():
            return Drawn(token_ids_B, logprobs_B)
        rows_U, cutoffs_B = np.flatnonzero(truncated_B), np.full(len(token_ids_B), -np.inf, np.float32)
        logits_U_V = logits_B_V.index_select(0, self._tensor(rows_U))
        settings_5_U = self._tensor(settings(rows, positions_B)[:, rows_U])
        token_ids_B[rows_U], logprobs_B[rows_U], cutoffs_B[rows_U] = _draw(logits_U_V, settings_5_U, True, False)
        return Drawn(token_ids_B, logprobs_B, cutoffs_B)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def settings(rows: SamplingRows, positions_B: np.ndarray) -> np.ndarray:
    """float32 [5, B]: noise, temperature, top-p, top-k and min-p of each row; greedy ones drop nothing."""
    params_B_4 = rows.params_R_4[: len(positions_B)]
    noise_B = uniforms(rows.keys_R[: len(positions_B)], positions_B)
    settings_5_B = np.concatenate((noise_B[None], params_B_4.T))
    settings_5_B[2:, ~truncated(params_B_4)] = np.array((1, 0, 0), np.float32)[:, None]
    return settings_5_B


def _draw(logits_B_V: Tensor, settings_5_B: Tensor, truncate_some: bool, greedy_some: bool) -> Drawn:
    """Tokens, drawn by torch; one wait for the device."""
    noise_B, temperature_B, *truncation = settings_5_B
    greedy_B = temperature_B == 0
    logits_B_V = logits_B_V / temperature_B.masked_fill(greedy_B, 1.0)[:, None]
    probs_B_V, least_B = torch.softmax(logits_B_V, dim=-1), None
    if truncate_some:
        probs_B_V, least_B = truncate(probs_B_V, *truncation)
    return unpacked(invert(logits_B_V, probs_B_V, noise_B, greedy_B if greedy_some else None, least_B))


def truncated(params_B_4: np.ndarray) -> np.ndarray:
    """Which rows sample from fewer than all tokens, bool [B]."""
    temperature_B, top_p_B, top_k_B, min_p_B = params_B_4.T
    return (temperature_B != 0) & ((top_p_B < 1) | (top_k_B > 0) | (min_p_B > 0))


def invert(
    logits_B_V: Tensor, probs_B_V: Tensor, noise_B: Tensor, greedy_B: Tensor | None, least_B: Tensor | None = None
) -> Tensor:
    """Tokens and the bits of their log-probabilities, int32 [B, 2], and of their cutoffs, [B, 3], if `least_B` is
    given: one copy to the host takes all.

    `greedy_B` says which rows take the most likely token; None: none does.
    """
    tokens_B_1, total_B_1 = (_by_blocks if probs_B_V.is_cuda else _searched)(probs_B_V, noise_B[:, None])
    tokens_B_1.clamp_(max=probs_B_V.shape[-1] - 1)  # rows that are not finite
    if greedy_B is not None:
        tokens_B_1 = torch.where(greedy_B[:, None], logits_B_V.argmax(dim=-1, keepdim=True), tokens_B_1)
    likely_B_1 = probs_B_V.gather(1, tokens_B_1)
    found = [(likely_B_1 / total_B_1).log_()]
    if least_B is not None:
        found.append(least_B[:, None] - likely_B_1.log())
    return torch.cat((tokens_B_1.int(), *(one_B_1.view(torch.int32) for one_B_1 in found)), dim=1)


def _searched(probs_B_V: Tensor, noise_B_1: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at such shares, below 1, of the sums of probabilities; and these sums, [B, 1]."""
    cumulative_B_V = probs_B_V.cumsum(dim=-1)
    total_B_1 = cumulative_B_V[:, -1:]
    # The product lies at least half a unit in the last place below the total and is never rounded up to it: the search
    # ends at a token with some probability.
    return torch.searchsorted(cumulative_B_V, noise_B_1 * total_B_1, right=True), total_B_1


def _by_blocks(probs_B_V: Tensor, noise_B_1: Tensor) -> tuple[Tensor, Tensor]:
    """`_searched`, up to rounding, for GPUs: the sum along a whole vocabulary takes one processor a row, those of its
    blocks take all."""
    probs_B_C_S = F.pad(probs_B_V, (0, -probs_B_V.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    ends_B_C = probs_B_C_S.sum(-1).cumsum(-1)
    total_B_1 = ends_B_C[:, -1:]
    wanted_B_1 = noise_B_1 * total_B_1
    block_B_1 = torch.searchsorted(ends_B_C, wanted_B_1, right=True).clamp_(max=ends_B_C.shape[1] - 1)
    start_B_1 = ends_B_C.gather(1, (block_B_1 - 1).clamp_min(0)).masked_fill_(block_B_1 == 0, 0.0)
    share_B_1 = (wanted_B_1 - start_B_1) / (ends_B_C.gather(1, block_B_1) - start_B_1)
    within_B_S = probs_B_C_S.gather(1, block_B_1[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    return block_B_1 * _BLOCK + _searched(within_B_S, share_B_1.clamp_max_(_BELOW_ONE))[0], total_B_1


def unpacked(packed_B_C: Tensor) -> Drawn:
    """The tensor that `invert` gave, on the host."""
    token_ids_B, *numbers = packed_B_C.cpu().numpy().T
    return Drawn(token_ids_B.astype(np.int64), *(np.ascontiguousarray(one_B).view(np.float32) for one_B in numbers))


def truncate(probs_U_V: Tensor, top_p_U: Tensor, top_k_U: Tensor, min_p_U: Tensor) -> tuple[Tensor, Tensor]:
    """Zero what top-k, then top-p of the rest, then min-p drop; not renormalized. The most likely token stays.

    Returns the probabilities, and the natural logarithm [U] of one between those that stay and those that do not, -inf
    where nothing goes that had any.

    top-k 0, top-p 1 and min-p 0 drop nothing. Of equally likely tokens, those with smaller ids stay.
    """
    sorted_U_V, order_U_V = probs_U_V.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_U_V.shape[-1], device=probs_U_V.device)
    keep_U_V = (ranks_V < top_k_U[:, None]) | (top_k_U[:, None] == 0)
    kept_U_V = sorted_U_V * keep_U_V
    cumulative_U_V = kept_U_V.cumsum(dim=-1)
    # A token stays while those before it have not reached top-p.
    before_U_V = cumulative_U_V - kept_U_V
    keep_U_V &= (before_U_V < top_p_U[:, None] * cumulative_U_V[:, -1:]) | (top_p_U[:, None] >= 1)
    keep_U_V &= sorted_U_V >= min_p_U[:, None] * sorted_U_V[:, :1]
    keep_U_V[:, 0] = True
    least_U, most_U = sorted_U_V.masked_fill(~keep_U_V, 1.0).amin(1), sorted_U_V.masked_fill(keep_U_V, 0.0).amax(1)
    between_U = (least_U.log() + most_U.log()) / 2
    return torch.zeros_like(probs_U_V).scatter_(1, order_U_V, sorted_U_V * keep_U_V), between_U
