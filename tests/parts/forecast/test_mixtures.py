"""Mixtures of experts in plans, by hand: sizes, what a rank holds, what it sends, and what generators serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llamarl.config.roles import ATTENTION, LoraConfig, ParallelismConfig
from llamarl.generation.model import GeneratorModel
from llamarl.models.memory import TrainerLoad, expert_share, trainer_bytes
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.parts.forecast.candidates import generator_candidates, trainer_candidates
from llamarl.parts.forecast.feasibility import plans
from llamarl.parts.forecast.hardware import GPUS
from llamarl.parts.forecast.layouts import generator_layout, trainer_layout
from llamarl.parts.forecast.links import exchange_s
from llamarl.parts.forecast.request import ASYNCHRONOUS
from llamarl.parts.forecast.shapes import MODELS, DecoderShape, find_model
from llamarl.parts.forecast.sync import weight_transfer
from llamarl.parts.forecast.training import (
    exchanged_bytes,
    inverse_efficiency,
    step_flops,
    training_memory,
    training_parts,
)
from llamarl.parts.forecast.transfer_time import LinkSpeeds
from llamarl.run.checks import check_mixture_layout
from llamarl.sharding.reshard import plan_reshard
from tests.parts.forecast.conftest import make_request
from tests.parts.forecast.test_costs import PERFECT, layouts_of

FILE = Path(__file__).parents[2] / "models/published.json"
PUBLISHED = {one["name"]: one for one in json.loads(FILE.read_text())["mixtures"]}
CARDS = {"qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235.1, 22.2), "glm-4.5-air": (106.85, 12.0)}
"""Billions of parameters in all layers and ends, and of those that a token meets, by the models' cards."""


@pytest.mark.parametrize("name", CARDS)
def test_sizes_are_those_of_the_cards(name: str) -> None:
    """Of a token Qwen counts embedding and head, GLM neither; its 110B have the layer that predicts further tokens."""
    model, (total, active) = MODELS[name], CARDS[name]
    assert model.num_parameters == pytest.approx(total * 1e9, rel=0.002)
    ends = model.vocab_size * model.hidden_size
    met = model.matmul_parameters + (ends if name.startswith("qwen") else -ends)
    assert met == pytest.approx(active * 1e9, rel=0.017), "cards have two digits"
    file = PUBLISHED[model.path]
    assert model.num_parameters == file["parameters"]
    assert replace(DecoderShape.from_hf(file["config"]), name=name, path=model.path) == model
    assert replace(find_model(model.path), name=name) == model, "nothing has to be fetched"


GLM = ModelShape.from_hf(PUBLISHED["zai-org/GLM-4.5-Air"]["config"] | {"num_hidden_layers": 3})
QWEN = ModelShape.from_hf(PUBLISHED["Qwen/Qwen3-30B-A3B"]["config"] | {"num_hidden_layers": 2, "mlp_only_layers": [1]})
WIDE = replace(QWEN, moe=replace(QWEN.moe, expert_size=1024, num_experts=12))  # pyrefly: ignore[bad-argument-type]


def planned(shape: ModelShape) -> DecoderShape:
    return DecoderShape.from_hf(shape.to_hf())


@pytest.mark.parametrize("shape", [GLM, QWEN], ids=["shared and dense first", "one dense"])
def test_weights_are_those_of_the_model(shape: ModelShape) -> None:
    with torch.device("meta"):
        made = {name: tuple(one.shape) for name, one in Transformer(shape).state_dict().items()}
    assert planned(shape).weights() == made


QWEN_235B = MODELS["qwen3-235b-a22b"]
EXPERTS_235B = 94 * 3 * 128 * 4096 * 1536
"""Scalars of 94 layers with 128 experts of three matrices."""


def test_a_rank_holds_its_part_of_all_weights() -> None:
    """235B, experts by number over 32 of 128 ranks, and rows of each over four: a quarter of four experts' 1,536."""
    load = TrainerLoad(
        tokens=8192, targets=8192, keys=0, half=True, checkpointing=True, flash=True, on_gpu=True, fused=True,
        shards=128, ep=32,
    )  # fmt: skip
    dense = QWEN_235B.num_parameters - EXPERTS_235B
    rank = dense / 128 + 94 * 3 * 4 * 4096 * 384
    parts = trainer_bytes(QWEN_235B, load)
    assert parts["weights"] + parts["gradients"] + parts["moments"] == pytest.approx(16 * rank, rel=1e-9)
    assert rank == pytest.approx(1.8367e9, rel=1e-4)
    # Two layers in bfloat16, but a layer's experts once, and its gradients in bfloat16 and float32; ends are float32.
    layer, own, ends = (
        2 * 4096 * (64 + 4) * 128 + 4096 * 128 + 2 * (4096 + 128),
        3 * 4 * 4096 * 1536,
        2 * 151_936 * 4096,
    )
    assert parts["copies"] == pytest.approx((2 * 2 + 6) * layer + (2 + 6) * own + 4 * ends, rel=1e-6)
    whole = trainer_bytes(QWEN_235B, replace(load, ep=1))  # an expert for each rank
    assert whole["copies"] == pytest.approx((2 * 2 + 6) * (layer + 32 * own) + 4 * ends, rel=1e-6)


@pytest.mark.parametrize(
    ("shards", "ep", "share"),
    [(64, 1, 2 / 128), (96, 1, 2 / 128), (256, 1, 1 / 128), (96, 96, 1 / 96), (256, 2, 1 / 256)],
)
def test_experts_are_not_always_cut_evenly(shards: int, ep: int, share: float) -> None:
    """FSDP2 gives whole experts without `ep`, so of 96 ranks 32 have none, and of 256 half."""
    assert expert_share(QWEN_235B, shards, ep) == pytest.approx(share)
    request = make_request(QWEN_235B, 512)
    state = training_memory(request, layouts_of(dp=shards, ep=ep))["state"][0]
    assert state == pytest.approx(16 * ((QWEN_235B.num_parameters - EXPERTS_235B) / shards + EXPERTS_235B * share))


def test_rows_go_to_their_experts_and_back() -> None:
    """8 experts of 4,096 channels in 2 bytes, there and back, seven eighths of them to others."""
    request = make_request(QWEN_235B, 256, constants=PERFECT)
    ep, tokens = np.array([1, 8, 32]), np.full(3, 1000.0)
    sent = exchanged_bytes(request, ep, tokens)
    assert sent.tolist() == [0, 1000 * 2 * 8 * 4096 * 2 * 7 / 8, 1000 * 2 * 8 * 4096 * 2 * 31 / 32]
    seconds = exchange_s(GPUS["h100-80g"], PERFECT, ep, sent)
    assert seconds[1] == pytest.approx(sent[1] / 450e9 / PERFECT.link_efficiency), "within the host"
    assert seconds[2] == pytest.approx(sent[2] * 24 / 31 / 50e9 / PERFECT.link_efficiency), "24 of 31 are elsewhere"
    layouts = layouts_of(dp=256, ep=32)
    part = training_parts(request, request.pools[0], layouts)["exchange"][0]
    tokens = 128 + 8 * request.lengths.mean_tokens  # the fullest rank has one group: its prompt once, eight responses
    assert part == pytest.approx(1.3 * 3 * 94 * tokens / 1000 * seconds[2])
    assert training_parts(request, request.pools[0], layouts_of(dp=256))["exchange"][0] == 0


def test_gathers_of_experts_come_from_the_ranks_that_have_them() -> None:
    """Without `ep`, 128 experts over 256 ranks are sent as if the other half had one each, too."""
    request = make_request(QWEN_235B, 256, constants=replace(PERFECT, fsdp_overlap=0.0))
    alone, shared = (
        training_parts(request, request.pools[0], layouts_of(dp=256, ep=ep, microbatch_tokens=1 << 30))["fsdp"][0]
        for ep in (1, 64)
    )
    dense = (QWEN_235B.num_parameters - EXPERTS_235B) * 255 / 256 / 400e9
    assert alone == pytest.approx(6 * (dense + EXPERTS_235B * 255 / 128 / 400e9))
    assert shared == pytest.approx(6 * (dense + EXPERTS_235B / 64 * 3 / 4 / 50e9)), "the four are on four hosts"


def test_experts_multiply_few_rows_slowly() -> None:
    """With 128 rows of each expert at half the pace, and with the fullest rank 1.3 times as many."""
    constants = replace(make_request(QWEN_235B, 256).constants, half_efficiency_tokens=0.0)
    request, ep, tokens = make_request(QWEN_235B, 256, constants=constants), np.array([1, 8]), np.full(2, 2048.0)
    # 2,048 x 8 / 128 = 128 rows of each expert, or with those of eight ranks 1,024.
    slower = inverse_efficiency(request, ep, tokens) * constants.train_efficiency - 1
    assert slower[1] / slower[0] == pytest.approx(1.3 * (1 + 1 / 8) - 1)
    step_tokens = 64 * (128 + 8 * request.lengths.mean_tokens)
    experts = 2 * 94 * 8 * 3 * 4096 * 1536 * 4 * step_tokens
    assert slower[0] == pytest.approx(experts / step_flops(request)), "all others are as fast as ever"
    dense = inverse_efficiency(make_request("llama3-8b", 8), ep[:1], tokens[:1])
    assert dense[0] == pytest.approx((1 + 128 / 2048) / constants.train_efficiency)


def test_layouts_are_those_that_a_run_accepts() -> None:
    request = make_request(QWEN_235B, 96)
    layouts = trainer_candidates(request, request.pools[0], ASYNCHRONOUS)
    assert {*layouts.ep_L.tolist()} == {1, 2, 4, 8, 16, 32, 64} and not (layouts.dp_L % layouts.ep_L).any()
    for dp, ep in {*zip(layouts.dp_L.tolist(), layouts.ep_L.tolist(), strict=True)}:
        check_mixture_layout(QWEN_235B, ParallelismConfig(fsdp=dp, ep=ep), "235B", "trainer")
    assert {*np.concatenate([layouts.tp_L, layouts.cp_L, layouts.pp_L]).tolist()} == {1}
    assert {*trainer_candidates(make_request("llama3-8b", 8), request.pools[0], ASYNCHRONOUS).ep_L.tolist()} == {1}
    odd = replace(QWEN_235B, moe=WIDE.moe)
    assert {*generator_candidates(replace(request, model=odd), request.pools[0], ASYNCHRONOUS, 1).tp_L.tolist()} == {
        1, 2, 4, 8, 16, 32, 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "up"),
    [(GLM, (128, 352, 4096)), (QWEN, (32, 768, 2048)), (WIDE, (12, 256, 2048))],
    ids=["glm", "thin", "wide"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_generators_hold_what_the_engine_asks_for(shape: ModelShape, up: tuple[int, ...], dtype: str) -> None:
    """Experts whole where columns would be few, else columns of all, and bytes with a scale for each row."""
    weights = planned(shape).weights()
    layout = generator_layout(weights, num_kv_heads=shape.num_kv_heads, tp=4, replicas=2, dtype=dtype)
    source = trainer_layout(weights, fsdp=4, ep=2, first_device=8)
    plan = plan_reshard(source, layout)
    for rank in (0, 3, 5):
        ranks = SimpleNamespace(size=4, rank=rank % 4)
        asked = GeneratorModel(shape, dtype, "meta", ranks).specs()  # pyrefly: ignore[bad-argument-type]
        boxes = {spec.name: spec.box for spec in asked if spec.part == "values"}
        assert boxes.items() >= layout.boxes(rank).items()
        known = [spec for spec in asked if spec.name in weights]
        assert sum(move.num_bytes for move in plan.moves_to(rank)) == sum(spec.num_bytes for spec in known)
    box = layout.parameters[f"model.layers.{shape.num_layers - 2}.mlp.experts.up_proj"].box(3)
    assert box and box.shape == up


def test_trainers_cut_experts_by_number_and_then_their_rows() -> None:
    """Four ranks, experts over each two neighbors: 0 and 2 have the first half of them."""
    weights = planned(QWEN).weights()
    layout = trainer_layout(weights, fsdp=4, ep=2)
    up, router = layout.parameters["model.layers.0.mlp.experts.up_proj"], "model.layers.0.mlp.gate.weight"
    starts = [up.box(rank).starts for rank in range(4)]  # pyrefly: ignore[missing-attribute]
    assert starts == [(0, 0, 0), (64, 0, 0), (0, 384, 0), (64, 384, 0)]
    assert layout.parameters[router].dtype == "float32" and up.dtype == "bfloat16"
    alone = trainer_layout(weights, fsdp=4).parameters["model.layers.0.mlp.experts.up_proj"]
    assert [alone.box(rank).starts[0] for rank in range(4)] == [0, 32, 64, 96]  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize(("weight_bytes", "seconds"), [(2, 1.49), (1, 0.75)])
def test_sync_of_235b(weight_bytes: int, seconds: float) -> None:
    """From 128 ranks, 32 of which share experts, to 16 replicas of 8: an eighth of all weights over each adapter."""
    links = LinkSpeeds(network=40e9, host=360e9)
    transfer, _ = weight_transfer(QWEN_235B, links, (1, 1, 128, 1, 32), (16, 8, weight_bytes), 128, 8)
    assert transfer.seconds == pytest.approx(seconds, rel=0.02)


def test_adapters_of_the_attention_are_planned() -> None:
    request = make_request("qwen3-30b-a3b", 8, lora=LoraConfig(rank=16, targets=[*ATTENTION]))
    synchronous, asynchronous = plans(request)
    assert synchronous and asynchronous
    trained = 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert request.trained_parameters == trained
    state = asynchronous.trainer.memory_parts["state"] * asynchronous.trainer.gpus
    assert state > 2 * MODELS["qwen3-30b-a3b"].num_parameters, "frozen experts are kept as they are"
