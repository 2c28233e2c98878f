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
from llamarl.config.trainer import TrainerConfig
from llamarl.generation.engine import Engine
from llamarl.generation.model import GeneratorModel, Precision
from llamarl.kernels import copy
from llamarl.kernels.gpu import fused
from llamarl.models.attention import packed_attend
from llamarl.models.hf import new_model
from llamarl.models.shape import ModelShape
from llamarl.training.logprobs import target_logprobs
from llamarl.training.optimization import finished
from llamarl.training.trainer import Trainer
from llamarl.types import GenerationRequest, SampleGroup, SamplingParams, TrainSample
from llamarl.weight_sync.base import plan_writers
from llamarl.weight_sync.layout import TensorSpec, lay_out

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = torch.device("cuda", 0)
SHAPE = ModelShape(
    family="llama", hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=512,
    vocab_size=1024, max_position_embeddings=1024,
)  # fmt: skip


@pytest.fixture(autouse=True)
def gives_memory_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def generated(device: str, precision: Precision, prompt: int = 100, **options: Any) -> dict[tuple[int, int], Any]:
    graphs, kv_dtype = options.pop("graphs", None), options.pop("kv_dtype", "auto")
    model = GeneratorModel(SHAPE, precision, device, kv_dtype=kv_dtype)
    model.load(new_model(SHAPE, 3, 0.05))
    engine = Engine(model, max_running=12, prefill_tokens=256, kv_bytes=64 << 20, graphs=graphs)
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
    found = fused(GPU)
    assert found.decode is not None, found.reason
    assert copy.gpu_kernel(GPU) is not None, "the fingerprint disagrees with torch"


def test_float32_generates_as_a_processor_does() -> None:
    assert alike(generated("cuda:0", "float32", temperature=0.0), generated("cpu", "float32", temperature=0.0)) > 0.9


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


@pytest.mark.parametrize("prompt", [60, 900])
def test_behavior_logprobs_are_those_of_scoring(prompt: int) -> None:
    """Long contexts too, where sums in bfloat16 would be off."""
    model = GeneratorModel(SHAPE, "bfloat16", "cuda:0")
    model.load(new_model(SHAPE, 3, 0.05))
    engine = Engine(model, max_running=4, prefill_tokens=256, kv_bytes=64 << 20)
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


def test_log_probs_have_float32_sums() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(300, 256).bfloat16(), (torch.randn(4096, 256) * 0.1).bfloat16()
    targets = torch.randint(0, 4096, (300,))
    exact = (hidden.double() @ head.double().t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    found = target_logprobs(hidden.to(GPU), head.to(GPU), targets.to(GPU), 1.0)
    assert float((found.double().cpu() - exact).abs().max()) < 1e-3


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_a_step_is_that_of_a_processor(dtype: Any, bound: float) -> None:
    def step(device: torch.device, dtype: Any) -> tuple[float, float, Tensor]:
        config = TrainerConfig(dtype=dtype, learning_rate=1e-3, microbatch_tokens=400)
        trainer = Trainer(new_model(SHAPE, 1, 0.05), config, Aipo(), GroupMean(), 1.0, device=device)
        update = finished(trainer.update(groups(), 100))
        weights = [weight.detach().float().cpu().flatten() for weight in trainer.sharding.weights.values()]
        return update.loss, update.grad_norm, torch.cat(weights)

    (loss, norm, weights), (exact, exact_norm, exact_weights) = step(GPU, dtype), step(torch.device("cpu"), "float32")
    assert abs(loss - exact) < bound * max(1.0, abs(exact)) and abs(norm - exact_norm) < bound * exact_norm
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


@pytest.mark.parametrize("transport", ["shared_memory", "p2p", "nixl"])
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
    engine = Engine(model, max_running=512, prefill_tokens=256, kv_bytes=None)
    other = new_model(shape, 1, 0.05)
    specs = {spec.key: spec for spec in model.specs()}
    named = dict(other.named_parameters())
    given: Callable[[str], Tensor] = lambda key: named[specs[key].name].detach().to(getattr(torch, specs[key].dtype))  # noqa: E731
    model.use(model.hold({key: given(key) for key in specs}))
    engine.set_version(1)
    assert engine.stats().running == 0
