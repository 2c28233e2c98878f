"""A run of a model whose embedding is padded beyond its tokenizer's vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from llamarl.data.tokenizer import Tokenizer
from llamarl.models.folder import load_shape
from tests.end_to_end.tiny import make_model, rows
from tests.executors.runs import tiny_config, train


@pytest.mark.parametrize("tied", [True, False])
def test_ids_without_a_token_are_neither_sampled_nor_trained(tmp_path: Path, tied: bool) -> None:
    """Rows of padding are large, so that most tokens would be such. Ratios are 1 where weights are equal."""
    model = make_model(tmp_path / "model", std=0.25, vocab_size=384, tie_embeddings=tied)
    used, head = Tokenizer(model).vocab_size, "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert load_shape(model).unused_ids == ((used, 384),)
    weights = load_file(model / "model.safetensors")
    weights[head][used:] *= 20
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    folder = train(tiny_config(model, tmp_path, steps=2))
    tokens = {token for row in rows(folder.rollouts) for token in row["token_ids"]}
    assert len(tokens) > 20 and max(tokens) < used
    for step in (row for row in rows(folder.metrics) if row["kind"] == "step"):
        assert step["importance_ratio_max"] == pytest.approx(1, abs=1e-3)
        assert abs(step["extra.kl_to_reference"]) < 1
