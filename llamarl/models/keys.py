"""Keys of a Hugging Face `config.json`: keys that decide the computation, and keys known not to.

An unknown key may scale, cap or mask something, and a model computed without it is another model. So unknown keys are
refused by name. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from llamarl.config import ConfigError

_SIZES = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "original_max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "layer_types",
    "sliding_window",
}  # fmt: skip
_WINDOWS = {"use_sliding_window", "max_window_layers"}
_EXPERTS = {"num_experts", "num_local_experts", "num_experts_per_tok"}
_HYBRID = (_SIZES - {"sliding_window"}) | {
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "full_attention_interval", "partial_rotary_factor",
}  # fmt: skip
_GATED_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
COMPUTED: dict[str, set[str]] = {
    "llama": _SIZES | {"use_sliding_window"},
    "mistral": _SIZES | {"use_sliding_window"},
    "qwen2": _SIZES | _WINDOWS,
    "qwen3": _SIZES | _WINDOWS,
    "qwen3_moe": _SIZES
    | _WINDOWS
    | _EXPERTS
    | {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"},
    "mixtral": _SIZES | _EXPERTS | {"use_sliding_window"},
    "glm4_moe": _SIZES
    | _EXPERTS
    | {
        "attention_bias", "use_qk_norm", "partial_rotary_factor", "moe_intermediate_size", "norm_topk_prob",
        "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group",
        "routed_scaling_factor", "use_sliding_window",
    },
    "qwen3_next": _HYBRID | _GATED_EXPERTS | {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _GATED_EXPERTS,
}  # fmt: skip
"""Keys that are read, by family."""
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "use_qk_norm": False,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "quantization_config": None,
    "num_experts": None,
    "num_local_experts": None,
    "router_jitter_noise": 0,
    "shared_expert_intermediate_size": 0,
    "rope_interleaved": False,
    "use_mrope": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
}
"""Keys that may be absent, with the only value that the decoder computes."""
_FIXED_HYBRID: dict[str, Any] = {
    "use_qk_norm": True, "attn_output_gate": True, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
_FIXED_OF: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"use_qk_norm": True},
    "qwen3_moe": {"use_qk_norm": True},
    "glm4_moe": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "qwen3_next": _FIXED_HYBRID,
    "qwen3_5_text": _FIXED_HYBRID | {"mlp_only_layers": []},
    "qwen3_5_moe_text": _FIXED_HYBRID | {"mlp_only_layers": [], "norm_topk_prob": True, "decoder_sparse_step": 1},
}  # fmt: skip
"""The same for families that compute something else."""
HARMLESS = {
    # the writer of the file, and how to load it
    "model_type", "architectures", "transformers_version", "transformers.js_config", "torch_dtype", "dtype", "auto_map",
    "trust_remote_code",
    "tokenizer_class", "model_name", "name_or_path", "language", "license", "tags", "is_llama_config",
    "finetuning_task",
    "unsloth_version", "unsloth_fixed", "attn_implementation", "use_flash_attn", "use_flash_attention",
    "gradient_checkpointing", "torchscript", "use_bfloat16", "tf_legacy_loss", "low_cpu_mem_usage",
    # what a class of transformers returns, and training from random weights
    "use_cache", "return_dict", "return_dict_in_generate", "output_hidden_states", "output_attentions", "output_scores",
    "output_router_logits", "router_aux_loss_coef", "initializer_range", "pretraining_tp", "is_decoder",
    "cross_attention_hidden_size", "num_nextn_predict_layers", "problem_type", "num_labels", "id2label", "label2id",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype",
    "task_specific_params",
    # tokens that the tokenizer and the generation config decide
    "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "prefix",
    # how text is generated, in files of transformers 4
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values",
}  # fmt: skip
"""Keys that do not change what the decoder computes for given tokens."""


def check_keys(config: Mapping[str, Any], family: str) -> None:
    """Raises ConfigError: a key has a value that the decoder does not compute, or the key is unknown.

    A key with the value null counts as absent. A key that begins with `_` belongs to the library that wrote the file.
    """
    computed, fixed = COMPUTED[family], _FIXED | _FIXED_OF.get(family, {})
    for key, value in config.items():
        if value is None or key in computed:
            continue
        if key in fixed:
            if value != fixed[key]:
                refuse(key, value, f"only {fixed[key]!r} is supported")
        elif key not in HARMLESS and not key.startswith("_"):
            others = sorted(other for other, keys in COMPUTED.items() if key in keys)
            reason = f"{', '.join(others)} has such a key, {family} does not" if others else "no such key is known"
            refuse(key, value, f"{reason}; remove it if it changes nothing that the model computes")


def same_value(config: Mapping[str, Any], *keys: str) -> Any:
    """Returns the value of keys with the same meaning, or None if all are absent. Raises ConfigError: two differ."""
    values = {key: config[key] for key in keys if config.get(key) is not None}
    for key, value in values.items():
        if value is not (first := next(iter(values.values()))) and value != first:
            refuse(key, value, f"it contradicts `{next(iter(values))}` = {first!r}; correct one of them")
    return next(iter(values.values()), None)


def refuse(key: str, value: object, reason: str) -> NoReturn:
    text = repr(value)
    raise ConfigError(f"config.json: `{key}` = {text if len(text) <= 200 else text[:200] + ' ...'}; {reason}")
