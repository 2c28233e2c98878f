"""Training adapters: their gradients from those of all weights, in every layout, and their checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.models.lora import A, B, adapted_weights, adapter_of, merged
from llamarl.models.transformer import Transformer
from llamarl.training.state import StateMismatch, load_training_state, training_state
from llamarl.training.trainer import Objective, Trainer
from tests.nightly import nightly, some
from tests.training.layouts import (
    MISTRAL,
    QWEN2,
    alone,
    assembled,
    assert_same,
    difference,
    distance,
    learnt_adapters,
    parts,
    preflight,
)
from tests.training.test_layouts import LAYOUTS, TOLERANCE
from tests.training.test_trainer import step_with_gradient

LORA = LoraConfig(rank=3, alpha=5.0)


def with_adapters(model: Transformer, lora: LoraConfig = LORA) -> Transformer:
    model = copy.deepcopy(model)
    learnt_adapters(model, lora, torch.float32)
    return model


def trainer_of(model: Transformer, lora: LoraConfig | None = LORA, **config) -> Trainer:
    settings = TrainerConfig(learning_rate=1e-3, max_grad_norm=1e9, lora=lora, **config)
    return Trainer(model, settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=0.7))


def merge(model: Transformer, base: Transformer, lora: LoraConfig = LORA) -> Transformer:
    whole, weights = copy.deepcopy(base), dict(model.named_parameters())
    for name, _ in adapted_weights(base.shape, lora):
        weight = whole.get_parameter(name)
        weight.data = merged(weight.data, *adapter_of(weights, name), lora.scale).detach()
    return whole


@pytest.mark.parametrize("targets", [LORA.targets, ["k_proj", "down_proj"]], ids=["all", "some"])
def test_gradients_follow_from_those_of_the_whole_weights(make_model, make_groups, targets: list) -> None:
    """W' = W + s B A, so dL/dA = s B^T dL/dW' and dL/dB = s dL/dW' A^T."""
    base, lora = make_model(torch.float64, tie_embeddings=False), LORA.model_copy(update={"targets": targets})
    model = with_adapters(base, lora)
    whole = merge(model, base, lora)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    result, found = step_with_gradient(trainer_of(model, lora), make_groups())
    expected, gradients = step_with_gradient(trainer_of(whole, None), make_groups())
    assert result.update.loss == pytest.approx(expected.update.loss, rel=1e-10)
    assert found.keys() == {name for name in weights if name.endswith((A, B))}
    for name, _ in adapted_weights(base.shape, lora):
        module, grad = name.removesuffix("weight"), gradients[name]
        of_a, of_b = lora.scale * weights[f"{module}{B}"].T @ grad, lora.scale * grad @ weights[f"{module}{A}"].T
        torch.testing.assert_close(found[f"{module}{A}"], of_a, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[f"{module}{B}"], of_b, rtol=1e-9, atol=1e-12)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name]) == (not name.endswith((A, B))), name


@pytest.mark.parametrize(
    ("sizes", "shape"),
    some([*((sizes, MISTRAL) for sizes in LAYOUTS[:6]), ({"pp": 2}, QWEN2), ({"fsdp": 2, "tp": 2}, QWEN2)], 3),
    ids=lambda value: value.get("family") or "x".join(f"{axis}{size}" for axis, size in value.items()),
)
def test_layout_computes_what_one_process_computes(run, make_groups, sizes: dict, shape: dict) -> None:
    """Qwen 2's head is tied to a frozen embedding, and frozen biases lie beside its adapters."""
    batches, config = [make_groups(), make_groups(seed=1)], {"lora": LORA}
    tolerance = TOLERANCE if shape["dtype"] == torch.float32 else 1e-11
    assert_same(run(sizes, shape, batches, None, config), alone(shape, batches, None, config), tolerance)


@nightly("several ranks; by day layouts with adapters compute and are checked")
def test_frozen_weights_in_bfloat16_beside_adapters_in_float32(run, make_groups) -> None:
    batches, config = [make_groups(), make_groups(seed=1)], {"lora": LORA, "dtype": "bfloat16"}
    expected = alone(MISTRAL, batches, None, config)
    found = run({"fsdp": 2}, MISTRAL, batches, None, config)
    for one in found:
        assert one.metrics[0]["loss"] == pytest.approx(expected.metrics[0]["loss"], rel=0.01, abs=1e-3)
        assert one.metrics[0]["grad_norm"] == pytest.approx(expected.metrics[0]["grad_norm"], rel=0.03)
    whole = assembled([one.weights for one in found])
    assert {weight.dtype for weight in whole.values()} == {torch.float32}
    assert distance(whole, {name: part for name, (_, _, part) in expected.weights.items()}) < 0.02


@nightly("several ranks; by day layouts with adapters compute")
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_the_preflight_has_adapters_too(run, sizes: dict) -> None:
    for said in run(sizes, MISTRAL, "", LORA, function=preflight):
        assert said.startswith("preflight of"), said
    if "tp" in sizes:
        broken = run(sizes, MISTRAL, "block", LORA, function=preflight)
        assert all("parallelism" in said for said in broken)


@nightly("several ranks; by day layouts with adapters compute and are checked")
def test_a_checkpoint_holds_adapters_alone_and_goes_on_in_another_layout(run, make_groups, tmp_path) -> None:
    folder, config = tmp_path / "checkpoints", {"lora": LORA}
    saved = run({"fsdp": 2}, MISTRAL, [make_groups()], None, config, folder)
    whole = assembled([one.state for one in saved])
    assert {name.split(":")[0].rsplit(".", 2)[1] for name in whole} == {"lora_A", "lora_B"}
    resumed = run({"tp": 2}, MISTRAL, [], None, config, folder)
    assert difference(assembled([one.state for one in resumed]), whole) == 0
    files = [file.read_bytes() for file in folder.rglob("*.safetensors")]
    stored = sum(len(file) - 8 - int.from_bytes(file[:8], "little") for file in files)
    assert stored == sum(tensor.nbytes for tensor in whole.values())


def test_state_of_another_kind_is_refused(make_model, make_groups) -> None:
    base = make_model()
    adapted, other, full = (
        trainer_of(with_adapters(base)),
        trainer_of(with_adapters(base, LORA.model_copy(update={"rank": 2})), LORA.model_copy(update={"rank": 2})),
        trainer_of(copy.deepcopy(base), None),
    )
    adapted.step(make_groups())
    state, saved = training_state(adapted), parts(adapted)
    shapes = {name: shape for name, (shape, _, _) in saved.items()}
    for trainer in (other, full):
        with pytest.raises(StateMismatch, match=r"trainer\.lora"):
            load_training_state(trainer, shapes, lambda name, box: saved[name][2], state)


def test_flops_and_memory(make_model, make_groups) -> None:
    """Counted by torch: less than all weights take, by their gradients; and optimizer and gradients are small."""
    base, groups = make_model(), make_groups()
    spent, said, kept = dict[str, float](), dict[str, float](), dict[str, int]()
    for name, trainer in {
        "all": trainer_of(copy.deepcopy(base), None),
        "lora": trainer_of(with_adapters(base)),
    }.items():
        with FlopCounterMode(display=False) as counter:
            said[name] = trainer.step(groups).metrics["num_flops"]
        spent[name] = counter.get_total_flops()
        kept[name] = sum(tensor.numel() for _, tensor in trainer.shards().values())
    assert said["lora"] / said["all"] == pytest.approx(spent["lora"] / spent["all"], rel=0.1)
    assert kept["lora"] == pytest.approx(3 * sum(
        LORA.rank * (outputs + inputs) for _, (outputs, inputs) in adapted_weights(base.shape, LORA)
    ), abs=60)  # fmt: skip
    assert all(weight.grad is None for weight in trainer.model.parameters() if not weight.requires_grad)
