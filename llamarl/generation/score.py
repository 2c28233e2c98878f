"""Log-probabilities of given tokens, outside the KV cache.

Shape suffixes: T tokens of one sequence, N packed tokens, C tokens of one chunk, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.backend import EngineModel
from llamarl.generation.requests import unknown_id
from llamarl.kernels.linear import exactly
from llamarl.models.attention import causal_attend, packed_attend
from llamarl.models.transformer import Attend
from llamarl.types import CandidateSets

_PACK_TOKENS = 2048
"""Tokens of one forward; a longer sequence is one by itself."""
_SHARED_ROWS = 16
"""Fewest common first tokens that are computed once."""
_LOGITS = 2**22
"""Logits at once: 16 MiB in float32."""


@torch.inference_mode()
def score(
    model: EngineModel, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None
) -> list[np.ndarray]:
    """Log-probabilities of given tokens; see `GenerationBackend.score`."""
    context, shape = model.shape.max_position_embeddings, model.shape
    for i, token_ids_T in enumerate(sequences):
        if not 0 < len(token_ids_T) <= context:
            raise ValueError(f"sequence {i} has {len(token_ids_T)} tokens; between 1 and the context {context} can be")
        if error := unknown_id(token_ids_T, shape.vocab_size, shape.unused_ids):
            raise ValueError(f"sequence {i} has {error}")
    scores, start = list[np.ndarray](), 0
    for pack in packs(sequences, _PACK_TOKENS):
        own = candidates and replace(candidates, cutoffs=candidates.cutoffs[start : start + len(pack)])
        start += len(pack)
        scores += _scored_pack(model, pack, own)
    return scores


def _scored_pack(model: EngineModel, pack: list[np.ndarray], candidates: CandidateSets | None) -> list[np.ndarray]:
    """Scores sequences in one forward. Computes a common beginning of all sequences once."""
    shared = _num_shared_rows(pack, candidates)
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
        cutoffs = [one[span] for one, span in zip((candidates.cutoffs[0], *candidates.cutoffs), spans, strict=True)]
        candidates = replace(candidates, cutoffs=cutoffs)
    rests = tuple(end - shared for end in ends)
    attend = packed_attend([shared], [rests], model.device) if shared else causal_attend(ends)
    first, *parts = _scored(model, (fed, positions, attend), targets, candidates).cpu().split([shared, *rests], -1)
    return [torch.cat((first, part), -1).numpy() for part in parts]


def _num_shared_rows(pack: list[np.ndarray], candidates: CandidateSets | None) -> int:
    """Returns the number of first rows that have equal inputs, targets and candidates in all sequences. Each sequence
    keeps at least one further row. Returns 0 for fewer than `_SHARED_ROWS`."""
    most = min(map(len, pack)) - 2
    if len(pack) == 1 or most < _SHARED_ROWS:
        return 0
    is_same_T = np.all([ids_T[: most + 1] == pack[0][: most + 1] for ids_T in pack], axis=0)
    is_same_N = is_same_T[1:] & is_same_T[:-1]
    if candidates:
        is_same_N &= np.all([one[:most] == candidates.cutoffs[0][:most] for one in candidates.cutoffs], axis=0)
    shared = int(np.cumprod(is_same_N).sum())
    return shared if shared >= _SHARED_ROWS else 0


def _scored(
    model: EngineModel, feed: tuple[Tensor, Tensor, Attend], targets_N: Tensor, candidates: CandidateSets | None
) -> Tensor:
    """[N], or [3, N], see `GenerationBackend.score`."""
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
    """Log-probabilities of given tokens by the model's own head, among candidates alone if there are cutoffs, float32
    [N], without gradients; few logits are held at once."""
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
    """Log-probabilities of the tokens after the first, float32 [T - 1], and ids and log-probabilities of the likeliest
    tokens at their places, [T - 1, num_top].

    Raises:
        ValueError: the sequence is empty, longer than the context, or has ids that the model does not know.
    """
    context, vocab_size = model.shape.max_position_embeddings, model.shape.vocab_size
    if not 0 < len(token_ids_T) <= context:
        raise ValueError(f"the sequence has {len(token_ids_T)} tokens; between 1 and the context {context} can be")
    if error := unknown_id(token_ids_T, vocab_size):
        raise ValueError(f"the sequence has {error}")
    num_top, ids = min(num_top, vocab_size), torch.from_numpy(token_ids_T.astype(np.int64)).to(model.device)
    own, top_ids, top = (torch.empty(0, *width) for width in ((), (num_top,), (num_top,)))
    if len(ids) > 1:
        positions = torch.arange(len(ids) - 1, device=model.device)
        hidden_N_D, rows = model(ids[:-1], positions, causal_attend([len(ids) - 1])), max(1, _LOGITS // vocab_size)
        found = [
            (all_C_V.gather(1, targets_C[:, None])[:, 0], *all_C_V.topk(num_top, 1))
            for hidden_C_D, targets_C in zip(hidden_N_D.split(rows), ids[1:].split(rows), strict=True)
            for all_C_V in [(model.logits(hidden_C_D).float() / temperature).log_softmax(1)]
        ]
        own, top, top_ids = (torch.cat(parts) for parts in zip(*found, strict=True))
    return own.cpu().numpy(), top_ids.cpu().numpy().astype(np.int64), top.cpu().numpy()


def _logprobs(logits_C_V: Tensor, targets_C_1: Tensor, cutoffs_C_1: Tensor) -> Tensor:
    """[C], as `llamarl.training.logprobs.target_logprobs` does."""
    own_C_1 = logits_C_V.gather(1, targets_C_1)
    is_out_C_V = (logits_C_V < own_C_1 + cutoffs_C_1).scatter_(1, targets_C_1, value=False)
    return (own_C_1 - logits_C_V.masked_fill_(is_out_C_V, -torch.inf).logsumexp(1, keepdim=True))[:, 0]


def packs(sequences: Iterable[np.ndarray], max_tokens: int) -> Iterator[list[np.ndarray]]:
    """Consecutive sequences for one forward each; one that is longer than `max_tokens` is alone."""
    pack, size = list[np.ndarray](), 0
    for token_ids_T in sequences:
        if pack and size + len(token_ids_T) > max_tokens:
            yield pack
            pack, size = [], 0
        pack.append(token_ids_T)
        size += len(token_ids_T)
    if pack:
        yield pack
