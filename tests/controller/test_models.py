"""The controller with reference, critic and reward model, under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.cluster.api import MeshFailed
from llamarl.controller.flight import FIRST_EVAL_ID
from llamarl.training.result import StepResult
from llamarl.types import Outcome, Prompt, RewardResult, Rollout, RolloutGroup
from tests.controller.fakes import Generator, Run, Trainer, config


@dataclass
class Model:
    """A reference, critic or reward model; `says` is its answer about one rollout."""

    says: Callable[[Rollout], Any]
    learn_s: float = 0.1
    asked: list[int] = field(default_factory=list)
    """Group ids."""
    asked_s: list[float] = field(default_factory=list)
    """When each of these calls ended."""
    learning: list[tuple[float, list[int], list[RolloutGroup]]] = field(default_factory=list)
    """(begin of each step, its groups' ids, its groups)."""
    learnt: list[tuple[float, list[int]]] = field(default_factory=list)
    """(end of each step, its groups' ids)."""
    saved: list[int] = field(default_factory=list)
    taught: list[list[int]] = field(default_factory=list)
    """Group ids of each step: its weights."""
    weights: dict[int, list[list[int]]] = field(default_factory=dict)
    """`taught` of each checkpoint."""
    first: int | None = 0
    """Step that it was resumed at; None: some other."""
    skips: int = 0
    """Step that is not finite."""
    _pieces: list[tuple[int, list[int], int]] = field(default_factory=list)
    """Of steps under way: number, groups' ids, microbatches left."""
    _results: dict[int, StepResult] = field(default_factory=dict)
    _groups: dict[int, RolloutGroup] = field(default_factory=dict)

    async def score(self, groups: list[tuple[Prompt, list[Rollout]]]) -> list[list[Any]]:
        await asyncio.sleep(0.01)
        self.asked_s.append(asyncio.get_running_loop().time())
        self.asked += [rollouts[0].group_id for _, rollouts in groups]
        return [[self.says(rollout) for rollout in rollouts] for _, rollouts in groups]

    async def add_groups(self, groups: list[RolloutGroup]) -> None:
        for group in groups:
            self._groups[group.group_id] = group

    def another(self) -> Model:
        """A new one in place of this one, which is dead; its disk and what it was asked are there."""
        return replace(self, learning=[], _pieces=[], _results={}, _groups={}, taught=[])

    async def restore(self, newest: int) -> int:
        step = max((step for step in self.weights if step <= newest), default=0)
        self.taught = list(self.weights.get(step, []))
        return step

    async def learn(self, step: int, group_ids: list[int]) -> None:
        groups = [self._groups.pop(group_id) for group_id in group_ids]
        self.learning.append((asyncio.get_running_loop().time(), group_ids, groups))
        self._pieces.append((step, group_ids, PIECES))

    async def learn_on(self, step: int) -> StepResult | None:
        if step not in self._results:
            await self._advance()
        return self._results.pop(step, None)

    async def _advance(self) -> None:
        first, group_ids, left = self._pieces[0]
        await asyncio.sleep(self.learn_s / PIECES)
        self._pieces[0] = first, group_ids, left - 1
        if left == 1:
            self._pieces.pop(0)
            self.taught.append(list(group_ids))
            self.learnt.append((asyncio.get_running_loop().time(), group_ids))
            self._results[first] = StepResult(
                policy_version=first, skipped=first == self.skips, cause="nan",
                metrics={"value_loss": float(len(self.learnt))},
            )  # fmt: skip

    async def save(self, step: int) -> None:
        while self._pieces:
            await self._advance()
        assert self.first is None or len(self.taught) + self.first == step, "trainer and critic take the same steps"
        self.saved.append(step)
        self.copied = step, list(self.taught)

    async def commit(self) -> str:
        step, taught = self.copied
        self.weights[step] = taught
        return "somewhere"


PIECES = 4
"""Microbatches of a critic's step."""


def values(rollout: Rollout) -> np.ndarray:
    return np.full(rollout.num_tokens, rollout.group_id + 0.25, np.float32)


def logprobs(rollout: Rollout) -> np.ndarray:
    return np.full(rollout.num_tokens, -rollout.index - 0.5, np.float32)


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
        for when in critic.asked_s if begin_s + 0.1 < when < end_s - 0.1
    ]  # fmt: skip
    assert inside


def test_a_step_that_the_critic_skipped_is_told(tmp_path: Path) -> None:
    run = Run(config(tmp_path), tmp_path, models={"critic": Model(values, skips=3)}).train()
    assert run.warnings == ["step 3 of the critic was skipped (trainer.on_nonfinite = 'skip'): nan"]


def test_the_critic_is_saved_before_the_trainer(tmp_path: Path) -> None:
    """Both copy their weights before the next step; the trainer's checkpoint counts only once the critic's does."""
    order = list[str]()

    def noted(cls: type, name: str) -> Any:
        class Noted(cls):
            async def learn(self, step: int, group_ids: list[int]) -> None:
                order.append(f"{name} learns")
                await super().learn(step, group_ids)

            async def save(self, state: Any) -> Any:
                order.append(f"{name} copies")
                return await super().save(state)

            async def commit(self) -> Any:
                order.append(f"{name} commits")
                return await super().commit()

        return Noted

    critic, trainer = noted(Model, "critic")(values), noted(Trainer, "trainer")()
    changes = {"steps": 4, "checkpoint": {"every_steps": 2}}
    Run(config(tmp_path, **changes), tmp_path, trainer=trainer, models={"critic": critic}).train()
    assert critic.saved == [2, 4] == [version for version, _ in trainer.saved]
    assert [one for one in order if "commits" in one] == ["critic commits", "trainer commits"] * 2
    assert order[:4] == ["critic learns", "critic learns", "trainer copies", "critic copies"]


@pytest.mark.parametrize("first_id", [FIRST_EVAL_ID, 1000])
def test_evaluations_ask_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_id: int) -> None:
    """Wherever their ids begin: what a request is for is its `purpose`."""
    monkeypatch.setattr("llamarl.controller.controller.FIRST_EVAL_ID", first_id)
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
        run.handles[name].failed.set_result(MeshFailed(name, (0,), "killed"))

    with pytest.raises(MeshFailed, match=rf"{name} \(rank 0\): killed"):
        Run(config(tmp_path, steps=50), tmp_path, models={name: model}).train(strike=kill)


def test_long_rollouts_keep_what_was_said(tmp_path: Path) -> None:
    critic, lengths = Model(values), (25_000, 2)
    generators = [Generator(num_tokens=lambda _, index: lengths[index])]
    run = Run(config(tmp_path, steps=1), tmp_path, generators, models={"critic": critic}).train()
    for group in (*run.trainer.consumed, *critic.learning[0][2]):
        assert tuple(len(one.values_T) for one in group.rollouts) == lengths
        assert group.rollouts[0].values_T[-1] == group.group_id + 0.25
