"""Mixtures of experts in the generator: transformers and the trainer's forward decide what is right."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llamarl.config.roles import LoraConfig
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import AdapterMerger, GeneratorModel, load_generator_model
from llamarl.generation.network import route_kernel
from llamarl.kernels import experts
from llamarl.models import experts as experts_of_trainer
from llamarl.models.attention import causal_attend
from llamarl.models.hf import save_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.sharding import tensor_parallel
from llamarl.types import GenerationRequest, SamplingParams
from llamarl.weight_sync.base import plan_writers, views
from llamarl.weight_sync.layout import TensorSpec, lay_out
from llamarl.weight_sync.select import open_subscriber, publisher_class
from tests.generation.mixtures import MIXTURES, mixture
from tests.generation.references import full_logits, run
from tests.generation.test_lora import adapters, expected, part, served
from tests.generation.test_model import LENGTHS, PRECISIONS, Alone, Meeting, Rank, loaded, logits
from tests.kernels.engines import engine
from tests.nightly import crossed, some

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe")


def width(shape: ModelShape) -> int:
    assert shape.moe is not None
    return shape.moe.route_width


def routes_of(model: GeneratorModel, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Logits, and the experts of each token."""
    routes = torch.full((sum(lengths), width(model.shape)), 255, dtype=torch.uint8)

    class Recorder:
        logits = staticmethod(model.logits)

        def __call__(self, *arguments: object) -> Tensor:
            return model(*arguments, routes)

    return logits(Recorder(), lengths), routes


@pytest.mark.parametrize("name", some(FAMILIES, 1))
def test_greedy_tokens_are_those_of_transformers_from_the_same_files(name: str, tmp_path: Path) -> None:
    model = mixture(name)
    save_model(model, tmp_path / "model", None)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    generator = load_generator_model(tmp_path / "model", "float32", "cpu")
    engine = Engine(generator, EngineSettings(max_running=8, prefill_tokens=16, kv_bytes=1 << 24))
    prompts = [np.arange(3, 3 + length, dtype=np.int32) * 7 % 130 for length in (5, 21)]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=20)
    requests = [
        GenerationRequest(group_id=i, prompt_token_ids_T=prompt, group_size=2, sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]
    found = run(engine, requests)
    for i, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt).long()[None]
        with torch.no_grad():
            torch.testing.assert_close(full_logits(model, prompt), theirs(ids).logits[0], rtol=1e-5, atol=1e-5)
            whole = theirs.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=-1, pad_token_id=0)
        for index in range(2):
            assert found[i, index].token_ids_T.tolist() == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MIXTURES)
def test_float32_equals_the_trainer(computed_by: str, name: str) -> None:
    model = mixture(name)
    ours, theirs = logits(loaded(model, "float32")), logits(model)
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_experts_of_each_token_are_those_that_the_trainer_chooses(name: str, monkeypatch) -> None:
    """Layer by layer; the dense layers have no columns."""
    model, chosen, choose = mixture(name), list[Tensor](), experts_of_trainer.route

    def recorded(*arguments: object, **options: object) -> tuple[Tensor, Tensor]:
        ids, gates = choose(*arguments, **options)
        chosen.append(ids)
        return ids, gates

    with monkeypatch.context() as patch:
        patch.setattr(experts_of_trainer, "route", recorded)
        logits(model)
    assert len(chosen) == len(model.shape.moe.sparse_layers)
    generator = loaded(model, "float32")
    found, routes = routes_of(generator)
    assert torch.equal(routes.long(), torch.cat(chosen, 1))
    assert torch.equal(found, logits(generator)), "recording changes nothing"
    assert len(routes.unique()) == model.shape.moe.num_experts


@pytest.mark.parametrize("name", MIXTURES)
def test_the_kernel_chooses_as_the_trainer_does(name: str) -> None:
    """Ties included; a row that is no number gets some experts, each once, and gates that are none."""
    moe, generator = MIXTURES[name].moe, torch.Generator().manual_seed(0)
    if experts.kernels().library is None:
        pytest.skip(experts.kernels().reason)
    kernel = route_kernel(moe)
    assert kernel is not None
    logits_N_E = torch.randn(3000, moe.num_experts, generator=generator) * 3
    logits_N_E[:1500] = logits_N_E[:1500].round()
    for bias_E in (None, torch.randn(moe.num_experts, generator=generator) / 4):
        (ids, gates), (own_ids, own_gates) = (
            experts_of_trainer.route(logits_N_E, bias_E, moe),
            kernel(logits_N_E, bias_E),
        )
        same = (ids == own_ids).all(1)
        assert same.float().mean() > 0.999, "scores that differ by their last bit may be ordered either way"
        torch.testing.assert_close(own_gates[same], gates[same], rtol=1e-5, atol=1e-7)
    logits_N_E[1] = torch.nan
    ids, gates = kernel(logits_N_E[:3].contiguous(), None)
    assert gates[1].isnan().all() and gates[[0, 2]].isfinite().all()
    assert len(ids[1].unique()) == moe.experts_per_token and ids.min() >= 0 and ids.max() < moe.num_experts


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_lower_precisions_stay_close(computed_by: str, name: str) -> None:
    """Tokens that choose as in float32 differ by the rounding of weights and activations; few choose otherwise."""
    model = mixture(name)
    exact, routes = routes_of(loaded(model, "float32"))
    for precision, tolerance in (("bfloat16", 0.03), ("int8", 0.08)):
        ours, chosen = routes_of(loaded(model, precision))
        same = (chosen.sort(1).values == routes.sort(1).values).all(1)
        assert same.float().mean() > 0.8
        assert (ours - exact)[same].norm() < tolerance * exact[same].norm(), precision


@pytest.mark.parametrize(("name", "precision"), crossed(MIXTURES, PRECISIONS))
def test_a_sequence_has_the_same_bits_and_experts_whatever_lies_beside_it(computed_by, name, precision) -> None:
    if computed_by == "torch":
        pytest.skip("torch's matmul depends on the number of rows")
    model = loaded(mixture(name), precision)
    together, routes = (whole.split(LENGTHS) for whole in routes_of(model))
    for i, length in enumerate(LENGTHS):
        documents = torch.arange(3 + i, 3 + i + length) * 7 % 130
        del documents
        found = logits(model, [length], first=i)
        assert torch.equal(found, together[i])
    alone, own = routes_of(model, [LENGTHS[0]])
    assert torch.equal(alone, together[0]) and torch.equal(own, routes[0])


def slot(generator: GeneratorModel, model: Transformer) -> dict[str, Tensor]:
    """What a subscriber hands over: views of one flat buffer."""
    whole, layout = loaded(model, generator.precision)._used, lay_out(generator.specs())
    tensors = views(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))
    for key, tensor in tensors.items():
        tensor.copy_(whole[key])
    return tensors


@pytest.mark.parametrize("precision", some(PRECISIONS, 1))
def test_held_weights_serve_when_they_are_used(computed_by: str, precision: str) -> None:
    """Packed beside those in use, in memory that is used again."""
    models = [mixture("glm4_moe", seed) for seed in range(3)]
    generator = loaded(models[0], precision)
    wanted, slots = [logits(loaded(one, precision)) for one in models], [slot(generator, one) for one in models]
    for index in (1, 2, 0, 1):
        before, held = logits(generator), generator.hold(slots[index])
        assert torch.equal(logits(generator), before)
        generator.use(held)
        assert torch.equal(logits(generator), wanted[index])
    assert {workspace.num_bytes for workspace in generator._workspaces} == {generator.packed_bytes}
    for name, _ in generator._network.mixtures()[0].experts.multipliers():
        assert name in generator.multiplies_by
    assert f"choice in {'torch' if computed_by == 'torch' else 'c++'} (2 of 8)" in generator.multiplies_by


@pytest.mark.parametrize("precision", PRECISIONS)
def test_routers_are_float32_and_experts_are_not(precision: str) -> None:
    model = mixture("glm4_moe")
    specs = {spec.key: spec for spec in GeneratorModel(model.shape, precision, "cpu").specs()}
    assert {spec.name for spec in specs.values()} == set(model.state_dict())
    assert sum(one.numel() for one in model.state_dict().values()) == model.shape.num_parameters
    mlp = "model.layers.1.mlp"
    for name in ("gate.weight", "gate.e_score_correction_bias"):
        assert specs[f"{mlp}.{name}"].dtype == "float32" and f"{mlp}.{name}.scale" not in specs
    for name in ("experts.gate_proj", "experts.down_proj", "shared_experts.up_proj.weight"):
        assert specs[f"{mlp}.{name}"].dtype == precision
        assert (f"{mlp}.{name}.scale" in specs) == (precision == "int8")
    if precision == "int8":
        assert specs[f"{mlp}.experts.down_proj.scale"].shape == (8, 64)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("by_expert", [True, False], ids=["experts", "columns"])
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe"])
def test_two_ranks_equal_one(name: str, by_expert: bool, precision: str, monkeypatch) -> None:
    """Scales of columns are those of each rank's own, as in `test_model.py`; whole experts differ by sums alone."""
    monkeypatch.setattr(tensor_parallel, "LEAST_COLUMNS", 256 if by_expert else 1)
    model, meeting, found = mixture(name), Meeting(2), dict[int, tuple[Tensor, Tensor]]()
    ranks = [loaded(model, precision, tensor_parallel=Rank(meeting, rank)) for rank in range(2)]
    shape = ranks[1]._used["model.layers.1.mlp.experts.gate_proj"].shape
    assert shape == ((4, 32, 64) if by_expert else (8, 16, 64))
    threads = [threading.Thread(target=lambda r=r: found.update({r: routes_of(ranks[r])})) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    wanted, routes = routes_of(loaded(model, precision))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    same = (found[0][1] == routes).all(1)
    tolerance = {"float32": 1e-5, "bfloat16": 5e-3, "int8": math.hypot(0.03, 0.03)}[precision]
    assert same.float().mean() > (0.8 if precision == "int8" else 0.95)
    assert (found[0][0] - wanted)[same].norm() <= tolerance * wanted[same].norm()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("by_expert", [True, False], ids=["experts", "columns"])
def test_a_sync_in_8_bits_brings_what_a_load_makes(tmp_path: Path, monkeypatch, tp: int, by_expert: bool) -> None:
    monkeypatch.setattr(tensor_parallel, "LEAST_COLUMNS", 256 if by_expert else 1)
    model = mixture("glm4_moe")
    weights = model.state_dict()
    generators = [GeneratorModel(model.shape, "int8", "cpu", Alone(tp, rank)) for rank in range(tp)]
    held = [TensorSpec.whole(name, tuple(weight.shape), "float32") for name, weight in weights.items()]
    (plan,) = plan_writers([lay_out(one.specs()) for one in generators], [held])
    publisher = publisher_class("file")(plan, lambda value: [value], tmp_path)
    address = publisher.publish(0, weights, [])
    for rank, generator in enumerate(generators):
        generator.load(model)
        subscriber = open_subscriber(address, generator.specs(), rank)
        fetched = subscriber.fetch(0, address)
        for key, tensor in generator._used.items():
            assert torch.equal(fetched[key], tensor), key
        before = logits(generator)
        generator.use(generator.hold(fetched))
        assert torch.equal(logits(generator), before) and subscriber.fingerprint
    publisher.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_adapters_of_attention_are_merged_into_a_mixture(precision: str) -> None:
    base, config = mixture("qwen3_moe"), LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "v_proj", "o_proj"])
    model, oracle = (GeneratorModel(base.shape, precision, "cpu") for _ in range(2))
    model.load(base)
    merger = AdapterMerger(model, base, config)
    for seed in range(2):
        learnt = adapters(base, config, seed)
        model.use(merger.hold(part(merger, learnt)))
        oracle.load(expected(base, config, learnt))
        wanted = served(oracle)
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in served(model).items())
        assert torch.equal(logits(model), logits(oracle))


def test_behavior_log_probs_are_those_of_the_trainer() -> None:
    """Sampled through the cache, with new weights between two steps; scored by the trainer's forward."""
    models = [mixture("glm4_moe", seed) for seed in range(2)]
    generator = loaded(models[0], "float32")
    engine = Engine(
        generator, EngineSettings(max_running=8, prefill_tokens=16, kv_bytes=1 << 24, kv_on_update="recompute")
    )
    sampling = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3)
    prompt = np.arange(9, dtype=np.int32)
    engine.submit([GenerationRequest(group_id=1, prompt_token_ids_T=prompt, group_size=4, sampling=sampling)])
    rollouts = [one for _ in range(8) for one in engine.step()]
    generator.use(generator.hold(slot(generator, models[1])))
    engine.set_version(1)
    while engine.has_work:
        rollouts += engine.step()
    assert {len(set(one.policy_versions_T.tolist())) for one in rollouts} == {2}
    for rollout in rollouts:
        ids = np.concatenate((prompt, rollout.token_ids_T))
        for version, model in enumerate(models):
            scored = _logprobs(model, ids)[len(prompt) - 1 :]
            own = rollout.policy_versions_T == version
            np.testing.assert_allclose(rollout.behavior_logprobs_T[own], scored[own], atol=1e-4)


def _logprobs(model: Transformer, ids: np.ndarray) -> np.ndarray:
    log = torch.log_softmax(full_logits(model, ids)[:-1].double(), -1)
    return log.gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()


def test_columns_that_ranks_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "LEAST_COLUMNS", 1)
    shape = MIXTURES["qwen3_moe"]
    assert shape.moe is not None
    odd = replace(shape, moe=replace(shape.moe, expert_size=33))
    with pytest.raises(ValueError, match=r"experts.gate_proj has 33 rows or columns, which 2 tensor-parallel"):
        GeneratorModel(odd, "float32", "cpu", tensor_parallel=Alone(2, 0))


def test_graphed_steps_tell_the_experts_of_their_rows() -> None:
    """In memory that each step fills anew; captured steps run as functions here."""
    with engine("torch"):
        generator = loaded(mixture("glm4_moe"), "float32")
        served_by = Engine(generator, EngineSettings(max_running=4, prefill_tokens=16, kv_bytes=1 << 24, graphs=True))
        prompt = np.arange(9, dtype=np.int32)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3)
        request = GenerationRequest(group_id=1, prompt_token_ids_T=prompt, group_size=3, sampling=sampling)
        served_by.submit([request])
        for _ in range(9):
            served_by.step()
        graphs, rollouts = served_by._graphs, {one.index: one for one in served_by.so_far([1])}
        assert graphs is not None and graphs.routes_B_W is not None
        assert graphs.routes_B_W.shape == (3, width(generator.shape))
        for row, sequence in enumerate(served_by._rows.sequences):
            fed = np.concatenate((prompt, rollouts[sequence.index].token_ids_T[:-1]))
            routes = torch.empty(len(fed), width(generator.shape), dtype=torch.uint8)
            ids = torch.from_numpy(fed).long()
            generator(ids, torch.arange(len(fed)), causal_attend([len(fed)]), routes)
            assert torch.equal(routes[-1], graphs.routes_B_W[row])
