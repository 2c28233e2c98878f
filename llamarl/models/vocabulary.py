"""Token ids for which a model has a row but its tokenizer has no token. No torch.

Embeddings are often padded beyond the tokenizer's vocabulary, and some tokenizers skip ids. Such ids must not be
sampled: they have no text, and the weights of their rows are arbitrary.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

TOKENIZER_FILE = "tokenizer.json"
Spans = tuple[tuple[int, int], ...]
"""Ranges of token ids, each [first, last + 1), in ascending order."""


def unused_ids(folder: Path, vocab_size: int) -> Spans:
    """Returns the ids below `vocab_size` that no token in `folder`/tokenizer.json has, added tokens included.

    Returns no ids if the folder has no tokenizer, or one that cannot be read, which `Tokenizer` reports.
    """
    path = folder / TOKENIZER_FILE
    try:
        status = path.stat()
    except OSError:
        return ()
    return _unused(path, vocab_size, status.st_mtime_ns, status.st_size)


def tokens_of(folder: Path) -> dict[int, str]:
    """Returns the tokens in `folder`/tokenizer.json by id, added tokens included. Empty if there is no tokenizer, or
    one that cannot be read, which `Tokenizer` reports."""
    try:
        tokenizer = json.loads((folder / TOKENIZER_FILE).read_bytes())
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):
            found = {number: str(row[0]) for number, row in enumerate(vocabulary)}
        else:
            found = {int(number): str(token) for token, number in vocabulary.items()}
        return found | {int(one["id"]): str(one["content"]) for one in tokenizer.get("added_tokens") or ()}
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return {}


@lru_cache(maxsize=8)
def _unused(path: Path, vocab_size: int, _modified_ns: int, _num_bytes: int) -> Spans:
    try:
        ids = _token_ids(json.loads(path.read_bytes()))
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return ()
    is_used_V = np.zeros(vocab_size, bool)
    is_used_V[ids[(ids >= 0) & (ids < vocab_size)]] = True
    if not is_used_V.any():
        return ()
    borders = np.flatnonzero(np.diff(np.concatenate(([True], is_used_V, [True]))))
    return tuple((int(first), int(stop)) for first, stop in borders.reshape(-1, 2))


def _token_ids(tokenizer: dict[str, Any]) -> np.ndarray:
    """Returns the ids of all tokens. Unigram models list their tokens in the order of ids; other models map tokens to
    ids."""
    vocabulary = tokenizer["model"]["vocab"]
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    added = (token["id"] for token in tokenizer.get("added_tokens") or ())
    return np.array([*ids, *added], np.int64)


def is_unused(token_ids_T: np.ndarray, spans: Spans) -> np.ndarray:
    """Returns which of these token ids are in `spans`, bool [T]."""
    borders = np.array(spans, np.int64).ravel()
    return np.searchsorted(borders, token_ids_T, side="right") % 2 == 1
