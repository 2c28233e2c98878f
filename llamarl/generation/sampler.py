"""`Sampler`: one token per row, and the log-probability with which it was drawn.

Noise is one uniform number per token, a hash of (seed, group id, rollout index, position in the response). It picks the
token by inverting the cumulative distribution, so what a rollout samples depends neither on the rows beside it nor on
the engine that runs it, up to the rounding of its logits.

The log-probability is natural and that of the distribution really sampled: logits / temperature, then top-k, then
top-p of what is left, then min-p, renormalized. A greedy row (temperature 0) takes the most likely token and gets its
log-probability at temperature 1, without truncation: that of the token actually drawn would be 0 and tell nothing.

Shape suffixes: R rows (capacity), B rows of this step, V vocabulary, U truncated rows.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from llamarl.kernels.ops import draw
from llamarl.types import SamplingParams

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


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
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw one token per row.

        Args:
            settings_5_B: what `settings` gives, where it is on the device already.

        Returns:
            Token ids, int64 [B], and log-probabilities, float32 [B]; NaN where a row's logits were not finite (and its
            token means nothing).
        """
        params_B_4 = rows.params_R_4[: len(positions_B)]
        truncated_B, greedy = truncated(params_B_4), bool((params_B_4[:, 0] == 0).any())
        logits_B_V = logits_B_V.float()
        if settings_5_B is not None:
            return _draw(logits_B_V, settings_5_B, bool(truncated_B.any()), greedy)
        noise_B = uniforms(rows.keys_R[: len(positions_B)], positions_B)
        if truncated_B.all() or (drawn := draw(logits_B_V, params_B_4[:, 0], noise_B)) is None:
            return _draw(logits_B_V, self._tensor(settings(rows, positions_B)), bool(truncated_B.any()), greedy)
        if truncated_B.any():
            rows_U = np.flatnonzero(truncated_B)
            logits_U_V = logits_B_V.index_select(0, self._tensor(rows_U))
            settings_5_U = self._tensor(settings(rows, positions_B)[:, rows_U])
            drawn[0][rows_U], drawn[1][rows_U] = _draw(logits_U_V, settings_5_U, True, False)
        return drawn

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def settings(rows: SamplingRows, positions_B: np.ndarray) -> np.ndarray:
    """float32 [5, B]: noise, temperature, top-p, top-k and min-p of each row; greedy ones drop nothing."""
    params_B_4 = rows.params_R_4[: len(positions_B)]
    noise_B = uniforms(rows.keys_R[: len(positions_B)], positions_B)
    settings_5_B = np.concatenate((noise_B[None], params_B_4.T))
    settings_5_B[2:, ~truncated(params_B_4)] = np.array((1, 0, 0), np.float32)[:, None]
    return settings_5_B


def _draw(
    logits_B_V: Tensor, settings_5_B: Tensor, truncate_some: bool, greedy_some: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their log-probabilities, drawn by torch; one wait for the device."""
    noise_B, temperature_B, *truncation = settings_5_B
    greedy_B = temperature_B == 0
    logits_B_V = logits_B_V / temperature_B.masked_fill(greedy_B, 1.0)[:, None]
    probs_B_V = torch.softmax(logits_B_V, dim=-1)
    if truncate_some:
        probs_B_V = truncate(probs_B_V, *truncation)
    return unpacked(invert(logits_B_V, probs_B_V, noise_B, greedy_B if greedy_some else None))


def truncated(params_B_4: np.ndarray) -> np.ndarray:
    """Which rows sample from fewer than all tokens, bool [B]."""
    temperature_B, top_p_B, top_k_B, min_p_B = params_B_4.T
    return (temperature_B != 0) & ((top_p_B < 1) | (top_k_B > 0) | (min_p_B > 0))


def invert(logits_B_V: Tensor, probs_B_V: Tensor, noise_B: Tensor, greedy_B: Tensor | None) -> Tensor:
    """Tokens and the bits of their log-probabilities, int32 [B, 2]: one copy to the host takes both.

    `greedy_B` says which rows take the most likely token; None: none does.
    """
    cumulative_B_V = probs_B_V.cumsum(dim=-1)
    total_B_1 = cumulative_B_V[:, -1:]
    # Noise is at most 1 - 2^-24, so the product lies at least half a unit in the last place below the total and is
    # never rounded up to it: the search ends at a token with some probability.
    tokens_B_1 = torch.searchsorted(cumulative_B_V, noise_B[:, None] * total_B_1, right=True)
    tokens_B_1.clamp_(max=probs_B_V.shape[-1] - 1)  # rows that are not finite
    if greedy_B is not None:
        tokens_B_1 = torch.where(greedy_B[:, None], logits_B_V.argmax(dim=-1, keepdim=True), tokens_B_1)
    logprobs_B_1 = (probs_B_V.gather(1, tokens_B_1) / total_B_1).log_()
    return torch.cat((tokens_B_1.int(), logprobs_B_1.view(torch.int32)), dim=1)


def unpacked(packed_B_2: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities that `invert` gave, on the host: int64 [B] and float32 [B]."""
    array_B_2 = packed_B_2.cpu().numpy()
    return array_B_2[:, 0].astype(np.int64), np.ascontiguousarray(array_B_2[:, 1]).view(np.float32)


def truncate(probs_U_V: Tensor, top_p_U: Tensor, top_k_U: Tensor, min_p_U: Tensor) -> Tensor:
    """Zero what top-k, then top-p of the rest, then min-p drop; not renormalized. The most likely token stays.

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
    return torch.zeros_like(probs_U_V).scatter_(1, order_U_V, sorted_U_V * keep_U_V)
