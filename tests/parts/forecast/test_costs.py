"""The formulas against numbers worked out by hand, and the directions in which they must move."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import LoraConfig
from llamarl.models.fit import trainer_parts
from llamarl.models.memory import total
from llamarl.parts.forecast.constants import Constants, load_profile
from llamarl.parts.forecast.generation import (
    Generators,
    decode_parts,
    drain_s,
    generation_memory,
    generation_parts,
    prompt_flops,
)
from llamarl.parts.forecast.hardware import GPUS
from llamarl.parts.forecast.request import ASYNCHRONOUS, SYNCHRONOUS
from llamarl.parts.forecast.training import TrainerLayouts, step_flops, training_memory, training_parts
from tests.parts.forecast.conftest import make_request

PERFECT = Constants(
    train_efficiency=1.0,
    prefill_efficiency=1.0,
    half_efficiency_tokens=0.0,
    bandwidth_efficiency=1.0,
    link_efficiency=1.0,
    node_latency_s=0.0,
    network_latency_s=0.0,
    decode_overhead_s=0.0,
    step_overhead_s=0.0,
    microbatch_overhead_s=0.0,
    fsdp_overlap=0.0,
    weight_copies=1,
)
"""Peaks without losses: results can be worked out by hand."""


def layouts_of(sharded: bool = True, **sizes: int) -> TrainerLayouts:
    values = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "dp": 1, "microbatch_tokens": 1 << 20} | sizes
    return TrainerLayouts(**{f"{name}_L": np.array([value]) for name, value in values.items()}, sharded=sharded)


def _generators(tp: int, replicas: int, slots: int, weight_bytes: int = 2) -> Generators:
    columns = {"tp_L": tp, "replicas_L": replicas, "slots_L": slots, "weight_bytes_L": weight_bytes}
    return Generators(**{name: np.array([value]) for name, value in columns.items()})


def _decode(tp: int, active: float, context: float = 1000.0, model: str = "llama3-8b") -> dict[str, float]:
    request = make_request(model, 8, constants=PERFECT)
    parts = decode_parts(
        request, request.pools[0], _generators(tp, 1, 1), active=np.array([active]), context_tokens=context
    )
    return {name: float(np.atleast_1d(value)[0]) for name, value in parts.items()}


def test_decode_of_one_token_reads_the_weights() -> None:
    """8B bf16: 7.5e9 multiplied weights x 2 bytes / 3.35 TB/s = 4.48 ms; KV of 1,000 tokens: 131 MB, 0.04 ms."""
    parts = _decode(tp=1, active=1)
    assert parts["weights"] == pytest.approx(4.48e-3, rel=0.01)
    assert parts["kv"] == pytest.approx(1000 * 2 * 32 * 8 * 128 * 2 / 3.35e12)
    assert parts["compute"] == parts["tensor"] == 0


def test_of_eight_bits_the_head_still_has_sixteen() -> None:
    """7 GB of layers, and 128,256 x 4,096 of the head in twice as many bytes."""
    request = make_request("llama3-8b", 8, constants=PERFECT)
    read = decode_parts(request, request.pools[0], _generators(1, 1, 1, 1), active=np.ones(1), context_tokens=1.0)
    assert read["weights"][0] == pytest.approx((6.979e9 + 2 * 128_256 * 4096) / 3.35e12, rel=1e-3)
    sent = generation_parts(request, request.pools[0], _generators(1, 1, 1, 1), SYNCHRONOUS)["sync"][0]
    assert sent == pytest.approx((6.979e9 + 4 * 128_256 * 4096) / 50e9, rel=2e-3), "embedding and head"


def test_a_prompt_s_logits_are_not_computed() -> None:
    """Its last token is decoded: of 0.6B a quarter is the head."""
    request = make_request("qwen3-0.6b", 8, prompt_tokens=1000)
    layers = 28 * (2 * 1024 * (16 + 8) * 128 + 3 * 1024 * 3072)
    assert prompt_flops(request) == 1000 * (2 * layers + 4 * 28 * 16 * 128 * 500)


def test_a_checkpoint_has_what_is_trained_and_its_moments() -> None:
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}).trainer
    request = make_request("llama3-8b", 8)
    assert request.with_trainer(config).saved_bytes == 12 * request.model.num_parameters
    light = config.model_copy(update={"weights": "bfloat16", "moments": "8bit", "moments_on": "host"})
    assert request.with_trainer(light).saved_bytes == (4 + 8 / 256) * request.model.num_parameters
    adapters = config.model_copy(update={"lora": LoraConfig(rank=8, targets=["q_proj"])})
    assert request.with_trainer(adapters).saved_bytes == 12 * 32 * 8 * 2 * 4096


def test_key_value_heads_are_not_split_beyond_their_number() -> None:
    assert _decode(tp=8, active=64)["kv"] == pytest.approx(_decode(tp=64, active=64)["kv"])
    request = make_request("llama3-8b", 64)
    held = [generation_memory(request, _generators(tp, 1, 8), resident_weights=False)["kv"][0] for tp in (8, 64)]
    assert held[0] == held[1]


def test_decode_becomes_bound_by_compute() -> None:
    assert _decode(tp=1, active=2000, context=1.0)["compute"] > 0


def test_a_mixture_reads_more_experts_in_a_larger_batch() -> None:
    one, many = (_decode(tp=8, active=active, model="qwen3-235b-a22b")["weights"] for active in (1, 4096))
    assert many > 8 * one


def test_training_flops_and_time() -> None:
    """8 FLOPs per parameter and token with recompute, at the peak."""
    request = make_request("llama3-8b", 8, constants=PERFECT, prompt_tokens=1)
    parts = training_parts(request, request.pools[0], layouts_of(dp=8))
    tokens = 64 * (1 + 8 * request.lengths.mean_tokens)
    least_s = 8 * 7.504e9 * tokens / (8 * 989e12)
    assert parts["compute"][0] == pytest.approx(least_s, rel=0.02)  # attention adds under 2 % at this length
    assert parts["compute"][0] > least_s


def test_a_prompt_is_computed_once_for_its_group() -> None:
    """Prompts of 4,000 tokens, each with eight responses of 100: 38,400 tokens, where each alone makes 262,400. The
    head computes the 6,400 of responses.

    Attention of a pair of tokens is 4 x 32 layers x 4,096 channels; pairs are triangles of 4,000 and of 100, and a
    response with its prompt 100 x 4,000.
    """
    request = make_request(
        "llama3-8b", 8, prompts_per_step=8, group_size=8, prompt_tokens=4000, sigma=0.0, mean_tokens=100.0,
        limit_tokens=100, constants=replace(PERFECT, recompute=0.0),
    )  # fmt: skip
    assert request.step_tokens == pytest.approx(8 * (4000 + 8 * 100))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336
    products = 6 * (32 * layer * 38_400 + 128_256 * 4096 * 6400)
    pairs = 8 * (4000**2 / 2 + 8 * (100 * 4000 + 100**2 / 2))
    assert step_flops(request) == pytest.approx(products + 3 * 4 * 32 * 4096 * pairs, rel=1e-3)
    alone = replace(request, prompts_per_step=64, group_size=1)
    assert alone.step_tokens == pytest.approx(64 * 4100)
    one, eight = (training_parts(each, each.pools[0], layouts_of(dp=8))["compute"][0] for each in (alone, request))
    assert one / eight == pytest.approx(step_flops(alone) / step_flops(request)) and one > 6 * eight


def test_gathers_repeat_with_each_microbatch() -> None:
    request = make_request("llama3-8b", 64, constants=PERFECT)
    rank_tokens = 128 + 8 * request.lengths.mean_tokens  # a group on each rank: about 2,530
    assert 3 * 768 < rank_tokens < 4 * 768
    one, four = (
        training_parts(request, request.pools[0], layouts_of(dp=64, microbatch_tokens=tokens))["fsdp"][0]
        for tokens in (1 << 20, 768)
    )
    assert one == pytest.approx(3 * 2 * request.model.num_parameters * 63 / 64 / 400e9)
    assert four == pytest.approx(4 * one)


def test_a_pipeline_has_a_bubble_of_stages_less_one() -> None:
    request = make_request("llama3-8b", 8, constants=PERFECT, prompts_per_step=8, group_size=1)
    longest = request.longest_tokens
    parts = training_parts(request, request.pools[0], layouts_of(pp=4, microbatch_tokens=longest))
    tokens = 8 * (128 + request.lengths.mean_tokens)  # groups of one
    microbatches = np.ceil(tokens / longest)
    activations_s = 2 * tokens * 4096 * 2 / 50e9
    assert parts["pipeline"][0] == pytest.approx(3 / microbatches * parts["compute"][0] + activations_s)


def test_trainer_state_is_sharded() -> None:
    request = make_request("llama3-8b", 64)
    whole = training_memory(request, layouts_of(sharded=False, tp=8, dp=8))["state"][0]
    split = training_memory(request, layouts_of(tp=8, dp=8))["state"][0]
    assert whole == pytest.approx(16 * request.model.num_parameters / 8)
    assert split == pytest.approx(whole / 8)


def test_a_plan_takes_what_a_start_does() -> None:
    """Of a trainer on GPUs, in bfloat16, with activations computed again."""
    request = make_request("llama3-8b", 64)
    config = RunConfig.model_validate({
        "model": {"path": "m"}, "data": {"train": "running_total", "max_prompt_tokens": 128},
        "rollout": {"max_new_tokens": 1024, "group_size": 8, "prompts_per_step": 64},
        "trainer": {
            "device": "cuda", "dtype": "bfloat16", "activation_checkpointing": True, "microbatch_tokens": 4096,
            "parallelism": {"fsdp": 8, "tp": 2},
        },
    })  # fmt: skip
    planned = training_memory(request, layouts_of(dp=8, tp=2, microbatch_tokens=4096))
    started = trainer_parts(config, request.model)
    assert sum(part[0] for part in planned.values()) == pytest.approx(float(total(started)), rel=0.005)


def test_drain_of_equal_responses_takes_their_length() -> None:
    request = make_request("llama3-8b", 8, constants=PERFECT, sigma=0.0, mean_tokens=512.0, limit_tokens=512)
    time_s = drain_s(request, request.pools[0], _generators(8, 1, 16))[0]
    step = _decode(tp=8, active=16, context=128 + 256.0)
    assert time_s == pytest.approx(512 * sum(step.values()), rel=0.01)


def test_stragglers_vanish_with_partial_rollouts_and_grow_with_the_tail() -> None:
    def parts(sigma: float, rules: object) -> float:
        request = make_request("llama3-8b", 8, sigma=sigma)
        return float(generation_parts(request, request.pools[0], _generators(1, 8, 64), rules)["stragglers"][0])  # type: ignore[arg-type]

    assert parts(1.0, ASYNCHRONOUS) == 0
    assert 0 <= parts(0.1, SYNCHRONOUS) < parts(0.5, SYNCHRONOUS) < parts(1.0, SYNCHRONOUS)


def test_a_profile_overrides_constants_and_device(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"constants": {"decode_overhead_s": 0.01}, "gpu": {"memory_bandwidth": 1e12}}))
    profile = load_profile(path)
    assert profile.constants == replace(Constants(), decode_overhead_s=0.01)
    assert profile.device(GPUS["h100-80g"]) == replace(GPUS["h100-80g"], memory_bandwidth=1e12)
    assert load_profile(None).device(GPUS["b200"]) == GPUS["b200"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"constants": {"decode_overhead": 1}}', "did you mean `decode_overhead_s`"),
        ('{"constants": {"decode_overhead_s": "1"}}', r"`constants.decode_overhead_s = '1'` of .*valid number"),
        ('{"constants": {"decode_overhead_s": NaN}}', "finite number"),
        ('{"constants": {"train_efficiency": 0}}', "greater than 0"),
        ('{"constants": {"reserved_share": 1}}', "less than 1"),
        ('{"gpu": {"node_gpus": 8.5}}', "valid integer"),
        ('{"gpu": {"name": 3}}', "`gpu.name = 3` of .*valid string"),
        ('{"gpus": {}}', "did you mean `gpu`"),
        ("[]", "no JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_a_wrong_profile_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profile(path)
