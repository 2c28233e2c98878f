"""Hybrids of attention and delta nets in training: packing, every layout that is offered, what is exported."""

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
from llamarl.kernels import train_delta
from llamarl.models.attention import packed_attend
from llamarl.models.hf import load_model, save_model
from llamarl.models.lora import add_adapters
from llamarl.models.memory import TrainerLoad, activation_bytes
from llamarl.training.trainer import Objective, Trainer
from tests.distributed.ranks import num_ranks, rendezvous, results
from tests.generation.hybrids import DELTA, HYBRIDS, NEXT, hybrid
from tests.nightly import also, nightly
from tests.training.layouts import SEQUENCES, preflight, save

TIED = "qwen3_5_text"


def trainer_of(name: str = TIED, **settings: Any) -> Trainer:
    config = TrainerConfig(**{"learning_rate": 1e-2} | settings)
    return Trainer(hybrid(name), config, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0))


def gradients(trainer: Trainer, groups: list[Any]) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()

    def keep(*_: object) -> None:
        found.update({name: weight.grad.clone() for name, weight in trainer.model.named_parameters()})

    trainer.optimizer.register_step_pre_hook(keep)
    trainer.step(groups)
    return found


@pytest.mark.parametrize("name", HYBRIDS)
def test_packing_changes_no_gradient(make_groups, name: str) -> None:
    """One microbatch of all groups, and one for each sample: states reset at borders and fork behind prompts."""
    packed, apart = (gradients(trainer_of(name, microbatch_tokens=tokens), make_groups()) for tokens in (4096, 1))
    for key, gradient in packed.items():
        assert (gradient - apart[key]).norm() <= 1e-4 * apart[key].norm() + 1e-7, key


def test_recomputed_layers_have_the_same_gradients(make_groups) -> None:
    whole = gradients(trainer_of(), make_groups())
    again = gradients(trainer_of(activation_checkpointing=True), make_groups())
    assert all(torch.equal(again[key], gradient) for key, gradient in whole.items())


@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_is_near_and_states_are_float32(make_groups, fused: bool) -> None:
    seen, rule = set[torch.dtype](), packed_attend([1], [()]).recur.__class__._rule

    def noted(self: Any, chunks: Any, *inputs: torch.Tensor) -> torch.Tensor:
        seen.update(one.dtype for one in inputs)
        return rule(self, chunks, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamarl.models.delta_rule.Packed._rule", noted)
        if not fused:
            patch.setattr(train_delta, "can_serve", lambda *_: False)
        half = gradients(trainer_of(dtype="bfloat16"), make_groups())
    assert seen == ({torch.float32} if not fused or train_delta.kernels().library is None else set())
    whole = gradients(trainer_of(), make_groups())
    for key, gradient in whole.items():
        assert 0 < (half[key] - gradient).norm() < 0.3 * gradient.norm(), key


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_weights_and_moments_may_be_small(make_groups, moments: str) -> None:
    trainer = trainer_of(dtype="bfloat16", weights="bfloat16", moments=moments)
    before = {name: one.clone() for name, one in trainer.sharding.held.items()}
    trainer.step(make_groups())
    for name in ("in_proj_q.weight", "conv_v.weight", "A_log", "dt_bias", "norm.weight"):
        key = f"model.layers.0.linear_attn.{name}"
        assert not torch.equal(trainer.sharding.held[key], before[key]), name


@nightly("several ranks; layouts compute by day in test_layouts.py, delta nets in one process here")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3_next", {"fsdp": 2}), (TIED, {"pp": 2, "tp": 2}),
        *also(
            ("qwen3_next", {"tp": 2}), ("qwen3_next", {"pp": 2}), ("qwen3_next", {"pp": 2, "tp": 2}),
            (TIED, {"fsdp": 2}), (TIED, {"tp": 2}), (TIED, {"pp": 2}),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_compute_what_one_process_computes(workers, name: str, sizes: dict[str, int]) -> None:
    shape = dataclasses.asdict(HYBRIDS[name]) | {"delta": HYBRIDS[name].delta, "moe": HYBRIDS[name].moe}
    with rendezvous() as where, workers.take(num_ranks(sizes)) as ranks:
        for number, worker in enumerate(ranks):
            worker.start(preflight, where, number, sizes, shape, "")
        for said in results(ranks):
            assert str(said).startswith("preflight of fsdp"), said


def test_adapters_of_attention_and_feed_forward_leave_delta_nets(make_groups) -> None:
    model, lora = hybrid("qwen3_next_dense"), LoraConfig(rank=2)
    add_adapters(model, lora, 0)
    trainer = Trainer(
        model,
        TrainerConfig(learning_rate=1e-2, lora=lora),
        Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0),
    )
    before = {name: one.clone() for name, one in model.state_dict().items()}
    trainer.step(make_groups())
    changed = {name for name, one in model.state_dict().items() if not torch.equal(one, before[name])}
    assert changed == {name for name in before if "lora_B" in name}
    assert {name.split(".")[2] for name in changed if "self_attn" in name} == {"1"}


@pytest.mark.parametrize("name", ["qwen3_next", TIED])
def test_what_is_exported_is_read_by_transformers(make_groups, tmp_path: Path, name: str) -> None:
    model = hybrid(name)
    save_model(model, tmp_path / "base", None)
    (tmp_path / "base/tokenizer.json").write_text("{}")
    trainer = Trainer(
        model, TrainerConfig(learning_rate=1e-2), Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0)
    )
    trainer.step(make_groups())
    save(trainer, tmp_path / "checkpoints")
    export_checkpoint(tmp_path / "checkpoints", str(tmp_path / "base"), tmp_path / "made", None, None, merge=False)
    ours = load_model(tmp_path / "made", torch.float32, CPU)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    ids = torch.from_numpy(SEQUENCES[0]).long()[None]
    with torch.no_grad():
        logits = theirs(ids).logits[0].log_softmax(-1)
    picked = logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
    (scores,) = Trainer(ours, TrainerConfig(), Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0)).score(
        SEQUENCES[:1]
    )
    np.testing.assert_allclose(scores, picked.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("half", [False, True])
def test_activations_are_at_most_what_the_memory_sum_says(half: bool) -> None:
    """Of two delta nets and one layer of attention; what autograd keeps of packed tokens."""
    shape = replace(
        NEXT, hidden_size=128, intermediate_size=256, max_position_embeddings=1024,
        delta=replace(DELTA, num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=32),
    )  # fmt: skip
    num, model, kept = 1024, hybrid(shape), dict[int, int]()
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (storage := x.untyped_storage()).data_ptr() not in weights and len(x) >= num // 2:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(x)
        return x

    alive, ids = list[torch.Tensor](), torch.arange(num) % 130
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        model.model(ids, torch.arange(num) % 1024, packed_attend([num // 2], [(num // 4, num // 4)]))
    load = TrainerLoad(
        tokens=num, targets=num, keys=2 * num, half=half, checkpointing=False, flash=False, on_gpu=False, fused=False
    )
    summed = 3 * activation_bytes(shape, load)
    assert 0.5 * summed < sum(kept.values()) < 1.1 * summed
