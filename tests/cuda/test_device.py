"""On a real GPU: it computes what processors compute. `make gpu-check` runs this; elsewhere all of it is skipped.

Not covered: several GPUs, and what `tests/gpu` shows on a pretended one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, Precision
from llamarl.kernels.gpu import kernel, reason
from llamarl.models.attention import packed_attend
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.training import policy
from llamarl.training.optimization import finished
from llamarl.training.policy import target_logprobs
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import GenerationRequest, SampleGroup, SamplingParams, TrainSample
from llamarl.weight_sync.base import plan_writers
from llamarl.weight_sync.layout import TensorSpec, lay_out

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = torch.device("cuda", 0)
SHAPE = ModelShape(
    family="llama", hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=512,
    vocab_size=1024, max_position_embeddings=1024,
)  # fmt: skip
MOE = MoeShape(num_experts=8, experts_per_token=2, expert_size=128, sparse_layers=(0, 1), normalized=True)
SHAPES = {
    "llama": SHAPE,
    "qwen2": replace(SHAPE, family="qwen2", tie_embeddings=True),
    "qwen3": replace(SHAPE, family="qwen3"),
    "qwen3_moe": replace(SHAPE, family="qwen3_moe", moe=MOE),
    "mixtral": replace(SHAPE, family="mixtral", intermediate_size=128, moe=MOE),
    "glm4_moe": replace(
        SHAPE, family="glm4_moe", partial_rotary_factor=0.5, attention_bias=True,
        moe=replace(
            MOE, sparse_layers=(1,), scoring="sigmoid", scaling=1.5, num_groups=4, groups_per_token=2, shared_size=128,
            has_selection_bias=True,
        ),
    ),
}  # fmt: skip
MIXTURES = [name for name, shape in SHAPES.items() if shape.moe]


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def generated(
    device: str, precision: Precision, prompt: int = 100, shape: ModelShape = SHAPE, **options: Any
) -> dict[tuple[int, int], Any]:
    graphs, kv_dtype = options.pop("graphs", None), options.pop("kv_dtype", "auto")
    model = GeneratorModel(shape, precision, device, kv_dtype=kv_dtype)
    model.load(new_model(shape, 3, 0.05))
    return run(
        Engine(model, EngineSettings(max_running=12, prefill_tokens=256, kv_bytes=64 << 20, graphs=graphs)),
        prompt,
        **options,
    )


def run(engine: Engine, prompt: int = 100, **options: Any) -> dict[tuple[int, int], Any]:
    """Rollouts of three groups of four."""
    rng = np.random.default_rng(0)
    engine.submit(
        GenerationRequest(
            group_id=group, prompt_token_ids_T=rng.integers(1, 1000, prompt + group).astype(np.int32), group_size=4,
            sampling=SamplingParams(max_new_tokens=40, seed=7, **options),
        )
        for group in range(3)
    )  # fmt: skip
    found = {}
    while engine.has_work:
        found |= {(one.group_id, one.index): one for one in engine.step()}
    return found


def alike(one: dict, other: dict) -> float:
    """Share of rollouts with the same tokens."""
    assert one.keys() == other.keys()
    return float(np.mean([np.array_equal(one[key].token_ids_T, other[key].token_ids_T) for key in one]))


def test_triton_kernels_are_taken() -> None:
    for name in ("decode", "ops", "sample", "products", "logprobs", "train", "fingerprint", "delta"):
        assert kernel(name, GPU) is not None, reason(name, GPU)


@pytest.mark.parametrize("family", SHAPES)
def test_float32_generates_as_a_processor_does(family: str) -> None:
    on_gpu, on_cpu = (
        generated(device, "float32", temperature=0.0, shape=SHAPES[family]) for device in ("cuda:0", "cpu")
    )
    assert alike(on_gpu, on_cpu) > 0.9


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}], ids=str)
@pytest.mark.parametrize(
    ("precision", "kv_dtype"), [("bfloat16", "auto"), ("bfloat16", "fp8"), ("fp8", "auto"), ("int8", "auto")]
)
def test_graphs_draw_what_eager_steps_draw(precision: Precision, kv_dtype: str, sampling: dict[str, Any]) -> None:
    options = {"kv_dtype": kv_dtype, **sampling}
    eager, graphed = (generated("cuda:0", precision, graphs=graphs, **options) for graphs in (False, True))
    assert alike(eager, graphed) > 0.9
    for one in graphed.values():
        assert np.isfinite(one.behavior_logprobs_T).all()


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_in_graphs_are_those_of_eager_steps(family: str) -> None:
    eager, graphed = (
        generated("cuda:0", "bfloat16", graphs=graphs, shape=SHAPES[family], temperature=1.0)
        for graphs in (False, True)
    )
    assert alike(eager, graphed) > 0.9


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_experts_of_8_bits_generate_without_graphs(precision: Precision) -> None:
    for one in generated("cuda:0", precision, shape=SHAPES["qwen3_moe"], temperature=1.0).values():
        assert np.isfinite(one.behavior_logprobs_T).all()


@pytest.mark.parametrize("graphs", [False, True])
def test_a_sleeping_engine_gives_its_memory_up(graphs: bool) -> None:
    """And serves what it is given when it wakes: the trainer's own tensors."""
    model = GeneratorModel(SHAPE, "bfloat16", "cuda:0")
    base = dict(new_model(SHAPE, 3, 0.05).named_parameters())
    weights = {spec.key: base[spec.name].detach().to(GPU, getattr(torch, spec.dtype)) for spec in model.specs()}
    engine = Engine(
        model, EngineSettings(max_running=12, prefill_tokens=256, kv_bytes=64 << 20, asleep=True, graphs=graphs)
    )
    found, asleep = [], []
    for _ in range(3):
        model.use(weights)
        engine.wake()
        found.append(run(engine, temperature=1.0))
        awake = torch.cuda.memory_allocated()
        engine.sleep()
        asleep.append(torch.cuda.memory_allocated())
        assert asleep[-1] < awake - (48 << 20)
    assert asleep[2] <= asleep[1], "libraries keep what they work in, but no more each time"
    expected = generated("cuda:0", "bfloat16", graphs=graphs, temperature=1.0)
    assert alike(found[0], found[1]) == 1.0
    assert alike(found[0], expected) > 0.9


@pytest.mark.parametrize("prompt", [60, 900])
def test_behavior_logprobs_are_those_of_scoring(prompt: int) -> None:
    """Long contexts too, where sums in bfloat16 would be off."""
    model = GeneratorModel(SHAPE, "bfloat16", "cuda:0")
    model.load(new_model(SHAPE, 3, 0.05))
    engine = Engine(model, EngineSettings(max_running=4, prefill_tokens=256, kv_bytes=64 << 20))
    prompt_T = np.random.default_rng(0).integers(1, 1000, prompt).astype(np.int32)
    engine.submit([
        GenerationRequest(
            group_id=0, prompt_token_ids_T=prompt_T, group_size=4, sampling=SamplingParams(max_new_tokens=48, seed=1)
        )
    ])  # fmt: skip
    rollouts = []
    while engine.has_work:
        rollouts += engine.step()
    scored = engine.score([np.concatenate((prompt_T, one.token_ids_T)) for one in rollouts])
    apart = [
        np.abs(logprobs_T[-one.num_tokens :] - one.behavior_logprobs_T).mean()
        for one, logprobs_T in zip(rollouts, scored, strict=True)
    ]
    assert max(apart) < 0.02


def test_packed_attention_and_its_gradients_are_those_of_float64() -> None:
    prompts, responses = [130, 70, 33], [(40, 90, 3), (64,), (5, 17)]
    num_tokens, found = sum(prompts) + sum(map(sum, responses)), []
    torch.manual_seed(0)
    given = [torch.randn(num_tokens, heads, 64).bfloat16() for heads in (8, 2, 2)]
    weight = torch.randn(num_tokens, 8, 64).bfloat16()
    for device, dtype in ((GPU, torch.bfloat16), (torch.device("cpu"), torch.float64)):
        inputs = [x.detach().to(device, dtype).requires_grad_() for x in given]
        out = packed_attend(prompts, responses, device)(0, *inputs)
        (out * weight.to(device, dtype)).sum().backward()
        found.append([x.detach().double().cpu() for x in (out, *(one.grad for one in inputs))])
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize("cutoffs_R", [None, torch.full((300,), -8.0)], ids=["all", "candidates"])
def test_log_probs_have_float32_sums(monkeypatch: pytest.MonkeyPatch, cutoffs_R: Tensor | None) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(300, 256).bfloat16(), (torch.randn(3000, 256) * 0.1).bfloat16()
    targets, weight = torch.randint(0, 3000, (300,)), torch.randn(300).double()
    monkeypatch.setattr(policy, "gpu_tile_logits", lambda *_: 300 * 700)  # several tiles, the last one narrower
    found = []
    for device, dtype in ((GPU, torch.bfloat16), (torch.device("cpu"), torch.float64)):
        inputs = [x.detach().to(device, dtype).requires_grad_() for x in (hidden, head)]
        out = target_logprobs(
            *inputs, targets.to(device), 0.8, cutoffs_R=cutoffs_R if cutoffs_R is None else cutoffs_R.to(device)
        )
        (out.double() * weight.to(device)).sum().backward()
        found.append([x.detach().double().cpu() for x in (out, *(one.grad for one in inputs))])
    (own, *gradients), (exact, *exact_gradients) = found
    assert float((own - exact).abs().max()) < 1e-3
    for one, other in zip(gradients, exact_gradients, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 1e-4),
        ({"activation_checkpointing": True}, 1e-4),
        ({"moments": "8bit"}, 1e-4),
        ({"moments_on": "host"}, 1e-4),
        ({"lora": LoraConfig(rank=4)}, 1e-4),
        ({"compile": True}, 1e-4),
        ({"dtype": "bfloat16"}, 0.03),
        ({"dtype": "bfloat16", "activation_checkpointing": True}, 0.03),
        ({"dtype": "bfloat16", "activation_checkpointing": "selective"}, 0.03),
        ({"dtype": "bfloat16", "lora": LoraConfig(rank=4)}, 0.03),
        ({"dtype": "bfloat16", "compile": True}, 0.03),
        ({"dtype": "bfloat16", "weights": "bfloat16", "moments": "8bit"}, 0.03),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_steps_are_those_of_a_processor(
    monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any], bound: float
) -> None:
    """Two: in the first all moments are new. In bfloat16 some tokens meet other experts."""
    bound *= 3 if family in MIXTURES and "dtype" in options else 1
    if "compile" in options:
        monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no processes that outlive this

    def steps(device: torch.device, options: dict[str, Any]) -> tuple[list[float], list[float], Tensor]:
        config = TrainerConfig(learning_rate=1e-3, microbatch_tokens=400, **options)
        model = new_model(SHAPES[family], 1, 0.05)
        trainer = Trainer(model, config, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0), device=device)
        updates = [finished(trainer.update(groups(), step)) for step in (100, 101)]
        weights = [weight.detach().float().cpu().flatten() for weight in trainer.sharding.weights.values()]
        return [one.loss for one in updates], [one.grad_norm for one in updates], torch.cat(weights)

    losses, norms, weights = steps(GPU, options)
    plain = {name: value for name, value in options.items() if name in ("moments", "lora")}
    exact_losses, exact_norms, exact_weights = steps(torch.device("cpu"), plain)
    assert losses == pytest.approx(exact_losses, rel=bound, abs=bound)
    assert norms == pytest.approx(exact_norms, rel=bound)
    assert float((weights - exact_weights).norm() / exact_weights.norm()) < bound


def groups() -> list[SampleGroup]:
    rng = np.random.default_rng(0)

    def sample(length: int) -> TrainSample:
        columns = {
            "token_ids": rng.integers(0, 1000, length).astype(np.int32),
            "behavior_logprobs": rng.normal(-6, 0.1, length).astype(np.float32),
            "policy_versions": np.zeros(length, np.int32),
            "advantages": rng.normal(size=length).astype(np.float32), "loss_mask": np.ones(length, bool),
        }  # fmt: skip
        return TrainSample(columns=columns)

    prompts = [rng.integers(0, 1000, size).astype(np.int32) for size in (30, 50)]
    return [
        SampleGroup(prompt_token_ids_T=prompt, samples=(sample(40), sample(25), sample(60))) for prompt in prompts
    ]  # fmt: skip


@pytest.mark.parametrize("transport", ["shared_memory", "p2p", "nixl", "cuda_ipc"])
def test_weights_come_bit_for_bit(transport: str) -> None:
    from llamarl.weight_sync.select import open_subscriber, publisher_class

    if transport == "nixl" and not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")):
        pytest.skip("no NIXL")
    model = GeneratorModel(SHAPE, "bfloat16", "cuda:0")
    base = new_model(SHAPE, 0, 0.05).to(GPU)
    model.load(base)
    weights = {name: weight.detach() for name, weight in base.named_parameters()}
    held = [TensorSpec.whole(name, weight.shape, "float32") for name, weight in weights.items()]
    (plan,) = plan_writers([lay_out(model.specs())], [held])
    publisher = publisher_class(transport)(plan, lambda value: [value], device=GPU)
    address = publisher.publish(0, weights, ())
    subscriber = open_subscriber(address, model.specs(), 0, room=model.room)
    for version in range(3):
        with torch.no_grad():
            for weight in weights.values():
                weight.add_(0.01 * version)
        tensors = model.hold(subscriber.fetch(version, publisher.publish(version, weights, (version - 1,))))
        model.use(tensors)
        for spec in model.specs():
            expected = weights[spec.name].to(getattr(torch, spec.dtype))
            assert torch.equal(tensors[spec.key].to(GPU), expected), spec.key
    subscriber.close()
    publisher.close()


@pytest.mark.parametrize("change", [{}, {"num_layers": 3}])
def test_the_memory_that_is_planned_is_enough_for_the_first_adoption(change: dict[str, int]) -> None:
    shape = replace(SHAPE, **change)
    model = GeneratorModel(shape, "bfloat16", "cuda:0")
    base = new_model(shape, 0, 0.05)
    model.load(base)
    engine = Engine(model, EngineSettings(max_running=512, prefill_tokens=256, kv_bytes=None))
    other = new_model(shape, 1, 0.05)
    specs = {spec.key: spec for spec in model.specs()}
    named = dict(other.named_parameters())
    given: Callable[[str], Tensor] = lambda key: named[specs[key].name].detach().to(getattr(torch, specs[key].dtype))  # noqa: E731
    model.use(model.hold({key: given(key) for key in specs}))
    engine.set_version(1)
    assert engine.stats().running == 0
