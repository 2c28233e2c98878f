"""Any layout of a trainer or a critic computes what one process computes: losses, log-probs, gradients, weights.

Not covered: GPUs and NCCL, several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.algorithms.losses.gspo import Gspo
from llamarl.config.roles import LoraConfig, TrainerConfig
from llamarl.distributed.mesh import ALONE
from llamarl.models.hf import new_model, save_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.training.optimizer import decoded
from tests.distributed.ranks import Workers, num_ranks, rendezvous, results
from tests.nightly import also, nightly
from tests.parts.sft.supervised import learn, learn_rank, make_documents
from tests.training.critics import critic_alone, critic_rank
from tests.training.layouts import (
    LIMIT_S,
    MISTRAL,
    QWEN2,
    QWEN3,
    Found,
    alone,
    assembled,
    assert_same,
    assert_same_bits,
    critic_loaded,
    distance,
    failing,
    half_of_head,
    in_mirror,
    loaded,
    mirrored,
    preflight,
    ready,
    scored,
    scored_rank,
)

TOLERANCE = 1e-5
NOTICE_S = 60.0
"""A failure is known to all within so many seconds; much less on an idle machine, and 240 s where a collective
waits."""


LAYOUTS = [
    {"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"fsdp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}, {"fsdp": 2, "cp": 2},
    {"pp": 2, "tp": 2}, {"cp": 2, "tp": 2},
]  # fmt: skip


DAILY = {
    "mistral": ({"fsdp": 2, "tp": 2},),
    "qwen2": ({"pp": 2},),
    "qwen3": ({"cp": 2, "tp": 2},),
}
"""Layouts by family: each axis is there, alone or in a pair."""


def layouts_of(shape: dict[str, Any]) -> Iterator[Any]:
    for sizes in LAYOUTS:
        is_daily = sizes in DAILY[shape["family"]]
        marks = () if is_daily else nightly("the axes are there in other layouts and families")
        name = "x".join(f"{axis}{size}" for axis, size in sizes.items())
        yield pytest.param(shape, sizes, id=f"{shape['family']}-{name}", marks=marks)


@pytest.mark.parametrize(("shape", "sizes"), [one for shape in (MISTRAL, QWEN3, QWEN2) for one in layouts_of(shape)])
def test_layout_computes_what_one_process_computes(run, make_groups, sizes: dict, shape: dict) -> None:
    """Groups are ragged, and so are the ranks' microbatches, of which some have none left.

    Qwen 3 ties its embeddings and norms its heads: both train wrongly, with an exact loss, in a careless layout.
    """
    batches = [make_groups(), make_groups(seed=1)]
    tolerance = TOLERANCE if shape["dtype"] == torch.float32 else 1e-11
    assert_same(run(sizes, shape, batches), alone(shape, batches), tolerance)


WIDE = QWEN3 | {"num_heads": 16, "num_kv_heads": 8, "head_dim": 32, "intermediate_size": 512}
"""Of which each of two tensor-parallel ranks has a block of columns."""


@nightly("mirrors below have such moments in ranks")
@pytest.mark.parametrize("sizes", [{"fsdp": 2}], ids=str)
def test_moments_of_8_bits_in_layouts(run, tmp_path, make_groups, sizes: dict) -> None:
    """Each computes what one process does, as far as codes are coarse; saved by each they are the same bits in others,
    and become float32 where that is asked for."""
    config, folder = {"moments": "8bit"}, tmp_path / "checkpoints"
    batches = [make_groups(), make_groups(seed=1)]
    found, expected = run(sizes, WIDE, batches, None, config, folder), alone(WIDE, batches, None, config)
    assert found[0].metrics[0]["grad_norm"] == pytest.approx(expected.metrics[0]["grad_norm"], rel=1e-4)
    whole = {name: part for name, (_, _, part) in expected.weights.items()}
    assert distance(whole, assembled([one.weights for one in found])) < 1e-4
    saved = assembled([one.state for one in found])
    assert {str(saved[name].dtype) for name in saved if name.endswith(".weight:exp_avg") and saved[name].ndim == 2} == {
        "torch.int8"
    }
    for other in ({"fsdp": 1}, {"fsdp": 2}, {"tp": 2}):
        again = assembled([one.state for one in run(other, WIDE, [], None, config, folder)])
        assert again.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, again[name]), name
    exact = assembled([one.state for one in run({"fsdp": 1, "tp": 2}, WIDE, [], None, None, folder)])
    for name, tensor in exact.items():
        if (scale := saved.get(f"{name}_scale")) is not None:
            assert torch.equal(tensor, decoded(name.partition(":")[2], saved[name], scale)), name


@nightly("several ranks each; by day other layouts compute and fail")
@pytest.mark.parametrize("sizes", [{"cp": 2}, *also({"fsdp": 2}, {"tp": 2}, {"pp": 2})], ids=str)
def test_supervised_training_too(run, sizes: dict) -> None:
    documents = make_documents(((3, 4), (2, 9), (5, 1), (1, 2), (4, 20)))
    assert_same(run(sizes, documents, function=learn_rank), learn(ALONE, documents), TOLERANCE)


@nightly("several ranks each; by day other layouts compute and fail")
def test_more_ranks_than_groups_rows_or_layers_to_share_evenly(run, make_groups) -> None:
    """One group for three ranks, then none to learn from, then two; of 4 rows the last rank has none.

    In the second step weights move by their momentum alone, and nobody may score with gathered ones of before.
    """
    shape = QWEN3 | {"head_dim": 4}
    equal = make_groups(((2, 2),), reward=lambda _: 0.5)
    batches = [make_groups(((5, 1, 9),)), equal, make_groups(((4, 2), (1, 1)), seed=1)]
    expected = alone(shape, batches)
    for sizes in ({"fsdp": 3}, {"pp": 3}):
        assert_same(run(sizes, shape, batches), expected, TOLERANCE)


@nightly("several ranks each; by day other layouts compute and fail")
def test_bfloat16_is_as_far_from_float32_as_in_one_process(run, make_groups) -> None:
    """Sums over ranks are taken in bfloat16 where one process has none, so bits differ."""
    batches, half = [make_groups()], {"dtype": "bfloat16"}
    exact, rounded = alone(MISTRAL, batches), alone(MISTRAL, batches, None, half)
    apart = abs(rounded.metrics[0]["loss"] - exact.metrics[0]["loss"])
    assert apart > 0
    for one in run({"fsdp": 2, "tp": 2}, MISTRAL, batches, None, half):
        assert one.metrics[0]["loss"] == pytest.approx(exact.metrics[0]["loss"], abs=3 * apart)
        assert one.metrics[0]["grad_norm"] == pytest.approx(exact.metrics[0]["grad_norm"], rel=0.03)


@nightly("several ranks each; by day other layouts compute and fail")
@pytest.mark.parametrize("sizes", [{"tp": 2}, *also({"pp": 2}, {"fsdp": 2}, {"cp": 2})], ids=str)
def test_weights_of_bfloat16(run, tmp_path, make_groups, sizes: dict) -> None:
    """They learn what float32 ones do, as far as they are coarse, and move between layouts bit for bit."""
    batches, folder = [make_groups(), make_groups(seed=1)], tmp_path / "checkpoints"
    config = {"weights": "bfloat16", "dtype": "bfloat16"}
    exact = alone(QWEN3, batches, None, {"dtype": "bfloat16"})
    found = run(sizes, QWEN3, batches, None, config, folder)
    for step, wanted in zip(found[0].metrics, exact.metrics, strict=True):
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)
    saved = assembled([one.state for one in found])
    kinds = {str(tensor.dtype) for name, tensor in saved.items() if ":" not in name}
    assert kinds == {"torch.bfloat16"} and saved["model.norm.weight:exp_avg"].dtype == torch.float32
    whole = {name: part for name, (_, _, part) in exact.weights.items()}
    assert distance(whole, {name: tensor.float() for name, tensor in saved.items() if ":" not in name}) < 0.01
    for other in ({"fsdp": 1}, {"fsdp": 2, "tp": 2}):
        again = assembled([one.state for one in run(other, QWEN3, [], None, config, folder)])
        assert all(torch.equal(tensor, again[name]) for name, tensor in saved.items()) and again.keys() == saved.keys()


@nightly("several ranks once more; by day other layouts compute")
def test_a_loss_over_whole_sequences_in_cut_ones(run, make_groups) -> None:
    """GSPO's ratio is one of the sequence, and its mean one over sequences."""
    batches = [make_groups()]
    assert_same(run({"cp": 2}, MISTRAL, batches, Gspo()), alone(MISTRAL, batches, Gspo()), TOLERANCE)


@nightly("several ranks each; by day other layouts compute and fail")
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, *also({"pp": 2}, {"cp": 2})], ids=str)
def test_layers_that_are_computed_again(run, make_groups, sizes: dict) -> None:
    """Their collectives, and the weights that FSDP2 gathers, come once more in backward."""
    found = run(sizes, QWEN3, [make_groups(), make_groups(seed=1)], None, {"activation_checkpointing": True})
    assert_same(found, alone(QWEN3, [make_groups(), make_groups(seed=1)]), TOLERANCE)


@nightly("two ranks each; by day what a rank holds is that of tests/sharding, and states move")
@pytest.mark.parametrize("policy", ["skip", *also("stop")])
def test_what_is_not_finite_on_one_rank_is_so_on_all(run, make_groups, policy: str) -> None:
    """One group, which only one rank computes, is poisoned in the second step: nobody takes that step."""
    batches = [make_groups(), make_groups(seed=1), make_groups(seed=2)]
    batches[1][-1].rollouts[1].behavior_logprobs_T[0] = np.nan
    config = {"on_nonfinite": policy, "microbatch_tokens": 12}
    found = run({"fsdp": 2}, MISTRAL, batches, None, config)
    if policy == "stop":
        assert all("step 1: loss nan" in one.error and "group 2 rollout 1 (behavior" in one.error for one in found)
    else:
        assert [one.skipped for one in found] == [[False, True, False]] * 2
    # What is left is a run that never had that step.
    kept = batches[:1] if policy == "stop" else [batches[0], batches[2]]
    never = run({"fsdp": 2}, MISTRAL, kept, None, config)
    for one, other in zip(found, never, strict=True):
        for name, (_, _, part) in one.weights.items():
            assert torch.equal(part, other.weights[name][2]), name


@nightly("several ranks; sharding and checkpoint move states by day")
def test_state_moves_between_layouts_bit_for_bit(run, tmp_path, make_groups) -> None:
    """Saved by four ranks, loaded by one, two and four others: weights and both moments are the same bits."""
    folder = tmp_path / "checkpoints"
    saved = assembled([one.state for one in run({"fsdp": 4}, QWEN3, [make_groups()], None, None, folder)])
    assert sum(name.endswith(":exp_avg_sq") for name in saved) > 10
    for sizes in ({"fsdp": 1}, {"pp": 2}, {"fsdp": 2, "tp": 2}):
        again = assembled([one.state for one in run(sizes, QWEN3, [], None, None, folder)])
        assert again.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, again[name]), name


BFLOAT16 = {"weights": "bfloat16", "dtype": "bfloat16"}


@nightly("several ranks each; by day other layouts compute and fail")
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"fsdp": 3}, {"moments": "8bit"}),
        *also(
            ({"pp": 2}, {}), ({"fsdp": 2, "tp": 2}, BFLOAT16), ({"fsdp": 2}, {"lora": {"rank": 2}, "moments": "8bit"}),
            ({"pp": 2}, BFLOAT16 | {"moments": "8bit"}), ({"fsdp": 3}, BFLOAT16),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_goes_on_from_mirrors_learns_the_same(run, tmp_path, make_groups, sizes: dict, config: dict) -> None:
    """Ranks without rows of some weights, and with other layers than others, too."""
    batches = [make_groups(seed=seed) for seed in range(3)]
    shape = QWEN3 | {"hidden_size": 4} if sizes == {"fsdp": 3} else WIDE  # of 4 rows the last rank has none
    for whole, again in run(sizes, shape, batches, config, tmp_path, function=mirrored):
        assert whole.keys() == again.keys()
        for name, (*where, part) in whole.items():
            assert where == list(again[name][:2]) and torch.equal(part, again[name][2]), name


@nightly("test_state_moves_between_layouts_bit_for_bit moves checkpoints")
@pytest.mark.parametrize("config", [{"moments": "8bit"}, *also({})], ids=str)
def test_a_mirror_moves_between_layouts_bit_for_bit(run, tmp_path, make_groups, config: dict) -> None:
    """A host less: what four ranks had goes to two, and to one."""
    batches = [make_groups(seed=seed) for seed in range(2)]
    saved = assembled(run({"fsdp": 2, "tp": 2}, WIDE, batches, config, tmp_path, function=in_mirror))
    assert sum(":exp_avg" in name for name in saved) > 10
    for sizes in ({"tp": 2}, {"pp": 2}, {"fsdp": 1}):
        again = assembled(run(sizes, WIDE, [], config, tmp_path, function=in_mirror))
        assert again.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, again[name]), name


@nightly("several ranks each; by day other layouts compute and fail")
@pytest.mark.parametrize("sizes", [{"fsdp": 2}, *also({"pp": 2}, {"tp": 2}, {"cp": 2})], ids=str)
def test_a_critic_computes_what_one_process_computes(run, make_groups, sizes: dict) -> None:
    """Values, loss, gradients and weights; it values in the middle of a step, by the weights of before."""
    arguments = (QWEN3, [make_groups(), make_groups(seed=1)], {"passes": 2})
    found, expected = run(sizes, *arguments, function=critic_rank), critic_alone(*arguments)
    assert_same(found, expected, TOLERANCE)
    for one in found:
        values, wanted = (np.concatenate([v for of_step in which.scores for v in of_step]) for which in (one, expected))
        assert np.abs(values - wanted).max() < TOLERANCE * np.abs(wanted).max()


@nightly("several ranks each; by day other layouts compute and fail")
@pytest.mark.parametrize("policy", ["stop", *also("skip")])
def test_a_critic_s_step_that_is_not_finite_on_one_rank_is_so_on_all(run, make_groups, policy: str) -> None:
    batches = [make_groups(), make_groups(seed=1, reward=lambda index: np.inf if index == 3 else 1.0)]
    for one in run({"fsdp": 2}, QWEN3, batches, {"on_nonfinite": policy}, function=critic_rank):
        assert one.skipped == ([False, True] if policy == "skip" else [False])
        if policy == "stop":
            assert "critic step 1: loss inf" in one.error and "the reward of group 2 rollout 3 is inf" in one.error
            assert "learning_rate" not in one.error


@nightly("the trainer's state moves by the same code")
def test_a_critic_s_state_moves_between_layouts_bit_for_bit(run, tmp_path, make_groups) -> None:
    saved: list[Found] = run({"fsdp": 2}, QWEN3, [make_groups()], None, tmp_path, function=critic_rank)
    whole = assembled([one.state for one in saved])
    assert "score.weight:exp_avg_sq" in whole
    for sizes in ({"fsdp": 1}, {"tp": 2}, {"pp": 2}, {"cp": 2}):
        again = assembled([one.state for one in run(sizes, QWEN3, [], None, tmp_path, function=critic_rank)])
        assert again.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize(
    ("how", "of"),
    [
        ("block", "trainer"),
        ("norm", "trainer"),
        ("tied", "trainer"),
        ("", "trainer"),
        ("norm", "critic"),
        ("", "critic"),
    ],
)
def test_preflight_refuses_a_broken_plan(run, how: str, of: str) -> None:
    """Feed-forward left out of the plan; gradients of the heads' norms, or of tied embeddings, not added up."""
    sizes = {"pp": 2} if how == "tied" else {"tp": 2}
    said = run(sizes, QWEN3, how, None, of, function=preflight)
    if how:
        assert all(one.startswith(f"{of}.parallelism (fsdp 1, tp ") and "use another layout" in one for one in said)
        assert len(set(said)) == 1, "all ranks say the same"
    else:
        assert all(one.startswith("preflight of fsdp 1, tp 2, pp 1, cp 1: ") for one in said)


def test_each_of_two_ranks_with_half_of_the_head(run) -> None:
    """Log-probs and gradients, against log_softmax."""
    generator = torch.Generator().manual_seed(2)
    hidden_R_D, head_V_D = (
        torch.randn(rows, 6, generator=generator, dtype=torch.float64, requires_grad=True) for rows in (9, 14)
    )
    targets_R = torch.randint(14, (9,), generator=generator)
    weights_R = torch.randn(9, generator=generator, dtype=torch.float64)
    expected_R = (hidden_R_D @ head_V_D.T / 0.7).log_softmax(-1).gather(1, targets_R[:, None]).squeeze(1)
    expected = torch.autograd.grad(expected_R @ weights_R, (hidden_R_D, head_V_D))
    parts = run({"tp": 2}, hidden_R_D.detach(), head_V_D.detach(), targets_R, weights_R, function=half_of_head)
    for values_R, _, _ in parts:
        torch.testing.assert_close(values_R, expected_R.detach(), rtol=1e-11, atol=1e-12)
    hidden_parts, head_parts = [p[1] for p in parts], [p[2] for p in parts]
    torch.testing.assert_close(sum(hidden_parts), expected[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.cat(head_parts), expected[1], rtol=1e-11, atol=1e-12)


@nightly("several ranks once more; by day other layouts compute")
@pytest.mark.parametrize("sizes", [{"fsdp": 2}], ids=str)
def test_scores_by_rounded_weights(run: Any, sizes: dict[str, int]) -> None:
    """Rounding is of the whole model, in every layout, and the weights are what they were afterwards."""
    expected = scored(ALONE, QWEN3)
    assert np.abs(np.concatenate(expected[0]) - np.concatenate(expected[1])).max() > 100 * TOLERANCE
    for found in run(sizes, QWEN3, function=scored_rank):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.concatenate(one), np.concatenate(other), atol=TOLERANCE)


def saved(folder: Path, shape: dict[str, Any]) -> Transformer:
    model = new_model(ModelShape(**{key: value for key, value in shape.items() if key != "dtype"}), 5, 0.15)
    save_model(model, folder, None)
    return model


@nightly("two ranks each; by day what a rank holds is that of tests/sharding, and states move")
@pytest.mark.parametrize(
    ("sizes", "shape", "share"),
    [
        ({"fsdp": 3}, QWEN3 | {"head_dim": 4}, 1 / 3), ({"pp": 2, "tp": 2}, QWEN3, 1 / 2),
        *also(
            ({"fsdp": 2, "tp": 2}, MISTRAL, 1 / 4), ({"pp": 2, "fsdp": 2}, MISTRAL, 1 / 4), ({"cp": 2}, MISTRAL, 1 / 2),
            ({"fsdp": 2}, MISTRAL, 1 / 2), ({"tp": 2}, MISTRAL, 1 / 2), ({"pp": 2}, MISTRAL, 1 / 2),
        ),
    ],
    ids=lambda value: value["family"] if "family" in str(value) else str(value),
)  # fmt: skip
def test_a_rank_reads_what_it_holds(run, make_groups, tmp_path: Path, sizes: dict, shape: dict, share: float) -> None:
    """And has the bits that it has when it reads all, before and after a step.

    Of 4 rows the last of 3 ranks has none. Tied embeddings are on both stages of a pipeline.
    """
    model = new_model(
        ModelShape(**{key: value for key, value in shape.items() if key != "dtype"} | {"num_layers": 4}), 5, 0.15
    )
    save_model(model, tmp_path / "model", None)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    found = run(sizes, tmp_path / "model", make_groups(), TrainerConfig(), function=loaded)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    for own, whole in found:
        assert own.num_bytes == sum(part.nbytes for _, _, part in own.weights.values()) <= 1.1 * share * num_bytes
        assert whole.num_bytes == num_bytes
        assert_same_bits(own, whole)
    everywhere = assembled([own.weights for own, _ in found])
    assert all(torch.equal(everywhere[name], weight) for name, weight in model.named_parameters())


@nightly("several ranks once more; by day other layouts compute")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"pp": 2}, "bfloat16"),
        *also(({"fsdp": 2, "tp": 2}, "float32"), ({"fsdp": 2, "tp": 2}, "bfloat16"), ({"pp": 2}, "float32")),
    ],
    ids=str,
)  # fmt: skip
def test_weights_that_are_not_trained_are_read_too(run, make_groups, tmp_path: Path, sizes: dict, dtype: str) -> None:
    """And adapters, which are in no checkpoint, keep their first values."""
    model, config = saved(tmp_path / "model", MISTRAL), TrainerConfig(lora=LoraConfig(rank=2), dtype=dtype)
    for own, whole in run(sizes, tmp_path / "model", make_groups(), config, function=loaded):
        assert own.num_bytes < 0.75 * sum(weight.nbytes for weight in model.parameters())
        assert_same_bits(own, whole)


@nightly("several ranks once more; by day other layouts compute")
def test_a_critic_reads_what_it_holds_of_a_policy(run, tmp_path: Path) -> None:
    saved(tmp_path / "model", MISTRAL)
    found = run({"pp": 2, "tp": 2}, tmp_path / "model", function=critic_loaded)
    for own, whole in found:
        assert own.keys() == whole.keys()
        assert all(torch.equal(part, whole[name][2]) for name, (_, _, part) in own.items())
    heads = [own["score.weight"][2] for own, _ in found if "score.weight" in own]
    assert heads and not any(head.any() for head in heads)


# Each of the last three takes a process with it, so they come last, the largest first.
FAULTS = [
    *also(("raise", {"fsdp": 2}), ("raise", {"fsdp": 2, "tp": 2})), ("raise", {"pp": 2, "fsdp": 2}),
    *also(("hang", {"fsdp": 2}), ("hang", {"fsdp": 2, "tp": 2}), ("stop", {"fsdp": 3})), ("kill", {"fsdp": 2}),
]  # fmt: skip

CAUSES = {
    "raise": "failed: ZeroDivisionError: no luck, in token_losses (layouts.py:",
    "hang": "was in token_losses (layouts.py:",
    "stop": "sends nothing; ",
    "kill": "is gone",
}


@pytest.mark.parametrize(("how", "sizes"), FAULTS, ids=lambda value: value if isinstance(value, str) else str(value))
def test_what_ends_one_rank_ends_all(workers: Workers, make_groups, how: str, sizes: dict) -> None:
    """At once, in whatever collective the others wait, with what that rank says, or that it says nothing or is gone.

    Of one that does not move any more only the time limit of collectives tells.
    """
    with rendezvous() as where, workers.take(num_ranks(sizes)) as ranks:
        groups, last = make_groups(((5, 1, 9), (3, 3), (4, 2))), len(ranks) - 1
        for worker in ranks:
            worker.start(ready)
        results(ranks)
        for number, worker in enumerate(ranks):
            worker.start(failing, where, number, sizes, groups, how)
        if how == "raise":
            own, failed_s, _ = ranks.pop().result()
            assert own == "ZeroDivisionError: no luck"
        elif how == "kill":
            with pytest.raises(EOFError):
                ranks[-1].result()
            failed_s = time.monotonic()
        found = results(ranks[:last])
        if how in ("stop", "hang"):
            ranks[-1].kill()
    for said, end_s, is_lost in found:
        assert is_lost == (how != "raise")
        assert f"rank {last} {CAUSES[how]}" in said
        if how == "raise":
            assert said.startswith(f"RanksLost: rank {last} ") and ", from __call__ (_base.py:" in said
        if how in ("stop", "hang"):
            assert f"Timed out waiting {LIMIT_S * 1000:.0f}ms" in said and " waited in " in said
        else:
            assert end_s - failed_s < NOTICE_S
