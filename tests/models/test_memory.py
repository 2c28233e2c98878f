"""The sum of memory against closed forms, and against what generators ask for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llamarl.config.roles import LoraConfig
from llamarl.generation.attention import KVCache
from llamarl.generation.model import GeneratorModel
from llamarl.models.fit import CACHE_BLOCK_TOKENS
from llamarl.models.hf import new_model
from llamarl.models.lora import add_adapters
from llamarl.models.memory import (
    GPU_TILE_LOGITS,
    TILE_LOGITS,
    GeneratorLoad,
    TrainerLoad,
    activation_bytes,
    adapter_parameters,
    generator_bytes,
    gpu_tile_logits,
    gpu_work_bytes,
    kv_token_bytes,
    served_bytes,
    total,
    trainer_bytes,
)
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.parts.forecast.shapes import MODELS

SHAPE = ModelShape(
    family="llama", hidden_size=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, intermediate_size=8192,
    vocab_size=128_256, max_position_embeddings=4096, tie_embeddings=True,
)  # fmt: skip
LOAD = TrainerLoad(
    tokens=8192, targets=7000, keys=0, half=True, checkpointing=False, flash=True, on_gpu=True, fused=True
)
D, F, Q, V, P = 2048, 8192, 2048, 512, SHAPE.num_parameters
LAYER = 2 * D * (Q + V) + 3 * D * F + 2 * D


def test_state_is_sixteen_bytes_a_weight_over_all_ranks_that_share_it() -> None:
    for shards, tp in ((1, 1), (4, 1), (1, 2), (4, 2)):
        parts = trainer_bytes(SHAPE, replace(LOAD, shards=shards, tp=tp))
        each = P / (shards * tp)
        assert [parts[kind] for kind in ("weights", "gradients", "moments")] == [4 * each, 4 * each, 8 * each]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_float32_has_no_second_copy_of_the_weights(checkpointing: bool) -> None:
    """16 bytes a weight, where bfloat16 has 18: while a forward runs, or on GPUs until the step ends."""
    load = replace(LOAD, half=False, flash=False, on_gpu=False, fused=False, keys=9000, checkpointing=checkpointing)
    assert trainer_bytes(SHAPE, load)["copies"] == 0
    for fused in (False, True):
        few = replace(LOAD, tokens=100, targets=90, on_gpu=fused, fused=fused, checkpointing=checkpointing)
        # Fused, or recomputed, the backward of the embedding is the worst moment, when the head's copy is gone.
        layers = 2 * 16 * LAYER * (fused or not checkpointing)
        head = 2 * 128_256 * D * (not fused and not checkpointing)
        assert trainer_bytes(SHAPE, few)["copies"] == layers + head


def test_one_layer_keeps_what_its_docstring_lists() -> None:
    """By hand, per token in bfloat16: 8 D of the residual stream, 4 D of normed rows, 6 F, and attention's; by autocast
    16 D of stream and norms, 10 D of casts, and 8 F."""
    heads = 4 * Q + 4 * V + 4 * 32
    assert activation_bytes(SHAPE, LOAD) == 8192 * (12 * D + 6 * F + heads)
    plain = replace(LOAD, fused=False)
    assert activation_bytes(SHAPE, plain) == 8192 * (26 * D + 8 * F + heads)
    norms = activation_bytes(replace(SHAPE, family="qwen3"), LOAD) - activation_bytes(SHAPE, LOAD)
    assert norms == 8192 * 8 * (Q + V)
    exact = replace(LOAD, half=False, flash=False, on_gpu=False, fused=False, keys=9000)
    assert activation_bytes(SHAPE, exact) == 4 * (8192 * (6 * D + 4 * F + 4 * Q) + 9000 * 2 * Q)
    assert activation_bytes(SHAPE, replace(LOAD, tp=4)) == 8192 * (4 * D + (8 * D + 6 * F + heads) / 4)
    assert activation_bytes(SHAPE, replace(plain, tp=4)) == 8192 * (10 * D + (16 * D + 8 * F + heads) / 4)


def test_a_step_at_its_worst_moment() -> None:
    load = replace(LOAD, tokens=1 << 15)
    layer, table = activation_bytes(SHAPE, load), 8 * 64 * (4096 + (1 << 15))
    many = trainer_bytes(SHAPE, load)
    # In the backward of the head: a tile of logits, its gradient and the next tile, the gradient of hidden states,
    # these, and the head's gradient in 16 bits.
    assert many["activations"] == 16 * layer + table + (8 * D << 15)
    assert many["head"] == 10 * GPU_TILE_LOGITS + (4 + 2) * D * 7000 + 2 * 128_256 * D
    # In that of a layer: the head's gradient waits for the embedding's, of which it is a part.
    load = replace(LOAD, tokens=1 << 16, targets=90)
    layer, table = activation_bytes(SHAPE, load), 8 * 64 * (4096 + (1 << 16))
    many = trainer_bytes(SHAPE, load)
    assert many["activations"] == 16 * layer + table + (4 * F << 16)
    assert many["head"] == 4 * 128_256 * D
    few = trainer_bytes(SHAPE, replace(LOAD, tokens=100, targets=90))
    assert few["head"] == 12 * 128_256 * D, "three of the embedding, which is the head"
    few = trainer_bytes(SHAPE, replace(LOAD, tokens=100, targets=90, on_gpu=False, fused=False))
    assert few["head"] == 12 * TILE_LOGITS + 2 * D * 90 + 4 * 128_256 * D
    thrifty = trainer_bytes(SHAPE, replace(load, checkpointing=True))
    assert thrifty["activations"] == (4 * D * 16 << 16) + layer + table + (4 * F << 16)
    assert thrifty["copies"] == 2 * 16 * LAYER
    thrifty, layer = (
        one(SHAPE, replace(load, checkpointing=True, on_gpu=False, fused=False))
        for one in (trainer_bytes, activation_bytes)
    )
    assert thrifty["activations"] == (4 * D * 16 << 16) + layer + table + (6 * F + 12 * D << 16)
    assert thrifty["copies"] == 2 * LAYER


def test_tiles_on_a_gpu_are_as_wide_as_hidden_states_whoever_computes() -> None:
    """With `trainer.compile`, and in float32, too."""
    load = replace(LOAD, tokens=64, targets=64_000, fused=False)  # so that the head decides
    for half, each, width in ((True, 14 + 2, 2), (False, 16 + 4, 4)):
        parts = trainer_bytes(SHAPE, replace(load, half=half, flash=half))
        assert parts["head"] == each * 64_000 * D + width * 128_256 * D


def test_few_rows_have_tiles_of_16k_columns_on_a_gpu() -> None:
    """As long as a tile has at most 256 MiB; as the trainer cuts them."""
    for rows, width, columns in ((1000, 2048, 16_384), (4096, 2048, 16_384), (7000, 2048, 9586), (64_000, 2048, 2048)):
        assert gpu_tile_logits(rows, width) // rows == columns


def test_a_pipeline_s_stage_has_its_layers_and_one_end() -> None:
    untied = replace(SHAPE, tie_embeddings=False)
    parts = trainer_bytes(untied, replace(LOAD, pp=4))
    assert parts["weights"] == 4 * (4 * LAYER + 128_256 * D)


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]])
def test_adapters_are_those_that_are_made(targets: list) -> None:
    small = replace(SHAPE, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=96, vocab_size=50)
    lora, model = LoraConfig(rank=3, targets=targets), new_model(small, 0, 0.1)
    add_adapters(model, lora, 0, torch.bfloat16)
    parts = trainer_bytes(small, replace(LOAD, lora=lora))
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert adapter_parameters(small, lora) == trained
    assert parts["weights"] == sum(one.nbytes for one in model.parameters())
    assert (parts["gradients"], parts["moments"]) == (4 * trained, 8 * trained)


def test_a_critic_has_no_vocabulary() -> None:
    untied = replace(SHAPE, tie_embeddings=False)
    policy, critic = (trainer_bytes(untied, replace(LOAD, is_critic=one)) for one in (False, True))
    assert policy["weights"] - critic["weights"] == 4 * 128_256 * D
    assert critic["head"] == 0 < trainer_bytes(untied, replace(LOAD, tokens=100))["head"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("tp", [1, 2, 16])
def test_a_generator_s_weights_are_those_it_asks_for(dtype: str, tp: int, tied: bool) -> None:
    """Beyond the number of key/value heads these are repeated."""
    shape = replace(SHAPE, family="qwen2", tie_embeddings=tied)
    ranks = SimpleNamespace(size=tp, rank=0)
    model = GeneratorModel(shape, dtype, "cpu", ranks)  # pyrefly: ignore[bad-argument-type]
    asked = sum(spec.num_bytes for spec in model.specs())
    assert served_bytes(shape, {"float32": 4, "bfloat16": 2, "int8": 1}[dtype], tp) == asked
    cache = KVCache(
        num_layers=16, num_blocks=1, num_kv_heads=model.shape.num_kv_heads, head_dim=64, dtype=model.kv_dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    block = cache.keys_L_C_J_K_S.nbytes + cache.values_L_C_J_S_K.nbytes
    assert CACHE_BLOCK_TOKENS * kv_token_bytes(shape, tp, model.kv_dtype.itemsize) == block
    assert KVCache.block_bytes(model.shape, model.kv_dtype) == block


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("tp", "expert_size"), [(1, 512), (2, 512), (4, 512), (4, 1024)])
def test_a_mixture_s_are_too(dtype: str, tp: int, expert_size: int) -> None:
    """A dense layer first, and a shared expert; over four ranks experts of 512 columns go by number, others do not."""
    moe = MoeShape(
        num_experts=16, experts_per_token=2, expert_size=expert_size, sparse_layers=(1, 2, 3), shared_size=1024
    )
    shape = replace(SHAPE, family="glm4_moe", num_layers=4, vocab_size=1024, moe=moe)
    ranks = SimpleNamespace(size=tp, rank=0)
    model = GeneratorModel(shape, dtype, "cpu", ranks)  # pyrefly: ignore[bad-argument-type]
    asked = sum(spec.num_bytes for spec in model.specs())
    assert served_bytes(shape, {"bfloat16": 2, "int8": 1}[dtype], tp) == asked


def test_what_a_generator_holds() -> None:
    load = GeneratorLoad(width=2, kv_width=2, kv_tokens=4096, rows=64, prefill_tokens=2048)
    parts, one = generator_bytes(SHAPE, load), served_bytes(SHAPE, 2)
    assert parts["weights"] == 2 * one
    assert parts["keys and values"] == 4096 * 2 * 16 * V * 2
    lora = LoraConfig(rank=8, targets=["o_proj"])
    frozen = generator_bytes(SHAPE, replace(load, lora=lora))["frozen"]
    assert frozen == 2 * 16 * Q * D + 4 * adapter_parameters(SHAPE, lora)


def test_many_layouts_at_once_are_each_by_itself() -> None:
    """As the planner asks."""
    tp, shards, pp = np.array([1, 2, 8, 1]), np.array([1, 4, 1, 64]), np.array([1, 1, 2, 4])
    tokens = np.array([2048, 9000, 100, 40_000])
    many = replace(LOAD, tp=tp, shards=shards, pp=pp, tokens=tokens, targets=tokens / 2, keys=0 * tokens)
    found = trainer_bytes(MODELS["llama3-8b"], many)
    for index in range(4):
        sizes = {"tp": int(tp[index]), "shards": int(shards[index]), "pp": int(pp[index])}
        one = replace(LOAD, **sizes, tokens=int(tokens[index]), targets=tokens[index] / 2)
        alone = trainer_bytes(MODELS["llama3-8b"], one)
        for kind, value in alone.items():
            assert np.broadcast_to(found[kind], 4)[index] == pytest.approx(float(value)), kind
        assert np.broadcast_to(total(found), 4)[index] == pytest.approx(float(total(alone)))


LLAMAS = {"1B": (2048, 16, 32, 8192), "8B": (4096, 32, 32, 14_336), "70B": (8192, 80, 64, 28_672)}
"""Hidden size, layers, heads and width of a feed-forward."""


@pytest.mark.parametrize(
    ("model", "rows", "tp", "exceeds"),
    [("1B", 64, 1, False), ("8B", 256, 1, False), ("70B", 64, 8, False), ("70B", 512, 8, True)],
)
def test_what_a_gpu_leaves_to_logits_graphs_and_libraries(model: str, rows: int, tp: int, exceeds: bool) -> None:
    """Of 80 GB 5 % suffice, but for 512 rows of logits on ranks that share a model."""
    hidden, num_layers, num_heads, inner = LLAMAS[model]
    shape = ModelShape(
        family="llama", hidden_size=hidden, num_layers=num_layers, num_heads=num_heads, num_kv_heads=8,
        head_dim=hidden // num_heads, intermediate_size=inner, vocab_size=128_256, max_position_embeddings=8192,
    )  # fmt: skip
    work = gpu_work_bytes(shape, rows, 8192, tp)
    assert rows * shape.vocab_size * 4 < work < 8e9
    assert bool(work > 0.05 * 80e9) is exceeds
