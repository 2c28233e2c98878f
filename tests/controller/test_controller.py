"""The loops of a run: order, staleness, evaluation."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llamarl.config.cluster import ClusterConfig
from llamarl.controller.admission import TooManyInvalid
from llamarl.controller.supervision import Stalled
from llamarl.controller.train_loop import TrainLoop
from llamarl.data.sampler import PromptSampler
from llamarl.journal.records import encode
from llamarl.journal.writer import Journal
from llamarl.types import RewardResult, Rollout
from tests.controller.fakes import Run, config
from tests.executors.ledger import RIGHT, UNJUDGED, WRONG, Generator, Reward, Trainer
from tests.nightly import crossed, nightly


def random_durations(seed: int) -> Generator:
    return Generator(duration_s=lambda group_id, index: random.Random(f"{seed}/{group_id}/{index}").uniform(0.1, 10))


@pytest.mark.parametrize(("bound", "replicas"), crossed([(0, 1), (0, 4), (1, 1), (1, 4), (2, 5), (4, 7)], [1, 3]))
def test_no_rollout_is_older_than_the_bound(tmp_path: Path, bound: tuple[int, int], replicas: int) -> None:
    staleness, window = bound
    wanted = config(tmp_path, steps=20, rollout={"prompts_per_step": 4, "max_staleness": staleness, "window": window})
    run = Run(wanted, tmp_path, [random_durations(seed) for seed in range(replicas)]).train()
    limit = run.steps[0]["staleness_limit"]
    assert limit == (staleness + -(-(window - 1) // 4) if staleness else 0)
    ages = [row["step"] - 1 - row["policy_versions"][0][0] for row in run.rollouts]
    assert [row["staleness"] for row in run.rollouts] == ages
    assert max(ages) <= limit
    assert staleness == 0 or max(ages) > 0, "nothing was stale: the run was not asynchronous"
    assert not run.complaints


@pytest.mark.parametrize(
    ("staleness", "window", "max_active"), [(1, 1, 0), (1, 4, 0), (2, 5, 0), (1, 2, 11), (1, 4, 9), (2, 2, 15)]
)
def test_a_slow_group_becomes_as_old_as_the_bound_allows(
    tmp_path: Path, staleness: int, window: int, max_active: int
) -> None:
    """The last of those that are admitted at once: all others and what the window lets by are trained on before it."""
    slow = (max_active or (staleness + 1) * 4) - 1
    generators = [Generator(duration_s=lambda group_id, _: 100.0 if group_id == slow else 0.1) for _ in range(2)]
    rollout = {"prompts_per_step": 4, "max_staleness": staleness, "window": window, "max_active": max_active}
    run = Run(config(tmp_path, steps=9, rollout=rollout), tmp_path, generators).train()
    (age,) = {row["staleness"] for row in run.rollouts if row["group_id"] == slow}
    assert age == max(row["staleness"] for row in run.rollouts) == run.steps[0]["staleness_limit"]
    assert not run.complaints


@pytest.mark.parametrize("window", [1, 4])
def test_every_admitted_prompt_is_trained_once(tmp_path: Path, window: int) -> None:
    run = Run(config(tmp_path, steps=20, rollout={"window": window}), tmp_path, [random_durations(0)], num_train=40)
    trained = [row["prompt_id"] for row in run.train().rollouts]
    assert sorted(trained) == sorted(2 * [f"p-{n}" for n in range(40)])
    keys = {(row["group_id"], row["index"]) for row in run.rollouts}
    assert len(keys) == len(run.rollouts) == 80
    assert [row["step"] for row in run.steps] == list(range(1, 21))


def test_zero_staleness_takes_turns(tmp_path: Path) -> None:
    """Prompts -> all rollouts -> step -> adoption -> next prompts; nothing overlaps."""
    run = Run(config(tmp_path, steps=5, rollout={"max_staleness": 0}), tmp_path, [random_durations(1)]).train()
    generator, trainer = run.generators[0], run.trainer
    turns = [generator.spans[n : n + 4] for n in range(0, 20, 4)]
    for number, (rollouts, (begin_s, end_s)) in enumerate(zip(turns, trainer.spans, strict=True)):
        assert max(end for _, end in rollouts) < begin_s
        adopted_s, version = generator.adopted[number + 1]
        assert end_s < adopted_s and version == number + 1
        if number + 1 < len(turns):
            assert min(begin for begin, _ in turns[number + 1]) >= adopted_s
    assert {row["staleness"] for row in run.rollouts} == {0}


@pytest.mark.parametrize("is_prompt", [True, False])
def test_a_step_is_recorded_after_its_requests_and_before_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_prompt: bool
) -> None:
    """Writing takes longer than generators need to begin; and what is newer than the last step on record is void. So a
    step that is not written soon is written before the first rollout that needs it."""
    sent_s, sent_before, newest, last, step = list[float](), list[list[float]](), set[int](), [0], Journal.step

    class Sending(Generator):
        async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
            if method == "submit":
                sent_s.append(asyncio.get_running_loop().time())
            return await super().call(method, *args, timeout_s=timeout_s, **kwargs)

    def recording(self: Journal, *arguments: Any) -> None:
        sent_before.append(list(sent_s))
        step(self, *arguments)
        last[0] = self.version

    def encoding(header: Mapping[str, Any], parts: Sequence[tuple[int, Rollout]] = (), **options: Any) -> bytes:
        newest.update(int(one.policy_versions_T.max()) - last[0] for _, one in parts)
        return encode(header, parts, **options)

    monkeypatch.setattr(Journal, "step", recording)
    monkeypatch.setattr("llamarl.journal.writer.encode", encoding)
    if not is_prompt:
        monkeypatch.setattr(TrainLoop, "_write_step", lambda self: asyncio.sleep(0))
    run = Run(
        config(tmp_path, rollout={"max_staleness": 0}),
        tmp_path,
        [Sending(duration_s=random_durations(1).duration_s)],
        keeps_journal=True,
    ).train()
    assert newest == {0}
    assert len(sent_before) == 6
    for (_, end_s), before_s in zip(run.trainer.spans[:-1], sent_before, strict=False):
        assert any(at_s >= end_s for at_s in before_s), "requests for its slots have left"


def test_generators_are_told_what_a_step_lacks(tmp_path: Path) -> None:
    """So that they answer once for all of it, and not for each."""
    wanted = config(tmp_path, rollout={"prompts_per_step": 4, "max_staleness": 0})
    run = Run(wanted, tmp_path, [random_durations(seed) for seed in range(2)]).train()
    asked = [one.calls("collect")[0].args for one in run.generators]
    assert [number for number, _ in asked] == [2, 2]
    assert sorted(group_id for _, needed in asked for group_id in needed) == [0, 1, 2, 3]


def test_generation_goes_on_while_the_trainer_works(tmp_path: Path) -> None:
    run = Run(config(tmp_path, steps=8), tmp_path, trainer=Trainer(step_s=1.5)).train()
    overlaps = [
        (begin, end) for begin, end in run.generators[0].spans for start, stop in run.trainer.spans if begin < stop
        and start < end
    ]  # fmt: skip
    assert overlaps
    in_turn = Run(
        config(tmp_path, steps=8, rollout={"max_staleness": 0}), tmp_path, trainer=Trainer(step_s=1.5)
    ).train()
    assert run.wall_s < 0.75 * in_turn.wall_s


def test_published_weights_carry_the_version_that_they_are(tmp_path: Path) -> None:
    """Also where a generator adopts so slowly that the trainer is steps ahead."""
    slow = Generator(duration_s=lambda group_id, index: 0.1, adopt_s=4.0)
    run = Run(config(tmp_path, steps=12, rollout={"max_staleness": 4}), tmp_path, [slow]).train()
    assert [name for name, _ in run.trainer.published] == [steps for _, steps in run.trainer.published]
    assert slow.version == 12


def test_published_weights_carry_the_version_that_they_are_while_a_generator_joins(tmp_path: Path) -> None:
    late = Generator(duration_s=lambda group_id, index: 0.3, adopt_s=3.0)

    async def join(run: Run) -> None:
        await asyncio.sleep(4.0)
        late.adopt_s = 3.0
        await run.add("generator-1", late)
        late.adopt_s = 0.1

    quick = Generator(duration_s=lambda group_id, index: 0.3)
    run = Run(config(tmp_path, steps=40, rollout={"max_staleness": 4}), tmp_path, [quick]).train(strike=join)
    assert [name for name, _ in run.trainer.published] == [steps for _, steps in run.trainer.published]
    assert late.version == 40 and late.spans
    assert min(version for _, version in late.adopted) > 0
    assert max(row["staleness"] for row in run.rollouts) <= 4


def test_evaluation_does_not_stop_training(tmp_path: Path) -> None:
    def slow_if_held_out(group_id: int, index: int) -> float:
        return 20.0 if group_id >= 1 << 40 else 1.0

    (tmp_path / "plain").mkdir()
    plain = Run(config(tmp_path, steps=10), tmp_path / "plain", [Generator(duration_s=slow_if_held_out)]).train()
    settings = config(tmp_path, steps=10, eval={"every_steps": 3, "max_prompts": 5})
    run = Run(settings, tmp_path, [Generator(duration_s=slow_if_held_out)], num_eval=8).train()
    assert run.steps[-1]["wall_s"] < plain.steps[-1]["wall_s"] + 1.0
    assert [row["step"] for row in run.evals] == [3, 6, 9]
    assert [row["policy_version_min"] for row in run.evals] == [3, 6, 9]
    assert run.evals[0]["policy_version_max"] > 3, "training went on while it answered"
    assert {row["num_prompts"] for row in run.evals} == {5}


def test_a_broken_grader_ends_the_run(tmp_path: Path) -> None:
    def judge(rollout: Rollout) -> RewardResult:
        return UNJUDGED if rollout.group_id >= 4 else RIGHT

    run = Run(config(tmp_path), tmp_path, reward=Reward(judge))
    said = r"4 of 4 rewards of step 3 are invalid \(reward.max_invalid_share = 0.5\); the first says: the grader is"
    with pytest.raises(TooManyInvalid, match=said):
        run.train()
    assert run.trainer.version == 2


def test_some_invalid_rewards_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(config(tmp_path), tmp_path, reward=Reward(lambda rollout: UNJUDGED if rollout.index else WRONG)).train()
    assert [row["invalid_share"] for row in run.steps] == [0.5] * 6
    assert {row["reason"] for row in run.rollouts if row["outcome"] == "invalid"} == {"the grader is broken"}


@pytest.mark.parametrize("who", ["generator-0", "reward", "trainer"])
def test_a_stall_says_who_waits_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    generator, reward, trainer = Generator(), Reward(), Trainer()
    for_ever_s = 1e6
    if who == "generator-0":
        generator.duration_s = lambda group_id, index: for_ever_s if group_id == 5 else 1.0
    elif who == "reward":
        reward.score_s = for_ever_s
    else:
        trainer.step_s = for_ever_s
    monkeypatch.setattr(ClusterConfig, "stall_timeout_s", property(lambda _: 40.0))
    run = Run(config(tmp_path), tmp_path, [generator], reward, trainer)
    with pytest.raises(Stalled) as caught:
        run.train()
    text = str(caught.value)
    assert "nothing finished for 40 s (twice cluster.timeout_s)" in text
    busy = {
        "generator-0": (
            "generator-0 owes 2 rollouts",
            "step 3 takes 2 groups (window 1",
            "3 are ready",
            "group 5 with 0",
        ),
        "reward": ("reward (pid 0): score", "owes 0 rollouts", "4 are in flight, the oldest is group 0 with 2 of 2"),
        "trainer": ("trainer (pid 0): step", "generator-0 owes 0 rollouts", "none is in flight, 0 slots are free"),
    }
    for part in busy[who]:
        assert part in text, text
    assert run.wall_s < 60
    assert not run.complaints


def test_slow_work_is_no_stall(tmp_path: Path) -> None:
    run = Run(
        config(tmp_path, steps=3, cluster={"timeout_s": 36.0}),
        tmp_path,
        [Generator(duration_s=lambda group_id, index: 35.0)],
        trainer=Trainer(step_s=35.0),
    )
    assert run.train().version == 3


def test_steps_are_reported_in_order_and_times_add_up(tmp_path: Path) -> None:
    run = Run(config(tmp_path, steps=9, rollout={"window": 3}), tmp_path, [random_durations(3)]).train()
    assert [row["policy_version"] for row in run.steps] == list(range(1, 10))
    ends = [0.0, *(row["wall_s"] for row in run.steps)]
    for (before, after), row in zip(pairwise(ends), run.steps, strict=True):
        assert row["step_s"] == pytest.approx(after - before)
        assert row["sync_s"] == pytest.approx(run.generators[0].adopt_s)


def test_prompts_come_in_the_sampler_s_order(tmp_path: Path) -> None:
    run = Run(config(tmp_path, steps=4, seed=3), tmp_path, num_train=11).train()
    sampler = PromptSampler(11, 3)
    first_in_group = [row["prompt_id"] for row in run.rollouts if not row["index"]]
    assert first_in_group == [f"p-{sampler.next()}" for _ in range(8)]


@nightly("a process; architecture/test_imports.py reads imports by day")
def test_the_controller_imports_no_torch() -> None:
    code = (
        "import sys, llamarl.run.train, llamarl.parts.answers.evaluate, llamarl.cli.train; "
        "import llamarl.run.prepare; from llamarl.config import load_config; "
        "llamarl.run.prepare.check_parts(load_config('configs/demo.toml')); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr or "torch was imported"
