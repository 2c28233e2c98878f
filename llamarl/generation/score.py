"""Log-probabilities of given tokens, outside the KV cache.

Shape suffixes: T tokens of one sequence, N packed tokens, C tokens of one chunk, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.backend import EngineModel
from llamarl.generation.requests import unknown_id
from llamarl.generation.sampler import truncate
from llamarl.kernels.linear import exactly
from llamarl.models.attention import causal_attend
from llamarl.models.transformer import Attend
from llamarl.types import SamplingParams

_PACK_TOKENS = 2048
"""Tokens of one forward; a longer sequence is one by itself."""
_LOGITS = 2**22
"""Logits at once: 16 MiB in float32."""


@torch.inference_mode()
def score(
    model: EngineModel, sequences: Sequence[np.ndarray], sampling: SamplingParams | None = None
) -> list[np.ndarray]:
    """Log-probabilities of given tokens; see `GenerationBackend.score`."""
    context, vocab_size = model.shape.max_position_embeddings, model.shape.vocab_size
    for i, token_ids_T in enumerate(sequences):
        if not 0 < len(token_ids_T) <= context:
            raise ValueError(f"sequence {i} has {len(token_ids_T)} tokens; between 1 and the context {context} can be")
        if error := unknown_id(token_ids_T, vocab_size):
            raise ValueError(f"sequence {i} has {error}")
    scores = list[np.ndarray]()
    for pack in packs(sequences, _PACK_TOKENS):
        lengths = [len(token_ids_T) - 1 for token_ids_T in pack]
        fed, positions, targets = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(model.device, non_blocking=True)
            for parts in ([ids[:-1] for ids in pack], [np.arange(n) for n in lengths], [ids[1:] for ids in pack])
        )
        if not sum(lengths):
            scores += [np.empty((3, 0) if sampling else 0, np.float32) for _ in pack]
            continue
        feed = fed, positions, causal_attend(lengths)
        scores += [part.numpy() for part in _scored(model, feed, targets, sampling).cpu().split(lengths, -1)]
    return scores


def _scored(
    model: EngineModel, feed: tuple[Tensor, Tensor, Attend], targets_N: Tensor, sampling: SamplingParams | None
) -> Tensor:
    """[N], or [3, N], see `GenerationBackend.score`."""
    whole, hidden_N_D = SamplingParams(temperature=sampling.temperature if sampling else 1.0), model(*feed)
    own_N = logprobs_of(model, hidden_N_D, targets_N, whole)
    if sampling is None:
        return own_N
    exact_N = torch.full_like(own_N, torch.nan)
    if model.device.type == "cpu":  # other devices have no second arithmetic
        with exactly():
            exact_N = logprobs_of(model, model(*feed), targets_N, whole)
    return torch.stack((exact_N, own_N, logprobs_of(model, hidden_N_D, targets_N, sampling)))


def logprobs_of(model: EngineModel, hidden_N_D: Tensor, targets_N: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probabilities of given tokens, drawn so, by the model's own head, float32 [N], without gradients; few logits
    are held at once."""
    rows = max(1, _LOGITS // model.shape.vocab_size)
    return torch.cat([
        _log_softmax(model.logits(hidden_C_D).float(), sampling).gather(1, targets_C[:, None])[:, 0]
        for hidden_C_D, targets_C in zip(hidden_N_D.split(rows), targets_N.split(rows), strict=True)
    ])  # fmt: skip


def _log_softmax(logits_C_V: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probabilities under the distribution that temperature and truncation leave."""
    logits_C_V = logits_C_V / sampling.temperature
    limits = sampling.top_p, sampling.top_k, sampling.min_p
    if limits == (1, 0, 0):
        return logits_C_V.log_softmax(-1)
    limits_3_1 = logits_C_V.new_tensor(limits)[:, None]
    probs_C_V = truncate(logits_C_V.softmax(-1), *limits_3_1.expand(-1, len(logits_C_V)))
    return (probs_C_V / probs_C_V.sum(-1, keepdim=True)).log()


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
