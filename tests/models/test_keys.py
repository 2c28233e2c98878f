"""A key of `config.json` that changes what is computed changes the model that is built, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llamarl.config import ConfigError
from llamarl.models.keys import COMPUTED, HARMLESS, check_keys
from llamarl.models.shape import ARCHITECTURES, ModelShape
from llamarl.models.transformer import Transformer, rope_frequencies

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1,
    "sliding_window": None,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    },
    **{
        family: {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        }
        for family in ("qwen3_next", "qwen3_5_moe_text")
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
    "beta_slow": 2.0, "truncate": False,
}  # fmt: skip
SMOLLM2 = {
    "_name_or_path": "smollm", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip


def written(family: str, **options: Any) -> dict[str, Any]:
    """`config.json` as the installed transformers writes it, with all defaults."""
    config = AutoConfig.for_model(family, **deepcopy({**SIZES, **OWN.get(family, {}), **options}))
    return json.loads(config.to_json_string(use_diff=False))


def others(value: Any) -> Iterator[Any]:
    """Other values of the same kind, and of other kinds."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield from (value * 2, value + 1, value / 4, -1 if value >= 0 else 1, float("inf"))
        case str():
            yield value + "x"
        case list():
            yield [*value, 3]
            yield [*value, 10**6]
            yield [*value, "chunked_attention"]
        case dict():
            for name, inner in value.items():
                yield from (value | {name: other} for other in others(inner))
            yield value | {"another": 1.5}
            yield {"full_attention": value}
        case None:
            yield from (3, 0.5, "x", [1], {"rope_type": "linear", "factor": 2.0})
    yield {"is": "no such thing"}


def read(config: dict[str, Any], refused: set[str]) -> ModelShape | None:
    """None means that it is refused."""
    try:
        return ModelShape.from_hf(config)
    except ConfigError as error:
        refused.add(str(error))
        return None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # `load_shape` says that a value is of the wrong kind


@pytest.mark.parametrize("rope", [None, LLAMA3, YARN], ids=["default", "llama3", "yarn"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_changed_key_is_another_model_or_refused(family: str, rope: dict[str, Any] | None) -> None:
    """Every key that transformers writes, but for those that compute nothing."""
    config = written(family, **({"rope_parameters": rope} if rope else {}))
    shape, differing = ModelShape.from_hf(config), set[str]()
    for key in sorted(key for key in config.keys() - HARMLESS if not key.startswith("_")):
        refused = set[str]()
        for value in (other for other in others(config[key]) if other != config[key]):
            found = read(config | {key: value}, refused)
            if found is not None and (found != shape or is_same(family, key, value, config)):
                differing.add(key)
            else:
                assert found is None, f"{key} = {value!r} in place of {config[key]!r} is the same model"
        assert key in NAMED_OTHERWISE or any(f"{key}" in said for said in refused), f"{key} is never named: {refused}"
    assert {"hidden_size", "rms_norm_eps", "rope_parameters", "vocab_size"} <= differing


NAMED_OTHERWISE = {"num_attention_heads", "num_key_value_heads"}


def is_same(family: str, key: str, value: Any, config: dict[str, Any]) -> bool:
    """Values that mean what the other means: a window that is off, or that begins behind the last layer, and null."""
    if key in ("sliding_window", "max_window_layers"):
        return family in ("qwen2", "qwen3", "qwen3_moe") or value is None or value >= SIZES["max_position_embeddings"]
    return key == "use_sliding_window" and config.get("sliding_window") is None


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_an_unknown_key_is_refused_by_name_and_metadata_is_not(family: str) -> None:
    config = written(family)
    shape = ModelShape.from_hf(config)
    with pytest.raises(ConfigError, match="logit_scale"):
        ModelShape.from_hf(config | {"logit_scale": 0.5})
    more = {"logit_scale": None, "unsloth_version": "2025.1", "_attn_implementation_autoset": True, "use_cache": False}
    assert ModelShape.from_hf(config | more) == shape
    for key in OWN["glm4_moe"].keys() - COMPUTED[family]:
        with pytest.raises(ConfigError, match=key):
            check_keys({key: 4}, family)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_transformers_writes_loads_and_is_computed_alike(family: str) -> None:
    """With `dtype`, `rope_parameters` and `layer_types`, as transformers 5 writes them."""
    config = written(family, dtype="bfloat16", rope_parameters={"rope_type": "default", "rope_theta": 3e4})
    shape = ModelShape.from_hf(config)
    assert shape.rope_theta == 3e4
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        ours = Transformer(shape)
    assert sum(one.numel() for one in ours.parameters()) == sum(one.numel() for one in theirs.parameters())
    assert ModelShape.from_hf(shape.to_hf()) == shape


RELEASED: dict[str, dict[str, Any]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "use_cache": True,
        "initializer_range": 0.02, "max_window_layers": 28, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "transformers_version": "4.43.1", "use_mrope": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "hidden_act": "silu", "max_window_layers": 48, "mlp_only_layers": [],
        "norm_topk_prob": True, "output_router_logits": False, "qkv_bias": False, "rope_scaling": None,
        "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "use_qk_norm": True, "use_cache": True,
        "use_sliding_window": False, "rope_theta": 10000000,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "use_cache": True,
        "eos_token_id": [3, 4], "first_k_dense_replace": 1, "hidden_act": "silu", "n_shared_experts": 1,
        "norm_topk_prob": True, "num_nextn_predict_layers": 1, "pad_token_id": 3, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "use_qk_norm": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "use_cache": True,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    },
    "mistral": {"hidden_act": "silu", "head_dim": 16, "rope_theta": 1e8, "rms_norm_eps": 1e-05, "use_cache": True},
    "llama": {
        "mlp_bias": False, "pretraining_tp": 1, "attention_bias": False, "eos_token_id": [2, 3, 4],
        "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"}, "rope_theta": 5e5,
    },
    "qwen3": {"attention_bias": False, "max_window_layers": 36, "rope_scaling": None, "use_sliding_window": False},
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "full_attention_interval": 4, "hidden_act": "silu", "linear_conv_kernel_dim": 4,
        "mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
    },
    "qwen3_5_text": {
        "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "hidden_act": "silu",
        "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
    },
    "qwen3_5_moe_text": {
        "attn_output_gate": True, "full_attention_interval": 4, "mtp_num_hidden_layers": 1,
        "partial_rotary_factor": 0.25, "router_aux_loss_coef": 0.001, "norm_topk_prob": True,
    },
}  # fmt: skip
"""Keys of files on the Hub: Qwen2.5, Qwen3-Coder, GLM-4.5, Mixtral, Mistral Small, Llama 3.1, Qwen3, Qwen3-Next
and Qwen3.5."""


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_released_files_load(family: str) -> None:
    config = {"model_type": family, **SIZES, **OWN.get(family, {}), **RELEASED[family]}
    assert ModelShape.from_hf(config).family == family


def test_smollm2_as_it_was_published() -> None:
    assert ModelShape.from_hf(SMOLLM2).num_parameters == 134_515_008
    with pytest.raises(ConfigError, match="rope_interleaved"):
        ModelShape.from_hf(SMOLLM2 | {"rope_interleaved": True})


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5e6}}}, "rope_parameters"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "rope_scaling.type"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": 1e30}}, "rope_scaling.factor"),
        ("llama", {"rope_scaling": YARN | {"beta_fast": 1.0}}, "beta_slow"),
        ("llama", {"rope_scaling": YARN | {"attention_factor": 1e30}}, "attention_factor"),
        ("llama", {"rope_scaling": YARN | {"mscale": 0.7}}, "mscale"),
        ("llama", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1, "attention_factor": 1}}, "mscale"),
        ("llama", {"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor"),
        ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN}, "rope_parameters"),
        ("llama", {"sliding_window": 100}, "sliding_window"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types"),
        ("llama", {"attention_multiplier": 0.1}, "attention_multiplier"),
        ("llama", {"eos_token_id": True}, "eos_token_id"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [1, 1]}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("mixtral", {"num_experts": 4}, "num_experts"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_contradictions_and_values_out_of_range(family: str, change: dict[str, Any], named: str) -> None:
    config = {"model_type": family, **SIZES, **OWN.get(family, {})}
    ModelShape.from_hf(config)
    with pytest.raises(ConfigError, match=named):
        ModelShape.from_hf(config | change)


def test_the_same_twice_is_no_contradiction() -> None:
    config = {"model_type": "llama", **SIZES, "rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}}
    both = config | {"rope_parameters": LLAMA3}
    assert ModelShape.from_hf(both) == ModelShape.from_hf(config)
    assert rope_frequencies(ModelShape.from_hf(both))[0] == 1.0
