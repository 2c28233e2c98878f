"""Mixtures of experts in training: what routers keep, whatever weights, moments and layouts there are."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.checkpoint.store import export_checkpoint
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.distributed.mesh import CPU
from llamarl.models.experts import route
from llamarl.models.hf import load_model, save_model
from llamarl.models.lora import add_adapters
from llamarl.models.shape import MoeShape
from llamarl.sharding.tensor_parallel import is_router
from llamarl.training.trainer import Objective, Trainer
from tests.distributed.ranks import rendezvous, results
from tests.generation.mixtures import MIXTURES, mixture
from tests.nightly import also, nightly
from tests.training.layouts import SEQUENCES, assembled, load, parts, preflight, save
from tests.training.routers import routed

NAME = "glm4_moe"
HALF = {"dtype": "bfloat16", "learning_rate": 1e-2}
GATE, BIAS = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERTS = "model.layers.1.mlp.experts.gate_proj"


def trainer_of(**settings: Any) -> Trainer:
    config = TrainerConfig(**{"learning_rate": 1e-2} | settings)
    return Trainer(mixture(NAME), config, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0))


@nightly("several ranks; by day a mixture's preflight and bfloat16 in one")
@pytest.mark.parametrize("more", [{}, *also({"activation_checkpointing": True}, {"train_router": False})], ids=str)
def test_ranks_read_all_and_gather_routers_in_float32(workers, make_groups, tmp_path: Path, more: dict) -> None:
    """Where a layer's other weights are gathered in bfloat16."""
    model = mixture(NAME)
    save_model(model, tmp_path / "model", None)
    config = TrainerConfig(**HALF, **more)
    with rendezvous() as where, workers.take(2) as ranks:
        for number, worker in enumerate(ranks):
            worker.start(routed, where, number, {"fsdp": 2}, tmp_path / "model", make_groups(), config)
        found = results(ranks)
    for one in found:
        if isinstance(one, Exception):
            raise one
    alone = routed(None, 0, {}, tmp_path / "model", make_groups(), config)
    read = assembled([one.before for one in found])
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
    for one in found:
        assert one.seen == {(torch.float32, torch.float32)}, "weight and input"
        ours, theirs = (np.concatenate(scores) for scores in (one.scores, alone.scores))
        assert np.abs(ours - theirs).mean() < 0.15  # bfloat16, which now and then chooses another expert
    moe, load = MIXTURES[NAME].moe, found[0].load
    assert moe is not None
    for place, number in enumerate(moe.sparse_layers):
        rows_E = found[0].rows[place] + found[1].rows[place]
        assert load[f"expert_load.{number}"] == pytest.approx(rows_E.max() / rows_E.mean())
        assert load[f"idle_experts.{number}"] == (rows_E == 0).sum()
    assert found[0].load == found[1].load and all(one.rows[0].any() for one in found)
    after, expected = assembled([one.after for one in found]), assembled([alone.after])
    assert after.keys() == expected.keys()
    assert torch.equal(after[BIAS], read[BIAS])
    assert torch.equal(after[GATE], read[GATE]) != config.train_router


@nightly("several ranks; by day a mixture's preflight is that of one")
def test_the_preflight_of_ranks_takes_a_mixture(workers) -> None:
    """Which may have experts behind the tiny model's last layer alone."""
    sizes = dataclasses.asdict(replace(MIXTURES[NAME], num_layers=5))
    moe = replace(MIXTURES[NAME].moe, sparse_layers=(3, 4))
    with rendezvous() as where, workers.take(2) as ranks:
        for number, worker in enumerate(ranks):
            worker.start(preflight, where, number, {"fsdp": 2}, sizes | {"moe": moe}, "")
        for said in results(ranks):
            assert str(said).startswith("preflight of fsdp 2"), said


@nightly("several ranks; by day a mixture's preflight and bfloat16 in one")
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_weights_of_bfloat16_leave_the_routers_out(make_groups, tmp_path: Path, moments: str) -> None:
    """Each keeps its type in checkpoints, and what is saved is read with the same bits."""
    trainer = trainer_of(**HALF, weights="bfloat16", moments=moments)
    before = {name: one.clone() for name, one in trainer.sharding.held.items()}
    types = {name: spec.dtype for name, spec in trainer.sharding.specs.items()}
    assert {name for name, kind in types.items() if kind == "float32"} == {name for name in types if is_router(name)}
    for seed in range(3):
        trainer.step(make_groups(seed=seed))
    after = trainer.sharding.held
    assert torch.equal(after[BIAS], before[BIAS])
    assert all(one.dtype == getattr(torch, types[name]) for name, one in after.items())
    for name in (GATE, EXPERTS):
        assert not torch.equal(after[name], before[name]), name
    assert not torch.equal(after[GATE], after[GATE].bfloat16().float()), "it has bits that bfloat16 has not"
    held = save(trainer, tmp_path)
    if moments == "8bit":
        assert held[f"{EXPERTS}:exp_avg"][2].dtype == torch.int8
        assert held[f"{EXPERTS}:exp_avg_scale"][0] == (8, 32, 1)
    again = trainer_of(**HALF, weights="bfloat16", moments=moments)
    load(again, tmp_path)
    assert all(torch.equal(part, held[name][2]) for name, (_, _, part) in parts(again).items())
    for one in (trainer, again):
        one.step(make_groups(seed=7))
    assert all(torch.equal(part, parts(again)[name][2]) for name, (_, _, part) in parts(trainer).items())


def test_norms_of_gradients_of_two_types_are_added_up(make_groups) -> None:
    trainer = trainer_of(**HALF, weights="bfloat16", max_grad_norm=1e-3)
    trainer.sharding.hold_gradients()
    generator, squares = torch.Generator().manual_seed(0), 0.0
    for weight in trainer.sharding.weights.values():
        weight.grad.copy_(torch.empty(weight.shape).normal_(generator=generator))
        squares += float(weight.grad.double().square().sum())
    assert trainer.sharding.clip_gradients(1e-3) == pytest.approx(squares**0.5, rel=1e-3)
    clipped = sum(float(one.grad.double().square().sum()) for one in trainer.sharding.weights.values())
    assert clipped**0.5 == pytest.approx(1e-3, rel=0.01)


@nightly("several ranks; by day a mixture's preflight is that of one")
def test_the_norm_of_a_gradient_is_over_all_tensors(workers, make_groups, tmp_path: Path) -> None:
    """Over routers, experts and all else, of which each would be missed, on one rank and on two."""
    trainer, squares = trainer_of(max_grad_norm=1e9), dict[str, float]()

    def keep(*_: object) -> None:
        for name, weight in trainer.model.named_parameters():
            squares[name] = float(weight.grad.double().square().sum())

    trainer.optimizer.register_step_pre_hook(keep)
    norm = trainer.step(make_groups()).update.grad_norm
    total = sum(squares.values())
    assert norm == pytest.approx(total**0.5, rel=1e-6)
    kinds = {name: "router" if is_router(name) else "expert" if ".experts." in name else "other" for name in squares}
    for kind in ("router", "expert", "other"):
        rest = sum(square for name, square in squares.items() if kinds[name] != kind)
        assert rest**0.5 < (1 - 2e-5) * norm, kind
    save_model(mixture(NAME), tmp_path / "model", None)
    config = TrainerConfig(learning_rate=1e-2, max_grad_norm=1e9)
    with rendezvous() as where, workers.take(2) as ranks:
        for number, worker in enumerate(ranks):
            worker.start(routed, where, number, {"fsdp": 2}, tmp_path / "model", make_groups(), config)
        assert [one.grad_norm for one in results(ranks)] == pytest.approx([norm, norm], rel=1e-5)


def test_routers_that_are_not_trained_have_no_state_and_are_saved(make_groups, tmp_path: Path) -> None:
    trainer = trainer_of(train_router=False)
    before = {name: one.clone() for name, one in trainer.sharding.held.items()}
    assert {*trainer.sharding.fixed} == {name for name in before if is_router(name)}
    trainer.step(make_groups())
    gate = trainer.model.get_parameter(GATE)
    assert gate.grad is None and gate not in trainer.optimizer.state
    after = trainer.sharding.held
    assert torch.equal(after[GATE], before[GATE]) and not torch.equal(after[EXPERTS], before[EXPERTS])
    held = save(trainer, tmp_path)
    assert GATE in held and f"{GATE}:exp_avg" not in held and f"{EXPERTS}:exp_avg" in held
    trained = trainer_of()
    load(trained, tmp_path)
    assert torch.equal(trained.model.get_parameter(GATE), before[GATE])
    trained.step(make_groups())
    assert not torch.equal(trained.model.get_parameter(GATE), before[GATE])


def test_adapters_of_attention_leave_experts_and_routers(make_groups) -> None:
    model, lora = mixture(NAME), LoraConfig(rank=2, targets=["q_proj", "o_proj"])
    add_adapters(model, lora, 0)
    trainer = Trainer(
        model,
        TrainerConfig(learning_rate=1e-2, lora=lora),
        Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
    )
    before = {name: one.clone() for name, one in model.state_dict().items()}
    trainer.step(make_groups())
    assert {*trainer.shards()} >= {*trainer.sharding.weights} and not trainer.sharding.fixed
    changed = {name for name, one in model.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == {name for name in before if "lora_B" in name}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe"])
def test_what_is_exported_is_read_by_transformers(make_groups, tmp_path: Path, name: str) -> None:
    model = mixture(name)
    save_model(model, tmp_path / "base", None)
    (tmp_path / "base/tokenizer.json").write_text("{}")
    trainer = Trainer(
        model, TrainerConfig(**HALF, weights="bfloat16"), Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0)
    )
    trainer.step(make_groups())
    save(trainer, tmp_path / "checkpoints")
    export_checkpoint(tmp_path / "checkpoints", str(tmp_path / "base"), tmp_path / "made", None, None, merge=False)
    ours = load_model(tmp_path / "made", torch.float32, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    for key, whole in trainer.sharding.held.items():
        assert torch.equal(ours.state_dict()[key], whole.float()), key
    ids = torch.from_numpy(SEQUENCES[0]).long()[None]
    with torch.no_grad():
        logits = theirs(ids).logits[0].log_softmax(-1)
    picked = logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
    (scores,) = Trainer(ours, TrainerConfig(), Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0)).score(
        SEQUENCES[:1]
    )
    np.testing.assert_allclose(scores, picked.numpy(), rtol=0, atol=1e-4)


MOE = MoeShape(num_experts=6, experts_per_token=3, expert_size=4, sparse_layers=(0,))
LOGITS = torch.tensor([[0.0, 5.0, 4.0, 3.0, 2.0, 1.0]])


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ([-1, -1, -1], [1, 2, 3]),
        ([1, -1, -1], [1, 2, 3]),
        ([-1, 1, -1], [2, 1, 3]),
        ([5, -1, 2], [5, 1, 2]),
        ([0, 5, 4], [0, 5, 4]),
        ([2, 2, -1], [2, 1, 3]),
        ([0, 0, 0], [0, 1, 2]),
    ],
    ids=str,
)
def test_no_expert_is_named_twice(given: list[int], chosen: list[int]) -> None:
    ids_N_K, gates_N_K = route(LOGITS, None, MOE, torch.tensor([given]))
    assert ids_N_K.tolist() == [chosen]
    assert torch.equal(gates_N_K, LOGITS.softmax(-1)[:, chosen])


def test_what_is_completed_stays_within_the_groups() -> None:
    """Groups of all experts' scores; a recorded expert may be of another."""
    moe = replace(MOE, experts_per_token=2, num_groups=3, groups_per_token=1)
    assert route(LOGITS, None, moe)[0].tolist() == [[1, 0]]
    assert route(LOGITS, None, moe, torch.tensor([[5, -1]]))[0].tolist() == [[5, 1]]
    assert route(LOGITS, None, moe, torch.tensor([[-1, 1]]))[0].tolist() == [[0, 1]], "rather than 2, which is better"


@pytest.mark.parametrize("name", MIXTURES)
def test_flops_are_those_of_the_experts_that_a_token_meets(name: str) -> None:
    shape = MIXTURES[name]
    assert shape.moe is not None
    share = shape.moe.experts_per_token / shape.moe.num_experts
    met = sum(
        weight.numel() * (share if weight.ndim == 3 else 1)
        for key, weight in mixture(name).named_parameters()
        if ".layers." in key and weight.ndim > 1
    )
    assert shape.layer_scalars == pytest.approx(met)
    dense = replace(shape, moe=None)
    attention = 2 * (dense.num_heads + dense.num_kv_heads) * dense.head_dim
    assert dense.layer_scalars == dense.hidden_size * (attention + 3 * dense.intermediate_size) * dense.num_layers


def test_the_widest_layer_counts() -> None:
    """Of what activations take; dense layers among sparse ones may be it."""
    found = {name: (one.active_width, one.rows_per_token) for name, one in MIXTURES.items()}
    assert found == {"qwen3_moe": (64, 4), "qwen3_moe_odd": (96, 6), "mixtral": (64, 4), "glm4_moe": (96, 4)}
    assert (
        replace(MIXTURES["mixtral"], moe=None).active_width,
        replace(MIXTURES["mixtral"], moe=None).rows_per_token,
    ) == (32, 0)
