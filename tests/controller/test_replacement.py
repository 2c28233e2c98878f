"""Dynamic sampling and greedy baselines through the controller."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest

from llamarl.controller.flight import FIRST_GREEDY_ID, InFlightRollout, PendingGroup, greedy_request
from llamarl.controller.supervision import Interrupted
from llamarl.data.sampler import PromptSampler
from llamarl.executors.replies import ScoredResponse
from llamarl.types import FinishReason, GenerationRequest, Outcome, RewardResult, Rollout, SamplingParams
from tests.controller.fakes import Run, config, prompts
from tests.controller.test_controller import random_durations
from tests.controller.test_failures import Sleeper
from tests.executors.ledger import RIGHT, WRONG, Generator, Reward, Trainer
from tests.nightly import nightly, some

P = 4


def is_flat(group_id: int, share: float = 0.6) -> bool:
    return random.Random(group_id).random() < share


def judge(rollout: Rollout) -> RewardResult:
    return RIGHT if rollout.index or is_flat(rollout.group_id) else WRONG


def sampled(tmp_path: Path, attempts: int, *, seed: int = 0, share: float = 0.6, **rollout: int) -> Run:
    """A run of ten steps in which a share of the groups is flat."""
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    settings = config(tmp_path, steps=10, rollout={"prompts_per_step": P, "max_attempts": attempts} | rollout)
    reward = Reward(lambda one: RIGHT if one.index or is_flat(one.group_id, share) else WRONG)
    return Run(settings, tmp_path, [random_durations(seed + n) for n in range(2)], reward).train()


@pytest.mark.parametrize(("staleness", "window"), some([(0, 1), (0, 4), (1, 1), (1, 6), (3, 5)], 2))
def test_flat_groups_are_replaced_and_no_rollout_is_older_than_the_bound(
    tmp_path: Path, staleness: int, window: int
) -> None:
    run = sampled(tmp_path, 50, max_staleness=staleness, window=window)
    trained = [row["group_id"] for row in run.rollouts if not row["index"]]
    assert len(set(trained)) == len(trained) == 10 * P
    assert not any(map(is_flat, trained))
    flat = [group_id for group_id in range(max(trained)) if is_flat(group_id)]
    assert sum(row["extra.dropped_groups"] for row in run.steps) >= len(flat) - (staleness + 1) * P > 0
    assert {row["extra.flat_groups"] for row in run.steps} == {0} and not run.warnings
    assert max(row["staleness"] for row in run.rollouts) <= run.steps[0]["staleness_limit"]
    assert sorted(one.group_id for one in run.trainer.consumed) == sorted(trained)
    given = [one.args[-1] for one in run.trainer.ledger if one.method in ("add_groups", "step")]
    assert {group.group_id for groups in given for group in groups} == set(trained), "what is dropped stays here"
    sampler = PromptSampler(1000, 0)
    prompts = [f"p-{sampler.next()}" for _ in range(max(trained) + 1)]
    assert all(row["prompt_id"] == prompts[row["group_id"]] for row in run.rollouts)
    assert not run.complaints


def test_a_synchronous_run_replaces_the_same_groups_at_any_speed(tmp_path: Path) -> None:
    """Also at the limit of attempts, where not all flat groups are dropped."""
    runs = [
        [(row["step"], row["group_id"], row["prompt_id"]) for row in sampled(tmp_path, 2, seed=seed, max_staleness=0)
         .rollouts]
        for seed in (0, 10, 20)
    ]  # fmt: skip
    assert runs[0] == runs[1] == runs[2]
    assert any(is_flat(group_id) for _, group_id, _ in runs[0])
    assert len({group_id for _, group_id, _ in runs[0]}) == 10 * P < max(group_id for _, group_id, _ in runs[0])


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_step_that_has_tried_enough_takes_what_is_there_and_says_so(tmp_path: Path, staleness: int) -> None:
    run = sampled(tmp_path, 3, share=1.0, max_staleness=staleness)
    assert [row["extra.flat_groups"] for row in run.steps] == [P] * 10
    dropped = [row["extra.dropped_groups"] for row in run.steps]
    assert 10 * P <= sum(dropped) <= 10 * 2 * P
    assert staleness or dropped == [2 * P] * 10
    (said,) = run.warnings
    assert "step 1 takes 4 groups whose rewards are all equal, as 3 attempts found no others (rollout.max" in said


def test_without_replacement_flat_groups_are_counted_only(tmp_path: Path) -> None:
    run = sampled(tmp_path, 1)
    assert sum(row["extra.flat_groups"] for row in run.steps) == sum(map(is_flat, range(10 * P))) > 0
    assert {row["extra.dropped_groups"] for row in run.steps} == {0} and not run.warnings


def test_a_resumed_run_drops_and_trains_on(tmp_path: Path) -> None:
    settings = config(tmp_path, steps=4, rollout={"max_attempts": 20, "max_staleness": 2, "window": 4})
    disk = Trainer()
    Run(settings, tmp_path, [random_durations(0)], Reward(judge), disk).train()
    more = config(tmp_path, steps=9, rollout={"max_attempts": 20, "max_staleness": 2, "window": 4})
    again = Run(more, tmp_path, [random_durations(1)], Reward(judge), Trainer(version=4, saved=disk.saved))
    again.train(json.loads(disk.saved[-1][1]))
    trained = [row["prompt_id"] for row in again.rollouts if not row["index"]]
    assert len(set(trained)) == len(trained) == 9 * 2
    assert [row["step"] for row in again.steps] == list(range(1, 10))


@nightly("two runs; by day groups are replaced at any speed")
def test_an_interrupted_run_tries_no_more_than_one_that_was_not(tmp_path: Path) -> None:
    """Attempts in vain for the step to come are in its checkpoint, so that it takes what the whole run took."""
    settings = config(tmp_path, steps=5, rollout={"max_attempts": 3, "max_staleness": 0})
    whole = Run(settings, tmp_path, [random_durations(0)], Reward(lambda one: RIGHT)).train()
    steps = [(row["step"], row["group_id"], row["index"]) for row in whole.rollouts]

    async def interrupt(run: Run) -> None:
        await asyncio.sleep(moments[0])
        run.supervisor.fail(Interrupted("ended by SIGINT"))

    num_in_vain, moments = 0, list(range(5, int(whole.wall_s), 9))
    while moments:
        for file in tmp_path.glob("*.jsonl"):
            file.unlink()
        disk = Trainer()
        with pytest.raises(Interrupted):
            Run(settings, tmp_path, [random_durations(0)], Reward(lambda one: RIGHT), disk).train(strike=interrupt)
        moments.pop(0)
        state = json.loads(disk.saved[-1][1])
        num_in_vain += state["num_dropped"] > 0
        again = Trainer(version=state["step"], saved=disk.saved)
        run = Run(settings, tmp_path, [random_durations(1)], Reward(lambda one: RIGHT), again).train(state)
        assert [(row["step"], row["group_id"], row["index"]) for row in run.rollouts] == steps
    assert num_in_vain > 2


def test_an_interruption_before_a_step_begins_gives_no_new_attempts(tmp_path: Path) -> None:
    """Generators go to sleep when the step has its groups, which the checkpoint still counts among the unconsumed."""
    settings = config(
        tmp_path, steps=3, rollout={"max_attempts": 3, "max_staleness": 0}, cluster={"placement": "colocated"}
    )
    reward = Reward(lambda one: RIGHT)
    whole = Run(settings, tmp_path, [Sleeper()], reward).train()
    groups = [(row["step"], row["group_id"]) for row in whole.rollouts]
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    generator, disk = Sleeper(), Trainer()

    async def interrupt(run: Run) -> None:
        while generator.num_sleeps < 2:
            await asyncio.sleep(0.5)
        run.supervisor.fail(Interrupted("ended by SIGINT"))

    with pytest.raises(Interrupted):
        Run(settings, tmp_path, [generator], reward, disk).train(strike=interrupt)
    state = json.loads(disk.saved[-1][1])
    assert state["num_dropped"] == 4 and len(state["unconsumed"]) == 2 and state["step"] == 1
    again = Run(settings, tmp_path, [Sleeper()], reward, Trainer(version=1, saved=disk.saved)).train(state)
    assert [(row["step"], row["group_id"]) for row in again.rollouts] == groups


@pytest.mark.parametrize("segment_tokens", [0, 3])
def test_a_group_comes_with_the_reward_of_one_greedy_response(tmp_path: Path, segment_tokens: int) -> None:
    """Neither trained on nor counted; evaluations have none."""
    settings = config(
        tmp_path,
        trainer={"advantage": "remax"},
        rollout={"segment_tokens": segment_tokens},
        eval={"every_steps": 3, "max_prompts": 2},
    )
    half = RewardResult(outcome=Outcome.SCORE, value=0.5)
    reward = Reward(lambda rollout: half if rollout.group_id >= FIRST_GREEDY_ID else RIGHT)
    greedy = Generator(num_tokens=lambda group_id, index: 3 + random.Random(f"{group_id}/{index}").randrange(20))
    run = Run(settings, tmp_path, [greedy], reward, num_eval=2).train()
    asked = [request for one in greedy.calls("submit") for request in one.args[0]]
    assert [group.baseline for group in run.trainer.consumed] == [half] * 12
    for group in run.trainer.consumed:
        assert [rollout.index for rollout in group.rollouts] == [0, 1]
        assert {rollout.group_id for rollout in group.rollouts} == {group.group_id}
    assert {row["reward_mean"] for row in run.steps} == {1.0} and len(run.rollouts) == 24
    by_temperature = {
        temperature: {request.group_id for request in asked if request.sampling.temperature == temperature}
        for temperature in (0.0, 1.0)
    }
    assert by_temperature[1.0] == set(range(12))
    trained = {request.group_id for request in asked if request.purpose == "greedy"}
    assert {group_id - FIRST_GREEDY_ID for group_id in trained} == set(range(12))
    assert len(by_temperature[0.0] - trained) == 2, "two held-out prompts, which are greedy themselves"
    assert not run.complaints


def test_a_greedy_response_that_failed_is_no_baseline() -> None:
    request = GenerationRequest(
        group_id=3, prompt_token_ids_T=np.array([1], np.int32), group_size=1, sampling=SamplingParams()
    )
    greedy = greedy_request(request)
    failed = Rollout.empty(greedy.group_id, 0, FinishReason.FAILED, "too long")
    rows = [
        InFlightRollout(request=request, rollout=Rollout.empty(3, 0)),
        InFlightRollout(request=greedy, rollout=failed),
    ]
    pending = PendingGroup(prompts(1)[0], rows)
    group = pending.scored(pending.rollouts, [ScoredResponse(response="", result=RIGHT)] * 2)
    assert group.baseline == RewardResult(outcome=Outcome.INVALID, value=0.0, reason="too long")
    assert len(group.rollouts) == len(group.results) == len(group.responses) == 1
