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
    for pack in packs(sequences, _PACK_TOKENS):
        lengths = [len(token_ids_T) - 1 for token_ids_T in pack]
        fed, positions, targets = (
            torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(model.device, non_blocking=True)
            for parts in ([ids[:-1] for ids in pack], [np.arange(n) for n in lengths], [ids[1:] for ids in pack])
        )
        if not sum(lengths):
            scores += [np.empty(0, np.float32) for _ in pack]
            continue
        logprobs_N = logprobs_of(model, model(fed, positions, causal_attend(lengths)), targets)
        scores += [part.numpy() for part in logprobs_N.cpu().split(lengths)]
    return scores


def logprobs_of(model: EngineModel, hidden_N_D: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of given tokens by the model's own head, float32 [N], without gradients; few logits are held
    at once."""
    rows = max(1, _LOGITS // model.shape.vocab_size)
    return torch.cat([
        (model.logits(hidden_C_D).float() / temperature).log_softmax(-1).gather(1, targets_C[:, None])[:, 0]
        for hidden_C_D, targets_C in zip(hidden_N_D.split(rows), targets_N.split(rows), strict=True)
    ])  # fmt: skip


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
