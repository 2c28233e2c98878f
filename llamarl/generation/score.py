"""Log-probabilities of given tokens, outside the KV cache.

Shape suffixes: T tokens of one sequence, N packed tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from llamarl.generation.backend import EngineModel
from llamarl.generation.requests import unknown_id
from llamarl.models.attention import causal_attend

_PACK_TOKENS = 2048
"""Tokens of one forward; a longer sequence is one by itself."""
_LOGITS = 2**22
"""Logits at once: 16 MiB in float32."""


@torch.inference_mode()
def score(model: EngineModel, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """See `GenerationBackend.score`."""
    context, vocab_size = model.shape.max_position_embeddings, model.shape.vocab_size
    for i, token_ids_T in enumerate(sequences):
        if not 0 < len(token_ids_T) <= context:
            raise ValueError(f"sequence {i} has {len(token_ids_T)} tokens; between 1 and the context {context} can be")
        if error := unknown_id(token_ids_T, vocab_size):
            raise ValueError(f"sequence {i} has {error}")
    scores = list[np.ndarray]()
    for pack in _packs(sequences):
        lengths = [len(token_ids_T) - 1 for token_ids_T in pack]
        fed, positions, targets = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(model.device)
            for parts in ([ids[:-1] for ids in pack], [np.arange(n) for n in lengths], [ids[1:] for ids in pack])
        )
        if not sum(lengths):
            scores += [np.empty(0, np.float32) for _ in pack]
            continue
        hidden_N_D = model(fed, positions, causal_attend(lengths))
        rows = max(1, _LOGITS // vocab_size)
        logprobs_N = torch.cat([_logprobs(model, *part) for part in zip(
            hidden_N_D.split(rows), targets.split(rows), strict=True
        )])  # fmt: skip
        scores += [part.numpy() for part in logprobs_N.cpu().split(lengths)]
    return scores


def _logprobs(model: EngineModel, hidden_N_D: Tensor, targets_N: Tensor) -> Tensor:
    return torch.log_softmax(model.logits(hidden_N_D).float(), -1).gather(1, targets_N[:, None])[:, 0]


def _packs(sequences: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    pack, size = list[np.ndarray](), 0
    for token_ids_T in sequences:
        if pack and size + len(token_ids_T) > _PACK_TOKENS:
            yield pack
            pack, size = [], 0
        pack.append(token_ids_T)
        size += len(token_ids_T)
    if pack:
        yield pack
