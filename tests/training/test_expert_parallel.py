"""A mixture in any layout computes what one process computes, its experts shared out or not, with those that were
recorded and with its own.

Not covered: GPUs and NCCL, several hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.config.roles import TrainerConfig
from llamarl.models.hf import new_model, save_model
from llamarl.models.shape import ModelShape, MoeShape
from llamarl.types import RolloutGroup
from tests.nightly import also, nightly
from tests.training.critics import critic_alone, critic_rank
from tests.training.layouts import SHAPE, alone, assembled, assert_same, assert_same_bits, distance, loaded, mirrored

MOE = MoeShape(num_experts=8, experts_per_token=2, expert_size=16, sparse_layers=(1, 2), normalized=True)
QWEN3 = SHAPE | {"family": "qwen3_moe", "tie_embeddings": True, "dtype": torch.float32, "moe": MOE}
GLM = SHAPE | {
    "family": "glm4_moe", "dtype": torch.float64, "attention_bias": True, "partial_rotary_factor": 0.5,
    "moe": replace(
        MOE, scoring="sigmoid", scaling=1.5, num_groups=4, groups_per_token=2, shared_size=8, has_selection_bias=True,
    ),
}  # fmt: skip
LAYOUTS: list[dict[str, int]] = [
    {"fsdp": 2, "ep": 2}, {"fsdp": 4, "ep": 2}, {"fsdp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"cp": 2, "ep": 2},
    {"fsdp": 2, "tp": 2, "ep": 2}, {"pp": 2, "fsdp": 2, "ep": 2}, {"fsdp": 2, "cp": 2, "ep": 4},
]  # fmt: skip
DAILY = {
    "float32": ({"fsdp": 4, "ep": 2},),
    "float64": ({"pp": 2, "fsdp": 2, "ep": 2},),
}
LIGHT = {"weights": "bfloat16", "dtype": "bfloat16", "moments": "8bit"}
WIDTH = MOE.experts_per_token * len(MOE.sparse_layers)


def recorded(groups: list[RolloutGroup], experts: Sequence[int] = tuple(range(8)), known: float = 0.9) -> Any:
    """The same, each token with recorded experts of these in each layer, but for some of which nothing is known."""
    rng = np.random.default_rng(len(groups))

    def routes(num: int) -> np.ndarray:
        chosen = [
            rng.permuted(np.tile(np.array(experts, np.uint8), (num, 1)), axis=1)[:, :2] for _ in range(WIDTH // 2)
        ]
        found = np.concatenate(chosen, axis=1) if num else np.zeros((0, WIDTH), np.uint8)
        found[rng.random(num) > known] = 255
        return found

    def told(group: RolloutGroup) -> RolloutGroup:
        of_prompt = routes(len(group.prompt.token_ids_T) - 1)
        return replace(group, rollouts=tuple(
            replace(one, columns={**one.columns, "routes": routes(one.num_tokens)}, prompt_routes=of_prompt)
            for one in group.rollouts
        ))  # fmt: skip

    return [told(group) for group in groups]


def layouts_of(shape: dict[str, Any]) -> Any:
    """By day float64 in one layout and float32 in another, at night both in each."""
    for sizes in LAYOUTS:
        is_daily = sizes in DAILY["float64" if shape is GLM else "float32"]
        marks = () if is_daily else nightly("the axes are there in other layouts")
        name = "x".join(f"{axis}{size}" for axis, size in sizes.items())
        yield pytest.param(shape, sizes, id=f"{shape['family']}-{name}", marks=marks)


@pytest.mark.parametrize(("shape", "sizes"), [one for shape in (QWEN3, GLM) for one in layouts_of(shape)])
def test_layout_computes_what_one_process_computes(run, make_groups, sizes: dict, shape: dict) -> None:
    """Losses, norms, log-probs, gradients and weights, where ranks have other numbers of rows and microbatches."""
    batches = [recorded(make_groups()), recorded(make_groups(seed=1))]
    tolerance = 1e-5 if shape["dtype"] == torch.float32 else 1e-11
    assert_same(run(sizes, shape, batches), alone(shape, batches), tolerance)


@nightly("several ranks each; by day other layouts compute with experts shared out")
@pytest.mark.parametrize("experts", [(2, 5), *also((0, 1), (6, 7))], ids=str)
def test_all_rows_of_all_ranks_for_one(run, make_groups, experts: tuple[int, ...]) -> None:
    """Others compute no row of a layer, and are in its exchange all the same."""
    batches = [recorded(make_groups(), experts, 1.0)]
    assert_same(run({"fsdp": 4, "ep": 4}, QWEN3, batches), alone(QWEN3, batches), 1e-5)


@nightly("several ranks each; by day other layouts compute with experts shared out")
def test_ranks_without_a_group(run, make_groups) -> None:
    """One group for four ranks, then nothing to learn from."""
    batches = [make_groups(((5, 1, 9),)), make_groups(((3, 3),), reward=lambda index: 1.0)]
    assert_same(run({"fsdp": 4, "ep": 2}, QWEN3, batches), alone(QWEN3, batches), 1e-5)


@nightly("several ranks each; by day other layouts compute with experts shared out")
@pytest.mark.parametrize(
    "config",
    [{"train_router": False, "activation_checkpointing": True}, *also({"lora": {"rank": 2, "targets": ["q_proj"]}})],
    ids=str,
)
def test_settings_with_experts_shared_out(run, make_groups, config: dict) -> None:
    batches = [recorded(make_groups()), make_groups(seed=1)]
    assert_same(run({"fsdp": 4, "ep": 2}, QWEN3, batches, None, config), alone(QWEN3, batches, None, config), 1e-5)


@nightly("several ranks each; by day other layouts compute with experts shared out")
def test_bfloat16_with_experts_shared_out(run, make_groups) -> None:
    """As far from float32 as one process is; rows travel in bfloat16."""
    config, batches = {"dtype": "bfloat16"}, [recorded(make_groups())]
    found, expected = run({"fsdp": 2, "ep": 2}, QWEN3, batches, None, config), alone(QWEN3, batches)
    assert found[0].metrics[0]["grad_norm"] == pytest.approx(expected.metrics[0]["grad_norm"], rel=0.05)
    whole = {name: part for name, (_, _, part) in expected.gradients.items()}
    assert 1e-4 < distance(whole, assembled([one.gradients for one in found])) < 0.1


@nightly("several ranks; by day layouts compute with experts shared out, and tests/sharding cuts by the same rows")
@pytest.mark.parametrize("config", [LIGHT, *also(None)], ids=str)
def test_state_moves_between_layouts_bit_for_bit(run, tmp_path: Path, make_groups, config: dict | None) -> None:
    """Saved by ranks of which two have the same experts, loaded by others with more, with fewer, and with columns."""
    save = {"fsdp": 4, "ep": 2}
    saved = assembled([one.state for one in run(save, QWEN3, [recorded(make_groups())], None, config, tmp_path)])
    assert "model.layers.1.mlp.experts.down_proj:exp_avg_sq" in saved
    others = {"fsdp": 1}, {"fsdp": 4, "ep": 4}, {"cp": 2, "ep": 2}
    for sizes in (*others, *also({"fsdp": 2}, {"pp": 2, "fsdp": 2, "ep": 2})):
        again = assembled([one.state for one in run(sizes, QWEN3, [], None, config, tmp_path)])
        assert again.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, again[name]), name


@nightly("mirrors of dense models by day: `test_layouts.py`")
def test_what_goes_on_from_mirrors_learns_the_same(run, tmp_path: Path, make_groups) -> None:
    batches = [recorded(make_groups(seed=seed)) for seed in range(3)]
    for whole, again in run({"fsdp": 4, "ep": 2}, QWEN3, batches, LIGHT, tmp_path, function=mirrored):
        assert whole.keys() == again.keys()
        for name, (*where, part) in whole.items():
            assert where == list(again[name][:2]) and torch.equal(part, again[name][2]), name


@nightly("the trainer computes experts by the same code")
def test_a_critic_with_experts_shared_out(run, make_groups) -> None:
    arguments = (QWEN3, [make_groups(), make_groups(seed=1)], {"passes": 2})
    found = run({"fsdp": 4, "ep": 2}, *arguments, function=critic_rank)
    assert_same(found, critic_alone(*arguments), 1e-5)


@nightly("several ranks; by day layouts compute with experts shared out, and tests/sharding cuts by the same rows")
def test_a_rank_reads_its_own_experts(run, make_groups, tmp_path: Path) -> None:
    """And has the bits that it has when it reads all, before and after a step, as ranks of another layout have."""
    sizes = {name: value for name, value in QWEN3.items() if name != "dtype"}
    save_model(new_model(ModelShape(**sizes), 3, 0.1), tmp_path, None)
    arguments = tmp_path, recorded(make_groups()), TrainerConfig(learning_rate=1e-3, microbatch_tokens=30)
    found = run({"fsdp": 4, "ep": 2}, *arguments, function=loaded)
    for own, whole in found:
        assert_same_bits(own, whole)
    alone_before = assembled([both[0].weights for both in run({"fsdp": 1}, *arguments, function=loaded)])
    for name, tensor in assembled([both[0].weights for both in found]).items():
        assert torch.equal(tensor, alone_before[name]), name
