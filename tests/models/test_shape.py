from __future__ import annotations

from typing import Any

import pytest
import transformers

from llamarl.config import ConfigError
from llamarl.models.shape import ModelShape, RopeScaling

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


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **SCALING}}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}}
    shape = ModelShape.from_hf(new)
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == RopeScaling(**SCALING)
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


def test_released_qwen_config_names_a_window_and_leaves_it_off() -> None:
    released = LLAMA | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32_768}
    assert ModelShape.from_hf(released).qkv_bias
    # On, but only from a layer that does not exist.
    assert ModelShape.from_hf(released | {"use_sliding_window": True, "max_window_layers": 2}).num_layers == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mixtral"}, "`model_type` = 'mixtral'"),
        ({"model_type": "qwen3_moe"}, "`model_type` = 'qwen3_moe'"),
        ({"model_type": None}, "`model_type` = None"),
        ({"hidden_act": "gelu"}, "`hidden_act` = 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "`attention_bias` = True"),
        ({"mlp_bias": True}, "`mlp_bias` = True"),
        ({"attention_dropout": 0.1}, "`attention_dropout` = 0.1"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "`rope_scaling.rope_type` = 'linear'; default and llama3",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "`rope_parameters.rope_type` = 'yarn'"),
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
