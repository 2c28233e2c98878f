"""Which ids of a model its tokenizer has no token for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.models.folder import load_shape
from llamarl.models.vocabulary import is_unused, unused_ids
from tests.models.test_shape import LLAMA

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 4}}
ADDED = [{"id": 6, "content": "<|end|>"}, {"id": 7, "content": "<|x|>"}]


def tokenizer(folder: Path, model: Any, added: Any = ()) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": list(added)}))
    return folder


@pytest.mark.parametrize(
    ("model", "added", "expected"),
    [
        (BPE, ADDED, ((2, 4), (5, 6), (8, 10))),
        (BPE, (), ((2, 4), (5, 10))),
        ({"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}, ADDED, ((2, 6), (8, 10))),
        ({"type": "BPE", "vocab": {str(one): one for one in range(10)}}, (), ()),
        ({"type": "BPE", "vocab": {str(one): one for one in range(20)}}, (), ()),
        ({"type": "BPE", "vocab": []}, (), ()),
        (None, (), ()),
    ],
)
def test_ids_without_a_token(tmp_path: Path, model: Any, added: Any, expected: Any) -> None:
    assert unused_ids(tokenizer(tmp_path, model, added), 10) == expected


def test_no_tokenizer_and_a_damaged_one(tmp_path: Path) -> None:
    assert unused_ids(tmp_path, 10) == ()
    (tmp_path / "tokenizer.json").write_text("{")
    assert unused_ids(tmp_path, 10) == ()


def test_a_shape_knows_them(tmp_path: Path) -> None:
    (tokenizer(tmp_path, BPE, ADDED) / "config.json").write_text(json.dumps(LLAMA))
    assert load_shape(tmp_path).unused_ids == ((2, 4), (5, 6), (8, 131))


@given(st.sets(st.integers(0, 20)))
def test_membership(used: set[int]) -> None:
    ids = np.arange(21)
    borders = np.flatnonzero(np.diff(np.isin(np.arange(-1, 22), [*used, -1, 21])))
    spans = tuple((int(a), int(b)) for a, b in borders.reshape(-1, 2))
    assert is_unused(ids, spans).tolist() == [one not in used for one in ids.tolist()]
