"""What executors take by a run's settings, and the lever that is named: it makes the run fit, by the same sum."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config import RunConfig
from llamarl.config.roles import CriticConfig, ReferenceConfig, RewardModelConfig
from llamarl.models import fit, memory
from llamarl.models.fit import GIB, holdings, taken, way_out
from llamarl.models.memory import total
from llamarl.models.shape import ModelShape, MoeShape
from tests.nightly import examples, nightly

SHAPE = ModelShape(
    family="llama", hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=14_336, vocab_size=128_256, max_position_embeddings=8192,
)  # fmt: skip


def run_of(**sections: Any) -> RunConfig:
    data: dict[str, Any] = {
        "model": {"path": "m"}, "data": {"train": "running_total", "max_prompt_tokens": 512},
        "rollout": {"max_new_tokens": 1024, "group_size": 8, "prompts_per_step": 64},
        "trainer": {"device": "cuda", "dtype": "bfloat16", "microbatch_tokens": 16_384},
        "generator": {"device": "cuda", "dtype": "bfloat16"},
    }  # fmt: skip
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    return RunConfig.model_validate(data)


def device_bytes(config: RunConfig) -> float:
    """Of all executors together."""
    return float(sum(one.num_ranks * total(one.parts) for one in holdings(config, SHAPE, {})))


class TestAHolding:
    def test_of_a_gpu_leaves_copies_to_the_host(self) -> None:
        trainer, generator = holdings(run_of(checkpoint={"mirror": True}), SHAPE, {})
        num = SHAPE.num_parameters
        assert trainer.on_gpu and trainer.host["checkpoint"] == 12 * num and trainer.host["mirror"] == 4 * 12 * num
        assert trainer.host["slots"] == pytest.approx(2 * 2 * num, rel=0.01)
        assert generator.parts["weights"] == pytest.approx(2 * 2 * num, rel=0.01)
        assert generator.host == {}

    def test_of_a_cpu_is_all_in_one_place(self) -> None:
        config = run_of(trainer={"device": "cpu"}, generator={"device": "cpu", "replicas": 3})
        trainer, *generators = holdings(config, SHAPE, {})
        assert trainer.host == {} and {"checkpoint", "slots"} <= trainer.parts.keys()
        assert [one.executor for one in generators] == ["generator-0", "generator-1", "generator-2"]
        packed = 2 * 2 * SHAPE.num_parameters
        assert generators[0].parts["weights"] - packed == pytest.approx(2 * SHAPE.num_parameters, rel=0.01), (
            "a slot serves"
        )

    @pytest.mark.parametrize("transport", ["nixl", "cuda_ipc"])
    def test_of_reads_between_gpus_has_slots_on_the_device(self, transport: str) -> None:
        (trainer, _) = holdings(run_of(weight_sync={"transport": transport}), SHAPE, {})
        assert trainer.parts["slots"] == pytest.approx(4 * SHAPE.num_parameters, rel=0.01)
        assert "slots" not in trainer.host

    def test_of_adapters_sends_adapters(self) -> None:
        run = run_of(trainer={"lora": {"rank": 16}})
        (trainer, generator), lora = holdings(run, SHAPE, {}), run.trainer.lora
        assert lora and trainer.host["slots"] == 8 * memory.adapter_parameters(SHAPE, lora)
        assert "frozen" in generator.parts

    def test_of_a_cache_is_what_is_set_or_one_sequence(self) -> None:
        (_, fixed) = holdings(run_of(generator={"kv_cache_bytes": 5 << 30}), SHAPE, {})
        assert fixed.parts["keys and values"] == pytest.approx(5 << 30) and fixed.grows == 0
        (_, free) = holdings(run_of(generator={"max_running": 64}), SHAPE, {})
        per_token = 2 * 32 * 8 * 128 * 2
        assert free.parts["keys and values"] == 1536 * per_token
        assert free.parts["keys and values"] + free.grows == 64 * 8192 * per_token

    def test_of_other_models(self) -> None:
        critic = CriticConfig.model_validate({"device": "cuda", "parallelism": {"fsdp": 2}})
        models = {
            "critic": critic, "reference": ReferenceConfig(dtype="bfloat16"),
            "reward-model": RewardModelConfig(path="r", dtype="float32", device="cuda"),
        }  # fmt: skip
        shapes = {name: (one, [SHAPE] * (2 if name == "reference" else 1)) for name, one in models.items()}
        found = {one.executor: one for one in holdings(run_of(), SHAPE, shapes)}
        num = SHAPE.num_parameters
        head = SHAPE.vocab_size * SHAPE.hidden_size
        assert found["critic"].num_ranks == 2 and found["critic"].parts["moments"] == 4 * (num - head)
        assert "slots" not in found["critic"].host
        assert found["reference"].parts["weights"] == pytest.approx(2 * 2 * num, rel=0.01), "two teachers"
        assert not found["reference"].on_gpu and found["reward-model"].on_gpu
        assert found["reward-model"].parts["weights"] == pytest.approx(4 * num, rel=0.01)

    def test_of_more_ranks_is_less_each(self) -> None:
        whole, cut = (next(holdings(run_of(trainer={"parallelism": {"fsdp": n}}), SHAPE, {})) for n in (1, 8))
        assert cut.num_ranks == 8 and cut.parts["moments"] == whole.parts["moments"] / 8
        assert cut.host["slots"] == whole.host["slots"] / 8

    def test_is_said_by_kind(self) -> None:
        assert (
            taken({"weights": 3 * GIB, "moments": GIB, "rest": 0.01 * GIB}) == "4.01 GiB (weights 3.00, moments 1.00)"
        )
        assert taken({"weights": 2.0**20}) == "1.00 MiB"


def said_settings(text: str) -> dict[str, Any]:
    """The settings that a sentence names."""
    lines = re.fullmatch(r"(?:set|with) (.*?)(?:, with which it fits| it still lacks .*)", text)
    assert lines, text
    return {
        option: tomllib.loads(f"x = {value}")["x"]
        for option, value in (one.split(" = ", 1) for one in lines[1].split(" and "))
    }


def changed(config: RunConfig, settings: dict[str, Any]) -> RunConfig:
    found = fit._with(config, settings)
    assert found is not None
    return found


@nightly("recipes/test_hardware.py and run/test_memory.py name levers by day")
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    there=st.floats(4 * GIB, 300 * GIB), kv=st.none() | st.integers(1 << 28, 1 << 37),
    dtype=st.sampled_from(["float32", "bfloat16"]), microbatch=st.sampled_from([1536, 4096, 40_000]),
)  # fmt: skip
def test_the_lever_that_is_named_makes_it_fit(there: float, kv: int | None, dtype: str, microbatch: int) -> None:
    config = run_of(
        generator={"kv_cache_bytes": kv, "dtype": dtype}, trainer={"dtype": dtype, "microbatch_tokens": microbatch}
    )

    def lacking(other: RunConfig) -> float:
        return device_bytes(other) - there

    if lacking(config) <= 0:
        return
    text = way_out(config, SHAPE, lacking)
    if "it lacks" in text:
        return
    named = said_settings(text)
    fits = lacking(changed(config, named)) <= 0
    assert fits == text.endswith("with which it fits")
    if not fits:
        assert f"it still lacks {taken({'': lacking(changed(config, named))})}; use a smaller model" in text
    elif len(named) == 1:
        (option,) = named
        cheaper = []
        for name, values in fit.levers(config, SHAPE):
            if name == option:
                break
            cheaper += [{name: value} for value in values]
        assert not any(fit._fits(config, one, lacking) for one in cheaper), "the cheapest comes first"
    else:
        for option in named:
            fewer = {name: value for name, value in named.items() if name != option}
            assert not fit._fits(config, fewer, lacking), f"{option} was not needed"


@pytest.mark.parametrize(
    ("there", "text"),
    [
        (190, "trainer.activation_checkpointing = true, with which it fits"),
        (70, "= 8192 and trainer.moments_on = 'host' and trainer.weights = 'bfloat16', with which it fits"),
        (10, "it still lacks"),
    ],
)
def test_sentences(there: float, text: str) -> None:
    found = way_out(run_of(), SHAPE, lambda other: device_bytes(other) - there * GIB)
    assert text in found


def test_the_longest_sequence_is_that_of_any_source() -> None:
    """Prompt and response together: of one source the response is longer, of another the prompt."""
    sources = [
        {"name": "running_total", "max_new_tokens": 1100},
        {"name": "list_functions", "max_prompt_tokens": 1000, "max_new_tokens": 700},
    ]
    assert fit.longest(run_of(), SHAPE) == (512, 1024)
    assert fit.longest(run_of(data={"train": sources}), SHAPE) == (1000, 700)
    assert fit.longest(run_of(data={"train": sources[:1]}), SHAPE) == (512, 1100)


def test_a_longest_sequence_still_fits_a_smaller_microbatch() -> None:
    options = dict(fit.levers(run_of(), SHAPE))
    assert options["trainer.microbatch_tokens"] == [8192, 4096, 2048, 1536]
    assert options["generator.max_running"] == [64, 32, 16, 8]


@nightly("by day a sentence names each lever")
@pytest.mark.parametrize(("weights", "more"), [("float32", ""), ("bfloat16", " and trainer.weights = 'float32'")])
def test_adapters_come_before_more_devices(weights: str, more: str) -> None:
    """In place of weights in bfloat16, with which they do not go."""

    def lacking(other: RunConfig) -> float:
        return float(total(next(iter(holdings(other, SHAPE, {}))).parts)) - 28 * GIB

    run = run_of(trainer={"device": "cuda", "dtype": "bfloat16", "microbatch_tokens": 16_384, "weights": weights})
    found = way_out(run, SHAPE, lacking)
    assert found.endswith(f"microbatch_tokens = 8192 and trainer.lora = {{rank = 16}}{more}, with which it fits")


def test_a_mixture_shares_its_experts_and_adapts_its_attention() -> None:
    """48 layers of 128 experts: over 32 ranks what a layer gathers is most, and a rank can gather a half of it."""
    moe = MoeShape(num_experts=128, experts_per_token=8, expert_size=1536, sparse_layers=tuple(range(48)))
    shape = replace(SHAPE, family="qwen3_moe", num_layers=48, moe=moe)
    trainer = {"parallelism": {"fsdp": 32}, "activation_checkpointing": True, "microbatch_tokens": 1536}
    config = run_of(trainer=trainer | {"moments_on": "host"}, generator={"tensor_parallel": 8})

    def needed(one: RunConfig) -> float:
        return float(total(next(holdings(one, shape, {})).parts))

    for less, ep in ((1, 2), (19, 8)):
        there = needed(config) - less * GIB
        found = way_out(config, shape, lambda one, there=there: needed(one) - there)
        assert found == f"set trainer.parallelism.ep = {ep}, with which it fits"
    options, dense = dict(fit.levers(config, shape)), dict(fit.levers(config, SHAPE))
    assert options["trainer.parallelism.ep"] == [2, 4, 8, 16, 32] and dense["trainer.parallelism.ep"] == []
    assert options["trainer.lora"] == [{"rank": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}]


def test_moments_elsewhere_and_smaller() -> None:
    """Bytes per weight: 8 on the device, 2 and a float32 scale for each of 256 in both moments, or all in the host's
    memory, where checkpoints copy them, too."""
    usual, coded, on_host = (
        next(iter(holdings(run_of(trainer={"device": "cuda"} | trainer), SHAPE, {})))
        for trainer in ({}, {"moments": "8bit"}, {"moments": "8bit", "moments_on": "host"})
    )
    num = SHAPE.num_parameters
    assert usual.parts["moments"] == 8 * num and usual.host["checkpoint"] == 12 * num
    assert (
        coded.parts["moments"] == (2 + 2 * 4 / 256) * num
        and coded.host["checkpoint"] == 4 * num + coded.parts["moments"]
    )
    assert "moments" not in on_host.parts and on_host.host["moments"] == coded.parts["moments"]
    assert "moments" not in usual.host
