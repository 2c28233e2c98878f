"""Small mixtures of experts of each family, every tensor random."""

from __future__ import annotations

from dataclasses import replace

import torch

from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.transformer import Transformer

MOE = MoeShape(num_experts=8, experts_per_token=2, expert_size=32, sparse_layers=(0, 1, 2), normalized=True)
QWEN3_MOE = ModelShape(
    family="qwen3_moe", hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
    vocab_size=130, max_position_embeddings=128, moe=MOE,
)  # fmt: skip
MIXTURES = {
    "qwen3_moe": QWEN3_MOE,
    # A dense layer between, an odd width, gates that do not add up to 1.
    "qwen3_moe_odd": replace(
        QWEN3_MOE, tie_embeddings=True,
        moe=replace(MOE, sparse_layers=(0, 2), expert_size=20, normalized=False, experts_per_token=3),
    ),
    "mixtral": replace(QWEN3_MOE, family="mixtral", intermediate_size=32),
    "glm4_moe": replace(
        QWEN3_MOE, family="glm4_moe", partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=False,
        moe=replace(
            MOE, sparse_layers=(1, 2), scoring="sigmoid", scaling=1.5, num_groups=4, groups_per_token=2, shared_size=32,
            has_selection_bias=True,
        ),
    ),
}  # fmt: skip


def mixture(name: str, seed: int = 0) -> Transformer:
    """Every parameter random, norms, biases and the selection bias included."""
    model, generator = new_model(MIXTURES[name], seed, std=0.1), torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith("bias"):
                tensor.zero_()
            spread = 0.5 if ".mlp.gate." in key else 0.1
            tensor.add_(torch.empty_like(tensor).normal_(0.0, spread, generator=generator))
    return model
