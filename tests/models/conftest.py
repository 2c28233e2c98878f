"""Random tiny models of each family in transformers, the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
}
CASES: dict[str, tuple[type[transformers.PreTrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rms_norm_eps": 1e-5}),
    "llama_tied_scaled_rope": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_wide_heads": (transformers.LlamaConfig, {"head_dim": 24}),
    "llama_one_kv_head": (transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "llama_linear_rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    ),
    "llama_yarn": (transformers.LlamaConfig, {"rope_parameters": YARN_ROPE | {"attention_factor": 1.25}}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "mistral_window_of_the_context": (transformers.MistralConfig, {"sliding_window": 256}),
    "mistral_yarn": (
        transformers.MistralConfig,
        {"sliding_window": None, "rope_parameters": YARN_ROPE | {"beta_fast": 4.0, "beta_slow": 0.5}},
    ),
    "qwen2_yarn": (transformers.Qwen2Config, {"head_dim": 32, "rope_parameters": YARN_ROPE | {"truncate": False}}),
    "qwen3_yarn_mscale": (
        transformers.Qwen3Config,
        {"head_dim": 32, "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_tied": (transformers.Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "qwen3_tied": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=CASES)
def oracle(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    """A model whose every parameter is random, biases and norms included, so that none can be forgotten unseen."""
    kind, options = CASES[request.param]
    model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | options), attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model
