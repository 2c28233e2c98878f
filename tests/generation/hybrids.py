"""Small hybrids of attention and delta nets, every tensor random."""

from __future__ import annotations

from dataclasses import replace

import torch

from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.models.transformer import Transformer

DELTA = DeltaShape(layers=(0, 2), num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12)
NEXT = ModelShape(
    family="qwen3_next", hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
    vocab_size=130, max_position_embeddings=128, partial_rotary_factor=0.25, delta=DELTA,
)  # fmt: skip
MOE = MoeShape(
    num_experts=8, experts_per_token=2, expert_size=32, sparse_layers=(0, 1, 2), normalized=True, shared_size=24,
    gates_shared=True,
)  # fmt: skip
HYBRIDS = {
    "qwen3_next_dense": NEXT,
    "qwen3_next": replace(NEXT, moe=MOE),
    "qwen3_5_text": replace(NEXT, family="qwen3_5_text", tie_embeddings=True),
    # One value head for each key head, attention first, a window of three tokens, odd sizes.
    "qwen3_5_text_odd": replace(
        NEXT, family="qwen3_5_text", hidden_size=36, intermediate_size=20, num_layers=4,
        delta=replace(DELTA, layers=(1, 2), num_value_heads=2, key_dim=6, value_dim=10, conv_width=3),
    ),
    "qwen3_5_moe_text": replace(NEXT, family="qwen3_5_moe_text", intermediate_size=32, moe=MOE),
}  # fmt: skip


def hybrid(shape: ModelShape | str, seed: int = 0) -> Transformer:
    """Every parameter random, norms and decays included. Decays are slow enough for states to matter."""
    shape = HYBRIDS[shape] if isinstance(shape, str) else shape
    model, generator = new_model(shape, seed, std=0.1), torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            spread = 0.5 if ".mlp.gate." in key or ".conv_" in key else 0.1
            noise = torch.empty_like(tensor).normal_(0.0, spread, generator=generator)
            tensor.copy_(10 * noise - 2 if key.endswith("A_log") else tensor + noise)
    return model
