from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llamarl.config import ConfigError
from llamarl.models.shape import Llama3Scaling, ModelShape, YarnScaling
from llamarl.models.transformer import rope_frequencies
from llamarl.parts.forecast.shapes import DecoderShape

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 131_072,
}
SCALING: dict[str, Any] = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}}
    shape = ModelShape.from_hf(new)
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == Llama3Scaling(**SCALING)
    assert ModelShape.from_hf(old) == ModelShape.from_hf(older) == shape


def test_round_trip_through_hf_and_transformers(oracle: transformers.PreTrainedModel) -> None:
    shape = ModelShape.from_hf(oracle.config.to_dict())
    written = shape.to_hf()
    assert ModelShape.from_hf(written) == shape
    # transformers 4 knows these two keys only; 5 must understand them too.
    assert {"rope_theta", "rope_scaling"} <= written.keys()
    theirs = type(oracle.config)(**written)
    assert ModelShape.from_hf(theirs.to_dict()) == shape
    assert theirs.rope_parameters == oracle.config.rope_parameters


def test_defaults_of_absent_keys() -> None:
    shape = ModelShape.from_hf({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (shape.num_kv_heads, shape.head_dim, shape.rope_theta, shape.rope_scaling) == (4, 16, 10_000.0, None)
    assert (shape.tie_embeddings, shape.stop_token_ids, shape.bos_token_id) == (False, (), None)
    assert ModelShape.from_hf(LLAMA | {"model_type": "qwen3"}).head_dim == 128


@pytest.mark.parametrize(
    ("stated", "change", "original", "context"),
    [
        (8192, {}, 8192, 32_768),
        (40_960, {}, 8192, 40_960),
        (8192, {"original_max_position_embeddings": None}, 8192, 32_768),
        (32_768, {"original_max_position_embeddings": None}, 32_768, 131_072),
        (8192, {"type": "yarn", "rope_type": None}, 8192, 32_768),
    ],
)
def test_yarn_stretches_the_context(stated: int, change: dict[str, Any], original: int, context: int) -> None:
    scaling = {name: value for name, value in (YARN | {"factor": 4.0} | change).items() if value is not None}
    config = LLAMA | {"rope_scaling": scaling, "max_position_embeddings": stated}
    shape = ModelShape.from_hf(config)
    assert shape.rope_scaling == YarnScaling(factor=4.0, original_max_position_embeddings=original)
    assert shape.max_position_embeddings == DecoderShape.from_hf(config).max_position_embeddings == context
    theirs = transformers.LlamaConfig(**{name: value for name, value in config.items() if name != "model_type"})
    assert theirs.rope_parameters["original_max_position_embeddings"] == original


def test_an_original_context_beside_the_rope_is_read_as_in_transformers() -> None:
    config = LLAMA | {"rope_scaling": {**YARN}, "original_max_position_embeddings": 4096}
    with pytest.raises(ConfigError, match=r"original_max_position_embeddings.* 4096"):
        ModelShape.from_hf(config)
    del config["rope_scaling"]["original_max_position_embeddings"]
    shape = ModelShape.from_hf(config)
    assert shape.rope_scaling == YarnScaling(factor=2.0, original_max_position_embeddings=4096)
    theirs = transformers.LlamaConfig(**{name: value for name, value in config.items() if name != "model_type"})
    assert torch.equal(rope_frequencies(shape), ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))[0])


def test_mistral_without_a_window_says_so_as_transformers_assumes_one() -> None:
    written = ModelShape.from_hf(LLAMA | {"model_type": "mistral", "sliding_window": 131_072}).to_hf()
    assert transformers.MistralConfig().sliding_window == 4096
    assert transformers.AutoConfig.for_model(**written).sliding_window is None


def test_released_qwen_config_names_a_window_and_leaves_it_off() -> None:
    released = LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32_768}
    assert ModelShape.from_hf(released).qkv_bias
    # On, but only from a layer that does not exist.
    assert ModelShape.from_hf(released | {"use_sliding_window": True, "max_window_layers": 2}).num_layers == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": None}, "`model_type` = None is none of the families llama, mistral, qwen2, qwen3, qwen3_moe,"),
        ({"model_type": "rwkv"}, "`model_type` = 'rwkv' is none of the families"),
        ({"model_type": ["llama"]}, "`model_type` = ['llama'] is none of the families"),
        ({"hidden_act": "gelu"}, "`hidden_act` = 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "`attention_bias` = True"),
        ({"mlp_bias": True}, "`mlp_bias` = True"),
        ({"attention_dropout": 0.1}, "`attention_dropout` = 0.1"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "`rope_scaling.rope_type` = 'dynamic'; default, llama3, yarn, linear are supported",
        ),
        ({"rope_scaling": "yarn"}, "`rope_scaling` = 'yarn'; a table of names and values is needed"),
        ({"rope_scaling": {"type": "linear"}}, "`rope_scaling.factor` is missing; rope_type linear needs it"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "`rope_parameters.factor` is missing; rope_type yarn needs it"),
        ({"rope_parameters": YARN | {"factor": "4"}}, "`rope_parameters.factor` = '4'; a positive number is needed"),
        ({"rope_parameters": YARN | {"factor": True}}, "`rope_parameters.factor` = True; a positive number"),
        ({"rope_parameters": YARN | {"beta_fast": -1}}, "`rope_parameters.beta_fast` = -1; a positive number"),
        ({"rope_parameters": YARN | {"truncate": 0}}, "`rope_parameters.truncate` = 0; true or false is needed"),
        (
            {"rope_parameters": YARN | {"attn_factor": 0.8}},
            "`rope_parameters.attn_factor` = 0.8; transformers reads no",
        ),
        ({"rope_parameters": YARN | {"factor": 1e6}}, "`max_position_embeddings` = 8192000000; a whole number from 1"),
        ({"rope_parameters": YARN, "rope_theta": 1.0}, "rope_theta = 1.0 with YaRN; over 1 is needed"),
        ({"model_type": "mistral"}, "`sliding_window` = 'absent, which means 4096'; only full attention"),
        ({"model_type": "mistral", "sliding_window": 131_071}, "`sliding_window` = 131071; only full attention"),
        ({"model_type": "mistral", "sliding_window": "all"}, "`sliding_window` = 'all'"),
        (
            {"model_type": "mistral", "sliding_window": 131_072, "rope_scaling": YARN | {"factor": 32.0}},
            "at least the 262144 tokens of the context",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "`rope_parameters.low_freq_factor` is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "`rope_parameters.partial_rotary_factor` = 0.5"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`layer_types` = ['sliding_attention']"),
        ({"hidden_size": None}, "`hidden_size` is missing"),
        ({"hidden_size": "64"}, "`hidden_size` = '64'"),
        ({"hidden_size": 66}, "`hidden_size` = 66"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "head_dim = 15"),
    ],
)
def test_refuses_what_it_does_not_compute(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_hf(LLAMA | change)
    assert named in str(caught.value)
