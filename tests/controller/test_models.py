"""The controller with reference, critic and reward model, under a virtual clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from llamarl.cluster.api import MeshFailed
from llamarl.controller.flight import FIRST_EVAL_ID
from llamarl.types import Outcome, RewardResult
from tests.controller.fakes import Run, config
from tests.executors.ledger import Generator, Model, Trainer, logprobs, values


def test_what_they_say_comes_with_the_groups(tmp_path: Path) -> None:
    """To trainer and critic alike; a reward model adds its share, and leaves what is right to the rules."""
    judge = Model(lambda rollout: RewardResult(outcome=Outcome.SCORE, value=-4.0 - rollout.index))
    critic, reference = Model(values), Model(logprobs)
    run = Run(
        config(tmp_path, reward={"model": {"path": "nowhere", "weight": 0.5}}), tmp_path,
        models={"reward-model": judge, "reference": reference, "critic": critic},
    ).train()  # fmt: skip
    learnt = [group for _, _, groups in critic.learning for group in groups]
    assert [group.group_id for group in learnt] == [group.group_id for group in run.trainer.consumed]
    for group in (*run.trainer.consumed, *learnt):
        for rollout, result in zip(group.rollouts, group.results, strict=True):
            assert np.array_equal(rollout.values_T, values(rollout)) and rollout.num_tokens
            assert np.array_equal(rollout.reference_logprobs_T, logprobs(rollout))
            right = float(rollout.index > 0)
            assert result.value == right + 0.5 * (-4 - rollout.index)
            assert result.is_right == bool(right)
    assert [row["solve_rate"] for row in run.steps] == [0.5] * 6


def test_the_critic_is_at_most_one_step_behind(tmp_path: Path) -> None:
    """A slow one does not stall a step that is under way, and the next but one waits for it."""
    critic = Model(values, learn_s=2.0)
    run = Run(config(tmp_path), tmp_path, trainer=Trainer(step_s=0.5), models={"critic": critic}).train()
    assert [ids for _, ids, _ in critic.learning] == [ids for _, ids in critic.learnt]
    begins = [begin_s for begin_s, _ in run.trainer.spans]
    ends = [end_s for end_s, _ in critic.learnt]
    assert all(begin_s > end_s for begin_s, end_s in zip(begins[2:], ends, strict=False))
    assert begins[1] < ends[0], "the second step waited for the critic"
    assert [row["extra.value_loss"] for row in run.steps] == [1, 2, 3, 4, 5, 6]


def test_the_critic_values_between_two_microbatches(tmp_path: Path) -> None:
    """A group waits for one of them, not for the whole step."""
    critic = Model(values, learn_s=8.0)
    Run(config(tmp_path), tmp_path, trainer=Trainer(step_s=8.0), models={"critic": critic}).train()
    inside = [
        when for (begin_s, *_), (end_s, _) in zip(critic.learning, critic.learnt, strict=True)
        for when in (one.end_s for one in critic.calls("score")) if begin_s + 0.1 < when < end_s - 0.1
    ]  # fmt: skip
    assert inside


def test_a_step_that_the_critic_skipped_is_told(tmp_path: Path) -> None:
    run = Run(config(tmp_path), tmp_path, models={"critic": Model(values, skips=3)}).train()
    assert run.warnings == ["step 3 of the critic was skipped (trainer.on_nonfinite = 'skip'): nan"]


def test_the_critic_is_saved_before_the_trainer(tmp_path: Path) -> None:
    """Both copy their weights before the next step; the trainer's checkpoint counts only once the critic's does."""
    critic, trainer = Model(values), Trainer()
    changes = {"steps": 4, "checkpoint": {"every_steps": 2}}
    Run(config(tmp_path, **changes), tmp_path, trainer=trainer, models={"critic": critic}).train()
    assert critic.saved == [2, 4] == [version for version, _ in trainer.saved]
    verbs = {"learn": "learns", "save": "copies", "commit": "commits"}
    calls = [(one.number, f"{handle.name} {verbs[one.method]}") for handle in (critic, trainer)
             for one in handle.ledger if one.method in verbs]  # fmt: skip
    said = [text for _, text in sorted(calls)]
    assert [one for one in said if "commits" in one] == ["critic commits", "trainer commits"] * 2
    assert said[:4] == ["critic learns", "critic learns", "trainer copies", "critic copies"]


@pytest.mark.parametrize("first_id", [FIRST_EVAL_ID, 1000])
def test_evaluations_ask_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_id: int) -> None:
    """Wherever their ids begin: what a request is for is its `purpose`."""
    monkeypatch.setattr("llamarl.controller.evaluation.FIRST_EVAL_ID", first_id)
    reference = Model(logprobs)
    run = Run(
        config(tmp_path, data={"eval": "jsonl"}, eval={"every_steps": 2}), tmp_path,
        num_eval=3, models={"reference": reference},
    ).train()  # fmt: skip
    assert len(run.evals) == 2
    assert reference.asked and max(reference.asked) < first_id


@pytest.mark.parametrize("name", ["reference", "critic", "reward-model"])
def test_the_death_of_one_ends_the_run_with_its_name(tmp_path: Path, name: str) -> None:
    says = {"critic": values, "reference": logprobs}
    model = Model(says.get(name, lambda _: RewardResult(outcome=Outcome.SCORE, value=1.0)))

    async def kill(run: Run) -> None:
        while not run.trainer.spans:
            await asyncio.sleep(0.05)
        run.handles[name].die(MeshFailed(name, (0,), "killed"))

    with pytest.raises(MeshFailed, match=rf"{name} \(rank 0\): killed"):
        Run(config(tmp_path, steps=50), tmp_path, models={name: model}).train(strike=kill)


def test_long_rollouts_keep_what_was_said(tmp_path: Path) -> None:
    critic, lengths = Model(values), (25_000, 2)
    generators = [Generator(num_tokens=lambda _, index: lengths[index], token_s=1e-3)]
    run = Run(config(tmp_path, steps=1), tmp_path, generators, models={"critic": critic}).train()
    for group in (*run.trainer.consumed, *critic.learning[0][2]):
        assert tuple(len(one.values_T) for one in group.rollouts) == lengths
        assert group.rollouts[0].values_T[-1] == group.group_id + 0.25
