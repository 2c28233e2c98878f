"""Sizes against published numbers, and what a config.json must say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.parts.forecast.shapes import MODELS, DecoderShape, find_model


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-8b", 8.03e9, 7.5e9),
        ("llama3-70b", 70.6e9, 69.5e9),
        ("llama3-405b", 405.9e9, 403.7e9),
        ("mixtral-8x7b", 46.7e9, 12.7e9),
        ("qwen3-235b-a22b", 235e9, 21.5e9),
    ],
)
def test_parameters(name: str, total: float, active: float) -> None:
    assert MODELS[name].num_parameters == pytest.approx(total, rel=0.005)
    assert MODELS[name].matmul_parameters == pytest.approx(active, rel=0.02)


HF = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | {"tie_word_embeddings": True}))
    model = find_model(str(tmp_path))
    assert model.head_dim == 16
    assert model.num_parameters == 2 * (2 * 64 * 6 * 16 + 3 * 64 * 128) + 100 * 64


def test_a_mixture() -> None:
    extra = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = DecoderShape.from_hf(HF | extra)
    assert (model.num_experts, model.experts_per_token, model.intermediate_size) == (16, 2, 32)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        DecoderShape.from_hf({name: value for name, value in HF.items() if name != key})


def test_an_unknown_name_is_explained() -> None:
    with pytest.raises(ConfigError, match="did you mean `llama3-70b`"):
        find_model("llama-70b")
