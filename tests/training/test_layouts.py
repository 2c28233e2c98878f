"""Any layout of a trainer or a critic computes what one process computes: losses, log-probs, gradients, weights.

Not covered: GPUs and NCCL, several hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.algorithms.losses.gspo import Gspo
from tests.distributed.ranks import Workers, results
from tests.training.critics import critic_alone, critic_rank
from tests.training.layouts import (
    LLAMA,
    QWEN2,
    QWEN3,
    Found,
    alone,
    assembled,
    difference,
    distance,
    failing,
    preflight,
    rank,
)

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def run(workers: Workers, tmp_path_factory: pytest.TempPathFactory):
    def run(sizes: dict[str, int], *arguments: Any, function: Callable[..., Any] = rank) -> list[Any]:
        folder = tmp_path_factory.mktemp("meeting")
        folder.chmod(0o700)
        with workers.take(int(np.prod(list(sizes.values())))) as ranks:
            for number, worker in enumerate(ranks):
                worker.start(function, folder / "meeting", number, sizes, *arguments)
            found = results(ranks)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    return run


def assert_same(found: list[Found], expected: Found, tolerance: float) -> None:
    for one in found:
        assert one.skipped == expected.skipped
        for step, wanted in zip(one.metrics, expected.metrics, strict=True):
            for name, value in wanted.items():
                if name != "num_input_tokens":  # packing differs with the shares
                    assert step[name] == pytest.approx(value, rel=2 * tolerance, abs=tolerance / 100), name
        for before, after in zip(one.scores, expected.scores, strict=True):
            one_T, other_T = np.concatenate(before), np.concatenate(after)
            np.testing.assert_allclose(one_T, other_T, rtol=10 * tolerance, atol=tolerance / 10)
    gradients, weights = (
        [
            {name: part for name, (_, _, part) in getattr(expected, kind).items()},
            assembled([getattr(o, kind) for o in found]),
        ]
        for kind in ("gradients", "weights")
    )
    assert difference(*gradients) < tolerance
    assert distance(*weights) < tolerance


LAYOUTS = [
    {"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"fsdp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}, {"fsdp": 2, "cp": 2},
    {"pp": 2, "tp": 2}, {"cp": 2, "tp": 2},
]  # fmt: skip


@pytest.mark.parametrize("shape", [LLAMA, QWEN3, QWEN2], ids=lambda shape: shape["family"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(f"{axis}{size}" for axis, size in sizes.items()))
def test_layout_computes_what_one_process_computes(run, make_groups, sizes: dict, shape: dict) -> None:
    """Groups are ragged, and so are the ranks' microbatches, of which some have none left.

    Qwen 3 ties its embeddings and norms its heads: both train wrongly, with an exact loss, in a careless layout.
    """
    batches = [make_groups(), make_groups(seed=1)]
    tolerance = TOLERANCE if shape["dtype"] == torch.float32 else 1e-11
    assert_same(run(sizes, shape, batches), alone(shape, batches), tolerance)


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


def test_bfloat16_is_as_far_from_float32_as_in_one_process(run, make_groups) -> None:
    """Sums over ranks are taken in bfloat16 where one process has none, so bits differ."""
    batches, half = [make_groups()], {"dtype": "bfloat16"}
    exact, rounded = alone(LLAMA, batches), alone(LLAMA, batches, None, half)
    apart = abs(rounded.metrics[0]["loss"] - exact.metrics[0]["loss"])
    assert apart > 0
    for one in run({"fsdp": 2, "tp": 2}, LLAMA, batches, None, half):
        assert one.metrics[0]["loss"] == pytest.approx(exact.metrics[0]["loss"], abs=3 * apart)
        assert one.metrics[0]["grad_norm"] == pytest.approx(exact.metrics[0]["grad_norm"], rel=0.03)


def test_a_loss_over_whole_sequences_in_cut_ones(run, make_groups) -> None:
    """GSPO's ratio is one of the sequence, and its mean one over sequences."""
    batches = [make_groups()]
    assert_same(run({"cp": 2}, LLAMA, batches, Gspo()), alone(LLAMA, batches, Gspo()), TOLERANCE)


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_layers_that_are_computed_again(run, make_groups, sizes: dict) -> None:
    """Their collectives, and the weights that FSDP2 gathers, come once more in backward."""
    found = run(sizes, QWEN3, [make_groups(), make_groups(seed=1)], None, {"activation_checkpointing": True})
    assert_same(found, alone(QWEN3, [make_groups(), make_groups(seed=1)]), TOLERANCE)


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_what_is_not_finite_on_one_rank_is_so_on_all(run, make_groups, policy: str) -> None:
    """One group, which only one rank computes, is poisoned in the second step: nobody takes that step."""
    batches = [make_groups(), make_groups(seed=1), make_groups(seed=2)]
    batches[1][-1].rollouts[1].behavior_logprobs_T[0] = np.nan
    config = {"on_nonfinite": policy, "microbatch_tokens": 12}
    found = run({"fsdp": 2}, LLAMA, batches, None, config)
    if policy == "stop":
        assert all("step 1: loss nan" in one.error and "group 2 rollout 1 (behavior" in one.error for one in found)
    else:
        assert [one.skipped for one in found] == [[False, True, False]] * 2
    # What is left is a run that never had that step.
    kept = batches[:1] if policy == "stop" else [batches[0], batches[2]]
    never = run({"fsdp": 2}, LLAMA, kept, None, config)
    for one, other in zip(found, never, strict=True):
        for name, (_, _, part) in one.weights.items():
            assert torch.equal(part, other.weights[name][2]), name


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


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_a_critic_computes_what_one_process_computes(run, make_groups, sizes: dict) -> None:
    """Values, loss, gradients and weights; it values in the middle of a step, by the weights of before."""
    arguments = (QWEN3, [make_groups(), make_groups(seed=1)], {"passes": 2})
    found, expected = run(sizes, *arguments, function=critic_rank), critic_alone(*arguments)
    assert_same(found, expected, TOLERANCE)
    for one in found:
        values, wanted = (np.concatenate([v for of_step in which.scores for v in of_step]) for which in (one, expected))
        assert np.abs(values - wanted).max() < TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_critic_s_step_that_is_not_finite_on_one_rank_is_so_on_all(run, make_groups, policy: str) -> None:
    batches = [make_groups(), make_groups(seed=1, reward=lambda index: np.inf if index == 3 else 1.0)]
    for one in run({"fsdp": 2}, QWEN3, batches, {"on_nonfinite": policy}, function=critic_rank):
        assert one.skipped == ([False, True] if policy == "skip" else [False])
        if policy == "stop":
            assert "critic step 1: loss inf" in one.error and "group 2 rollout 3 (loss)" in one.error
            assert "lower critic.learning_rate_scale" in one.error


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


def test_what_fails_on_one_rank_ends_all_with_the_cause(run, make_groups) -> None:
    """The other rank waits for it in a collective, no longer than for the mesh's time-out."""
    cause, consequence = sorted(run({"fsdp": 2}, make_groups(((5, 1, 9), (3, 3))), function=failing), key=len)
    assert cause == "ZeroDivisionError: no luck"
    assert consequence.startswith("RanksLost: rank ")
    assert consequence.endswith(" failed: ZeroDivisionError: no luck")
