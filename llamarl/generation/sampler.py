"""`Sampler` draws one token per row, with the log-probability of the draw. `score` computes that of given tokens.

Noise is one uniform number per token: a hash of (seed, group id, rollout index, position in the response). It picks the
token by inverting the cumulative distribution. So the tokens of a rollout depend neither on the other rows nor on the
engine, up to the rounding of its logits.

The log-probability is natural, of the distribution that was sampled: logits / temperature, then top-k, then top-p of
the rest, then min-p, renormalized. A greedy row (temperature 0) takes the most likely token and gets its
log-probability at temperature 1, without truncation: that of the distribution really used would always be 0.

A cutoff describes the truncation: the candidates are the tokens that are at least as likely as the drawn one times
e^cutoff. It is halfway, in nats, between the least likely candidate and the most likely other token, so a trainer whose
logits differ by less than half of that gap finds the same candidates (`llamarl/training/policy.py`).

`score` computes without the KV cache.

Shape suffixes: R rows (capacity), B rows of this step, V vocabulary, U truncated rows; T tokens of one sequence, N
packed tokens, D model dim; C blocks of the vocabulary, or tokens of one chunk; S tokens of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.batches import batches
from llamarl.generation.backend import EngineModel, unknown_id
from llamarl.kernels import gpu
from llamarl.kernels.linear import exactly
from llamarl.kernels.ops import draw
from llamarl.models.attention import causal_attend, packed_attend
from llamarl.models.transformer import Attend
from llamarl.types import CandidateSets, SamplingParams

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
    """Returns 64 bits that start the noise of one rollout."""
    key = 0
    for part in (seed, group_id, index):
        key = _mix((key + _GOLDEN) & _MASK ^ (part & _MASK))
    return key


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Returns float32 [B] in [0, 1), multiples of 2^-24: draw number `position` of the splitmix64 stream of each
    key."""
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
    """float32. NaN means that a row's logits were not finite and its token is meaningless."""
    cutoffs_B: np.ndarray | None = None
    """float32, as in `llamarl.types.COLUMNS`; -inf means that all tokens are candidates. None means -inf for all
    rows."""


class SamplingRows:
    """Keys and sampling parameters of each row, as arrays."""

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
    """Stateless, except for the device of the logits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, logits_B_V: Tensor, rows: SamplingRows, positions_B: np.ndarray, settings_5_B: Tensor | None = None
    ) -> Drawn:
        """Draws one token per row.

        Args:
            settings_5_B: the result of `settings`, if it is on the device already.
        """
        if settings_5_B is not None:
            return unpacked(self.launch(logits_B_V, rows, settings_5_B))
        params_B_4 = rows.params_R_4[: len(positions_B)]
        truncated_B, greedy = truncated(params_B_4), bool((params_B_4[:, 0] == 0).any())
        logits_B_V, noise_B = logits_B_V.float(), uniforms(rows.keys_R[: len(positions_B)], positions_B)
        if truncated_B.all() or (drawn := draw(logits_B_V, params_B_4[:, 0], noise_B)) is None:
            settings_5_B = self._tensor(settings(rows, positions_B))
            return unpacked(draw_on_device(logits_B_V, settings_5_B, bool(truncated_B.any()), greedy))
        token_ids_B, logprobs_B = drawn
        if not truncated_B.any():
            return Drawn(token_ids_B, logprobs_B)
        rows_U, cutoffs_B = np.flatnonzero(truncated_B), np.full(len(token_ids_B), -np.inf, np.float32)
        logits_U_V = logits_B_V.index_select(0, self._tensor(rows_U))
        settings_5_U = self._tensor(settings(rows, positions_B)[:, rows_U])
        drawn_U = unpacked(draw_on_device(logits_U_V, settings_5_U, True, False))
        token_ids_B[rows_U], logprobs_B[rows_U], cutoffs_B[rows_U] = drawn_U
        return Drawn(token_ids_B, logprobs_B, cutoffs_B)

    def launch(self, logits_B_V: Tensor, rows: SamplingRows, settings_5_B: Tensor) -> Tensor:
        """Draws one token per row without waiting for the device. Returns the tensor of `invert`, there."""
        params_B_4 = rows.params_R_4[: len(logits_B_V)]
        greedy = bool((params_B_4[:, 0] == 0).any())
        return draw_on_device(logits_B_V.float(), settings_5_B, bool(truncated(params_B_4).any()), greedy)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def settings(rows: SamplingRows, positions_B: np.ndarray) -> np.ndarray:
    """Returns float32 [5, B]: noise, temperature, top-p, top-k and min-p of each row. Greedy rows truncate nothing."""
    params_B_4 = rows.params_R_4[: len(positions_B)]
    noise_B = uniforms(rows.keys_R[: len(positions_B)], positions_B)
    settings_5_B = np.concatenate((noise_B[None], params_B_4.T))
    settings_5_B[2:, ~truncated(params_B_4)] = np.array((1, 0, 0), np.float32)[:, None]
    return settings_5_B


def draw_on_device(
    logits_B_V: Tensor,
    settings_5_B: Tensor,
    truncate_some: bool,
    greedy_some: bool,
    fed_R: Tensor | None = None,
) -> Tensor:
    """Draws tokens without waiting for the device. Returns the tensor of `invert`.

    Args:
        settings_5_B: the result of `settings`, on the device.
        fed_R: gets the tokens too.
    """
    noise_B, temperature_B, *truncation = settings_5_B
    if not truncate_some and (kernels := gpu.kernel("sample", logits_B_V.device)):
        return kernels.draw(logits_B_V, noise_B, temperature_B, fed_R)
    greedy_B = temperature_B == 0
    logits_B_V = logits_B_V / temperature_B.masked_fill(greedy_B, 1.0)[:, None]
    probs_B_V, least_B = torch.softmax(logits_B_V, dim=-1), None
    if truncate_some:
        probs_B_V, least_B = truncate(probs_B_V, *truncation)
    drawn_B_C = invert(logits_B_V, probs_B_V, noise_B, greedy_B if greedy_some else None, least_B)
    if fed_R is not None:
        fed_R[: len(drawn_B_C)].copy_(drawn_B_C[:, 0])
    return drawn_B_C


def truncated(params_B_4: np.ndarray) -> np.ndarray:
    """Returns which rows sample from fewer than all tokens, bool [B]."""
    temperature_B, top_p_B, top_k_B, min_p_B = params_B_4.T
    return (temperature_B != 0) & ((top_p_B < 1) | (top_k_B > 0) | (min_p_B > 0))


def invert(
    logits_B_V: Tensor, probs_B_V: Tensor, noise_B: Tensor, greedy_B: Tensor | None, least_B: Tensor | None = None
) -> Tensor:
    """Returns tokens and the bits of their log-probabilities, int32 [B, 2], and of their cutoffs, [B, 3], if there is
    `least_B`. One tensor, for a single copy to the host.

    Args:
        greedy_B: rows that take the most likely token; None means none.
    """
    tokens_B_1, total_B_1 = (_by_blocks if probs_B_V.is_cuda else _searched)(probs_B_V, noise_B[:, None])
    tokens_B_1.clamp_(max=probs_B_V.shape[-1] - 1)  # rows that are not finite
    if greedy_B is not None:
        tokens_B_1 = torch.where(greedy_B[:, None], logits_B_V.argmax(dim=-1, keepdim=True), tokens_B_1)
    likely_B_1 = probs_B_V.gather(1, tokens_B_1)
    numbers = [(likely_B_1 / total_B_1).log_()]
    if least_B is not None:
        numbers.append(least_B[:, None] - likely_B_1.log())
    return torch.cat((tokens_B_1.int(), *(number_B_1.view(torch.int32) for number_B_1 in numbers)), dim=1)


def _searched(probs_B_V: Tensor, noise_B_1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens at these shares, below 1, of the sums of probabilities, and the sums, [B, 1]."""
    cumulative_B_V = probs_B_V.cumsum(dim=-1)
    total_B_1 = cumulative_B_V[:, -1:]
    # The product is at least half a unit in the last place below the total and is never rounded up to it. So the search
    # ends at a token with a probability above 0.
    return torch.searchsorted(cumulative_B_V, noise_B_1 * total_B_1, right=True), total_B_1


def _by_blocks(probs_B_V: Tensor, noise_B_1: Tensor) -> tuple[Tensor, Tensor]:
    """Does the same as `_searched`, up to rounding, for GPUs. A sum along a whole vocabulary occupies one processor per
    row; sums of blocks occupy all."""
    if missing := -probs_B_V.shape[1] % _BLOCK:  # padding copies even where it adds nothing
        probs_B_V = F.pad(probs_B_V, (0, missing))
    probs_B_C_S = probs_B_V.unflatten(1, (-1, _BLOCK))
    ends_B_C = probs_B_C_S.sum(-1).cumsum(-1)
    total_B_1 = ends_B_C[:, -1:]
    target_B_1 = noise_B_1 * total_B_1
    block_B_1 = torch.searchsorted(ends_B_C, target_B_1, right=True).clamp_(max=ends_B_C.shape[1] - 1)
    start_B_1 = ends_B_C.gather(1, (block_B_1 - 1).clamp_min(0)).masked_fill_(block_B_1 == 0, 0.0)
    share_B_1 = (target_B_1 - start_B_1) / (ends_B_C.gather(1, block_B_1) - start_B_1)
    within_B_S = probs_B_C_S.gather(1, block_B_1[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    return block_B_1 * _BLOCK + _searched(within_B_S, share_B_1.clamp_max_(_BELOW_ONE))[0], total_B_1


def unpacked(packed_B_C: Tensor) -> Drawn:
    """Returns the tensor of `invert`, on the host."""
    token_ids_B, *numbers = packed_B_C.cpu().numpy().T
    return Drawn(token_ids_B.astype(np.int64), *(np.ascontiguousarray(bits_B).view(np.float32) for bits_B in numbers))


def truncate(probs_U_V: Tensor, top_p_U: Tensor, top_k_U: Tensor, min_p_U: Tensor) -> tuple[Tensor, Tensor]:
    """Zeroes the probabilities that top-k, then top-p of the rest, then min-p drop. Does not renormalize.

    The most likely token stays. top-k 0, top-p 1 and min-p 0 drop nothing. Among equally likely tokens, smaller ids
    stay.

    Returns:
        The probabilities, and the natural logarithm [U] of a value between kept and dropped ones; -inf if none above 0
            is dropped.
    """
    sorted_U_V, order_U_V = probs_U_V.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_U_V.shape[-1], device=probs_U_V.device)
    keep_U_V = (ranks_V < top_k_U[:, None]) | (top_k_U[:, None] == 0)
    kept_U_V = sorted_U_V * keep_U_V
    cumulative_U_V = kept_U_V.cumsum(dim=-1)
    # A token stays if the tokens before it have not reached top-p.
    before_U_V = cumulative_U_V - kept_U_V
    keep_U_V &= (before_U_V < top_p_U[:, None] * cumulative_U_V[:, -1:]) | (top_p_U[:, None] >= 1)
    keep_U_V &= sorted_U_V >= min_p_U[:, None] * sorted_U_V[:, :1]
    keep_U_V[:, 0] = True
    least_U, most_U = sorted_U_V.masked_fill(~keep_U_V, 1.0).amin(1), sorted_U_V.masked_fill(keep_U_V, 0.0).amax(1)
    between_U = (least_U.log() + most_U.log()) / 2
    return torch.zeros_like(probs_U_V).scatter_(1, order_U_V, sorted_U_V * keep_U_V), between_U


_PACK_TOKENS = 2048
"""Largest number of tokens of one forward. A longer sequence has its own forward."""
_SHARED_ROWS = 16
"""Smallest number of common first tokens that are computed once."""
_LOGITS = 2**22
"""Number of logits in memory at once: 16 MiB in float32."""


@torch.inference_mode()
def score(
    model: EngineModel, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None
) -> list[np.ndarray]:
    """Returns log-probabilities of given tokens; see `GenerationBackend.score`."""
    context, shape = model.shape.max_position_embeddings, model.shape
    for i, token_ids_T in enumerate(sequences):
        if not 0 < len(token_ids_T) <= context:
            raise ValueError(f"sequence {i} has {len(token_ids_T)} tokens; it must have 1 to {context} (the context)")
        if error := unknown_id(token_ids_T, shape.vocab_size, shape.unused_ids):
            raise ValueError(f"sequence {i} has {error}")
    scores, start = list[np.ndarray](), 0
    for pack in batches(sequences, len, _PACK_TOKENS):
        of_pack = candidates and replace(candidates, cutoffs=candidates.cutoffs[start : start + len(pack)])
        start += len(pack)
        scores += _scored_pack(model, pack, of_pack)
    return scores


def _scored_pack(model: EngineModel, pack: list[np.ndarray], candidates: CandidateSets | None) -> list[np.ndarray]:
    """Scores sequences in one forward. Computes a common beginning of all sequences once."""
    shared = _num_shared_rows(pack, candidates) if model.device.type == "cpu" else 0  # others compute it as fast
    ends = [len(ids_T) - 1 for ids_T in pack]
    if not sum(ends):
        return [np.empty((3, 0) if candidates else 0, np.float32) for _ in pack]
    spans = [slice(shared), *(slice(shared, end) for end in ends)]
    owners = [pack[0], *pack]
    fed, positions, targets = (
        torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(model.device, non_blocking=True)
        for parts in (
            [ids_T[:-1][span] for ids_T, span in zip(owners, spans, strict=True)],
            [np.arange(len(ids_T) - 1)[span] for ids_T, span in zip(owners, spans, strict=True)],
            [ids_T[1:][span] for ids_T, span in zip(owners, spans, strict=True)],
        )
    )
    if candidates:
        all_cutoffs = (candidates.cutoffs[0], *candidates.cutoffs)
        cutoffs = [cutoffs_T[span] for cutoffs_T, span in zip(all_cutoffs, spans, strict=True)]
        candidates = replace(candidates, cutoffs=cutoffs)
    rests = tuple(end - shared for end in ends)
    attend = packed_attend([shared], [rests], model.device) if shared else causal_attend(ends)
    first, *parts = _scored(model, (fed, positions, attend), targets, candidates).cpu().split([shared, *rests], -1)
    return [torch.cat((first, part), -1).numpy() for part in parts]


def _num_shared_rows(pack: list[np.ndarray], candidates: CandidateSets | None) -> int:
    """Returns the number of first rows that have equal inputs, targets and candidates in all sequences.

    Each sequence keeps at least one further row. Returns 0 for fewer than `_SHARED_ROWS`.
    """
    most = min(map(len, pack)) - 2
    if len(pack) == 1 or most < _SHARED_ROWS:
        return 0
    is_same_T = np.all([ids_T[: most + 1] == pack[0][: most + 1] for ids_T in pack], axis=0)
    is_same_N = is_same_T[1:] & is_same_T[:-1]
    if candidates:
        cutoffs = candidates.cutoffs
        is_same_N &= np.all([cutoffs_T[:most] == cutoffs[0][:most] for cutoffs_T in cutoffs], axis=0)
    shared = int(np.cumprod(is_same_N).sum())
    return shared if shared >= _SHARED_ROWS else 0


def _scored(
    model: EngineModel, feed: tuple[Tensor, Tensor, Attend], targets_N: Tensor, candidates: CandidateSets | None
) -> Tensor:
    """Returns [N], or [3, N] with candidates; see `GenerationBackend.score`."""
    temperature, hidden_N_D = candidates.temperature if candidates else 1.0, model(*feed)
    own_N = logprobs_of(model, hidden_N_D, targets_N, temperature)
    if candidates is None:
        return own_N
    exact_N = torch.full_like(own_N, torch.nan)
    if model.device.type == "cpu":  # other devices have no second arithmetic
        with exactly():
            exact_N = logprobs_of(model, model(*feed), targets_N, temperature)
    cutoffs_N = torch.from_numpy(np.concatenate(candidates.cutoffs)).to(model.device)
    return torch.stack((exact_N, own_N, logprobs_of(model, hidden_N_D, targets_N, temperature, cutoffs_N)))


def logprobs_of(
    model: EngineModel, hidden_N_D: Tensor, targets_N: Tensor, temperature: float, cutoffs_N: Tensor | None = None
) -> Tensor:
    """Returns log-probabilities of given tokens by the model's head, float32 [N], without gradients.

    With `cutoffs_N` they are those among candidates only. Few logits are in memory at once.
    """
    rows = max(1, _LOGITS // model.shape.vocab_size)
    cutoffs_N = torch.full_like(targets_N, -torch.inf, dtype=torch.float32) if cutoffs_N is None else cutoffs_N
    return torch.cat([
        _logprobs(model.logits(hidden_C_D).float() / temperature, targets_C[:, None], cutoffs_C[:, None])
        for hidden_C_D, targets_C, cutoffs_C in zip(
            hidden_N_D.split(rows), targets_N.split(rows), cutoffs_N.split(rows), strict=True
        )
    ])  # fmt: skip


@torch.inference_mode()
def top_logprobs(
    model: EngineModel, token_ids_T: np.ndarray, num_top: int, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns log-probabilities of the tokens after the first, float32 [T - 1], and ids and log-probabilities of the
    likeliest tokens at their places, [T - 1, num_top].

    Raises:
        ValueError: the sequence is empty, longer than the context, or has ids that the model does not know.
    """
    context, vocab_size = model.shape.max_position_embeddings, model.shape.vocab_size
    if not 0 < len(token_ids_T) <= context:
        raise ValueError(f"the sequence has {len(token_ids_T)} tokens; it must have 1 to {context} (the context)")
    if error := unknown_id(token_ids_T, vocab_size):
        raise ValueError(f"the sequence has {error}")
    num_top, ids = min(num_top, vocab_size), torch.from_numpy(token_ids_T.astype(np.int64)).to(model.device)
    own, top_ids, top = (torch.empty(0, *width) for width in ((), (num_top,), (num_top,)))
    if len(ids) > 1:
        positions = torch.arange(len(ids) - 1, device=model.device)
        hidden_N_D, rows = model(ids[:-1], positions, causal_attend([len(ids) - 1])), max(1, _LOGITS // vocab_size)
        chunks = [
            (all_C_V.gather(1, targets_C[:, None])[:, 0], *all_C_V.topk(num_top, 1))
            for hidden_C_D, targets_C in zip(hidden_N_D.split(rows), ids[1:].split(rows), strict=True)
            for all_C_V in [(model.logits(hidden_C_D).float() / temperature).log_softmax(1)]
        ]
        own, top, top_ids = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return own.cpu().numpy(), top_ids.cpu().numpy().astype(np.int64), top.cpu().numpy()


def _logprobs(logits_C_V: Tensor, targets_C_1: Tensor, cutoffs_C_1: Tensor) -> Tensor:
    """Returns [C], as `llamarl.training.policy.target_logprobs` computes it."""
    own_C_1 = logits_C_V.gather(1, targets_C_1)
    is_out_C_V = (logits_C_V < own_C_1 + cutoffs_C_1).scatter_(1, targets_C_1, value=False)
    return (own_C_1 - logits_C_V.masked_fill_(is_out_C_V, -torch.inf).logsumexp(1, keepdim=True))[:, 0]
