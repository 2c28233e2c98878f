"""Sizes against published numbers, and what a config.json must say."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from llamarl.config import ConfigError
from llamarl.models.memory import SHARED_STATES, GeneratorLoad, generator_bytes
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import DecoderSizes
from llamarl.models.transformer import Transformer
from llamarl.parts.forecast.candidates import trainer_candidates
from llamarl.parts.forecast.request import ASYNCHRONOUS
from llamarl.parts.forecast.shapes import MODELS, DecoderShape, find_model
from tests.nightly import crossed, some
from tests.parts.forecast.conftest import make_request


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-1b", 1.236e9, 1.236e9),
        ("llama3-3b", 3.213e9, 3.213e9),
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


@pytest.mark.parametrize(("name", "tied"), some(crossed(MODELS, [False, True]), 8))
def test_a_built_in_shape_has_the_weights_of_the_model_that_is_made(name: str, tied: bool) -> None:
    known = replace(MODELS[name], tie_embeddings=tied)
    shape = ModelShape(**{field.name: getattr(known, field.name) for field in fields(DecoderSizes)})
    with torch.device("meta"):
        made = {name: tuple(one.shape) for name, one in Transformer(shape).state_dict().items()}
    assert known.weights() == made
    assert known.num_parameters == shape.num_parameters == sum(map(math.prod, made.values()))


HF = {
    "model_type": "llama",
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
    assert model.num_parameters == 2 * (2 * 64 * 6 * 16 + 3 * 64 * 128 + 2 * 64) + 64 + 100 * 64


def test_a_mixture() -> None:
    extra = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = DecoderShape.from_hf(HF | extra)
    assert model.moe and (model.moe.num_experts, model.moe.experts_per_token, model.moe.expert_size) == (16, 2, 32)
    assert model.intermediate_size == 128 and model.num_sparse_layers == 2
    assert DecoderShape.from_hf(HF | extra | {"decoder_sparse_step": 2}).num_sparse_layers == 1


@pytest.mark.parametrize(
    ("name", "said"), [("zai-org/GLM-4.6", "nothing is fetched here"), ("THUDM/glm-4-9b", "behind")]
)
def test_a_name_with_a_number_of_another_family(name: str, said: str) -> None:
    """GLM-4's norms are not computed, those of 4.5 and later are."""
    with pytest.raises(ConfigError, match=said):
        find_model(name)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        DecoderShape.from_hf({name: value for name, value in HF.items() if name != key})


# Parameters in billions, and those without embeddings, by the model cards on the Hub.
PUBLISHED = {
    "qwen2.5-0.5b": (0.494, 0.36), "qwen2.5-1.5b": (1.54, 1.31), "qwen2.5-3b": (3.09, 2.77),
    "qwen2.5-7b": (7.615, 6.53), "qwen2.5-14b": (14.77, 13.1), "qwen2.5-32b": (32.76, 31.0),
    "qwen2.5-72b": (72.7, 70.0), "qwen3-0.6b": (0.596, 0.44), "qwen3-1.7b": (1.72, 1.4), "qwen3-4b": (4.02, 3.6),
    "qwen3-8b": (8.19, 6.95), "qwen3-14b": (14.77, 13.2), "qwen3-32b": (32.76, 31.2),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_qwen_by_name(name: str) -> None:
    model, (total, inner) = MODELS[name], PUBLISHED[name]
    assert model.num_parameters == pytest.approx(total * 1e9, rel=0.01)
    assert model.num_layers * model.layer_parameters == pytest.approx(inner * 1e9, rel=0.015), "cards round to 10M"
    assert find_model(model.path).num_parameters == model.num_parameters, "nothing has to be fetched"
    assert find_model(model.path).path == model.path


@pytest.mark.parametrize("name", ["meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"])
def test_a_name_in_other_words(name: str) -> None:
    assert find_model(name).num_parameters == MODELS["llama3-8b"].num_parameters


def test_an_unknown_name_is_explained() -> None:
    with pytest.raises(ConfigError, match="did you mean `llama3-70b`"):
        find_model("llama3-7b0")
    with pytest.raises(ConfigError, match=r"hf download some/dolphin config\.json"):
        find_model("some/dolphin")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "deepseek-ai/DeepSeek-V3",
            "latent attention .* nearest that works is deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        ),
        ("deepseek-v2", "latent attention .* nearest that works is Qwen/Qwen3-8B"),
        ("google/gemma-2-9b-it", "sliding windows, are not computed here"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "image encoder is not computed here; .* Qwen/Qwen2.5-7B-Instruct"),
        ("openai/gpt-oss-20b", "attention sinks"),
    ],
)
def test_a_model_that_is_not_planned_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_model(name)


QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 9}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 2}, "latent attention"),
        ({"model_type": "gemma3_text"}, "sliding windows"),
        ({"model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2}, "gated shared expert is not"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window"),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "shared_expert_intermediate_size": 9,
            },
            "shared_expert",
        ),
        ({"model_type": None}, "none of the families"),
    ],
)
def test_a_config_that_is_not_planned_is_refused(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | keys))
    with pytest.raises(ConfigError, match=said):
        find_model(str(tmp_path))


def test_a_plan_of_a_hybrid_has_no_context_ranks_and_counts_its_states() -> None:
    """`train` refuses context ranks. A state is read and written with each token, whatever the context."""
    model, dense = MODELS["qwen3.5-27b"], MODELS["qwen3-32b"]
    found = {
        one.name: {
            *trainer_candidates(make_request(one, 16), make_request(one, 16).pools[0], ASYNCHRONOUS).cp_L.tolist()
        }
        for one in (model, dense)
    }
    assert found[model.name] == {1} < found[dense.name]
    assert model.num_attention_layers == 16
    assert model.state_bytes == 48 * 4 * (48 * 128 * 128 + 3 * (2 * 16 + 48) * 128)
    load = GeneratorLoad(width=2, kv_width=2, kv_tokens=0, tp=2, rows=100)
    assert generator_bytes(model, load)["states"] == (2 * 100 + SHARED_STATES) / 2 * model.state_bytes
