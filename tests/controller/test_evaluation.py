"""What an evaluation makes of its answers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.config import RunConfig
from llamarl.config.data import EvalConfig
from llamarl.controller.admission import sampling_by_source
from llamarl.controller.evaluation import IDS_PER_SET, Evaluation, HeldOutSet, due
from llamarl.controller.flight import FIRST_EVAL_ID
from llamarl.observability.metrics import EvalMetrics, wilson
from llamarl.observability.screen import eval_facts
from llamarl.types import OBSERVED, FinishReason, RewardResult, Rollout, SamplingParams
from tests.controller.fakes import Run, config, held_out, kills, prompts
from tests.executors.ledger import RIGHT, UNJUDGED, WRONG, Generator, Reward


def evaluated(*answers: tuple[RewardResult, ...]) -> EvalMetrics:
    async def found() -> EvalMetrics:
        config = EvalConfig(samples=len(answers[0]), max_prompts=99)
        sampling = SamplingParams(max_new_tokens=4, temperature=1.0, seed=0, stop_token_ids=(2,))
        held_out = HeldOutSet(settings=config, prompts=prompts(len(answers)))
        evaluation = Evaluation(held_out, {"": sampling}, 3, 100)
        versions_T = np.array([3, OBSERVED, 3])
        rollout = SimpleNamespace(
            num_tokens=3, policy_versions_T=versions_T, is_sampled_T=versions_T != OBSERVED,
            finish_reason=FinishReason.STOP,
        )  # fmt: skip
        for number, results in enumerate(answers):
            group: Any = SimpleNamespace(group_id=100 + number, results=results, rollouts=[rollout] * len(results))
            evaluation.add(group)
        return (await evaluation.result()).metrics

    return asyncio.run(found())


def test_what_could_not_be_judged_is_counted_and_not_wrong() -> None:
    found = evaluated((RIGHT, WRONG), (UNJUDGED, RIGHT), (UNJUDGED, UNJUDGED))
    assert (found.accuracy, found.pass_at_k) == (pytest.approx(2 / 3), 1.0)
    assert (found.num_invalid, found.invalid_reason) == (3, "the grader is broken")
    assert found.mean_response_tokens == 2.0  # what an environment said is no response
    assert "3 of 6 invalid: the grader is broken" in eval_facts(found)


def test_a_broken_reward_is_no_accuracy() -> None:
    found = evaluated(*[(UNJUDGED,)] * 200)
    assert math.isnan(found.accuracy)
    assert eval_facts(found).startswith("200 of 200 invalid: the grader is broken  accuracy nan")
    assert (found.to_json()["accuracy"], found.to_json()["num_invalid"]) == (None, 200)


def test_none_right_has_an_error() -> None:
    assert "accuracy 0.0% ± 0.2%" in eval_facts(evaluated(*[(WRONG,)] * 200))


def test_a_first_part_that_judged_is_a_judgement() -> None:
    """Whatever the other parts of a sum have failed at."""
    partly = RewardResult(outcome=UNJUDGED.outcome, value=0.0, reason="another part", first_part=RIGHT)
    found = evaluated((partly,), (WRONG,))
    assert (found.accuracy, found.num_invalid) == (0.5, 0)


def test_samples_and_their_interval() -> None:
    """Three problems of four samples each: all right, half, none; the interval is that of between 3 and 12 answers."""
    found = evaluated((RIGHT,) * 4, (RIGHT, WRONG) * 2, (WRONG,) * 4)
    assert found.pass_at == {"1": 0.5, "2": pytest.approx((1 + 5 / 6 + 0) / 3), "4": pytest.approx(2 / 3)}
    assert (found.pass_at_k, found.k, found.accuracy) == (found.pass_at["4"], 4, 0.5)
    assert found.num_effective is not None and 3 <= found.num_effective < 12
    assert (found.accuracy_low, found.accuracy_high) == wilson(0.5, found.num_effective)
    assert "pass@2 61.1%  pass@4 66.7%" in eval_facts(found)


def test_what_could_not_be_judged_is_no_sample() -> None:
    """pass@k of a problem is that of its judged samples, all of them where they are fewer than k."""
    found = evaluated((RIGHT, WRONG, UNJUDGED, UNJUDGED), (WRONG, WRONG, WRONG, RIGHT), (UNJUDGED,) * 4)
    assert found.pass_at == {"1": pytest.approx(2 / 6), "2": pytest.approx((1 + 0.5) / 2), "4": 1.0}
    assert found.num_invalid == 6


def test_one_sample_has_wilsons_interval() -> None:
    found = evaluated(*[(RIGHT,)] * 3, (WRONG,), (UNJUDGED,))
    assert (found.accuracy_low, found.accuracy_high) == wilson(0.75, 4)
    assert found.pass_at == {} and found.num_effective == 4


SETS: list[dict[str, Any]] = [
    {"label": "greedy", "name": "jsonl"},
    {"label": "sampled", "name": "jsonl", "samples": 4, "every_steps": 2, "max_prompts": 2, "max_new_tokens": 5},
    {"label": "often", "name": "jsonl", "every_steps": 1},
]


def sets_of(tmp_path: Path, **changes: Any) -> RunConfig:
    return config(tmp_path, data={"eval": SETS}, eval={"every_steps": 3, "max_prompts": 3}, **changes)


def test_each_set_comes_by_its_own_steps(tmp_path: Path) -> None:
    """Those that are due at one step are asked for together, in their order."""
    asked = list[tuple[int, int]]()

    def duration_s(group_id: int, index: int) -> float:
        if group_id >= FIRST_EVAL_ID:
            asked.append((group_id, index))
        return 1.0

    run = Run(sets_of(tmp_path), tmp_path, [Generator(duration_s=duration_s)], num_eval=9).train()
    found = sorted((row["step"], row["name"]) for row in run.evals)
    assert found == [
        (1, "often"), (2, "often"), (2, "sampled"), (3, "greedy"), (3, "often"), (4, "often"), (4, "sampled"),
        (5, "often"),
    ]  # fmt: skip
    by_name = {row["name"]: row for row in run.evals}
    assert {name: (row["k"], row["num_prompts"]) for name, row in by_name.items()} == {
        "greedy": (1, 3), "sampled": (4, 2), "often": (1, 3),
    }  # fmt: skip
    places = Counter((group_id - FIRST_EVAL_ID) // IDS_PER_SET for group_id, _ in asked)
    assert places == {0: 3, 1: 2 * 4 * 2, 2: 3 * 5}


def test_ids_of_a_set_are_the_same_each_time_and_no_other_s(tmp_path: Path) -> None:
    """They key the sampling noise: also of a set alone, of another run, and while another set goes on."""

    def ids(sets: list[dict[str, Any]], folder: Path, slow: str) -> dict[str, list[int]]:
        folder.mkdir()
        found = dict[str, list[int]]()

        def judge(rollout: Rollout) -> RewardResult:
            if rollout.group_id >= FIRST_EVAL_ID:
                name = SETS[(rollout.group_id - FIRST_EVAL_ID) // IDS_PER_SET]["label"]
                found.setdefault(name, []).append(rollout.group_id)
            return RIGHT

        def duration_s(group_id: int, index: int) -> float:
            place = (group_id - FIRST_EVAL_ID) // IDS_PER_SET
            return 60.0 if group_id >= FIRST_EVAL_ID and SETS[place]["label"] == slow else 1.0

        settings = config(folder, data={"eval": sets}, eval={"every_steps": 2, "max_prompts": 2})
        Run(settings, folder, [Generator(duration_s=duration_s)], Reward(judge), num_eval=9).train()
        return found

    both = ids([one | {"every_steps": 2} for one in SETS], tmp_path / "a", slow="greedy")
    first = FIRST_EVAL_ID
    assert Counter(both["often"]) == {first + 2 * IDS_PER_SET: 2, first + 2 * IDS_PER_SET + 1: 2}
    assert Counter(both["sampled"]) == {first + IDS_PER_SET: 8, first + IDS_PER_SET + 1: 8}
    assert Counter(both["greedy"]) == {first + n: 1 for n in range(4)}, "the second began before the first had ended"


@given(
    every=st.lists(st.integers(0, 6), max_size=5),
    steps=st.integers(1, 20),
)
def test_schedule(every: list[int], steps: int) -> None:
    """Every set is due at the multiples of its steps before the last one, and at no other."""
    sets = [
        HeldOutSet(name=str(number), number=number, settings=EvalConfig(every_steps=one), prompts=prompts(1))
        for number, one in enumerate(every)
    ]
    found = [(version, one.number) for version in range(1, steps + 1) for one in due(sets, version, steps)]
    wanted = [
        (version, number)
        for version in range(1, steps)
        for number, one in enumerate(every)
        if one and version % one == 0
    ]
    assert found == wanted


def test_a_set_keeps_its_own_limit_and_temperature(tmp_path: Path) -> None:
    """The limits of training are those of its prompts without a source."""
    settings = sets_of(tmp_path)
    problems = Run(settings, tmp_path, num_eval=2).problems

    async def sampled() -> dict[str | None, SamplingParams]:
        sampling = sampling_by_source(settings, problems)
        began = {one.name: Evaluation(one, sampling, 0, one.first_id) for one in held_out(settings, 2)}
        return {name: one.requests[0][0].sampling for name, one in began.items()}

    assert {name: (one.max_new_tokens, one.temperature) for name, one in asyncio.run(sampled()).items()} == {
        "greedy": (256, 0.0), "sampled": (5, 1.0), "often": (256, 0.0),
    }  # fmt: skip


def test_sets_outlive_a_generator(tmp_path: Path) -> None:
    """What it owed is asked for again, with the same ids; each set has all of its answers."""
    cluster = {"on_failure": {"generator": "drop"}, "max_restarts": 9}

    def slow_if_held_out(group_id: int, index: int) -> float:
        return 4.0 if group_id >= FIRST_EVAL_ID else 1.0

    settings = sets_of(tmp_path, cluster=cluster, steps=9)
    generators = [Generator(duration_s=slow_if_held_out) for _ in range(2)]
    run = Run(settings, tmp_path, generators, num_eval=9).train(strike=kills(("generator-1", 7.0)))
    assert len(run.evals) == 8 + 4 + 2
    wanted = {"greedy": (3, 1), "sampled": (2, 4), "often": (3, 1)}
    assert all((row["num_prompts"], row["k"]) == wanted[row["name"]] for row in run.evals)
    assert any("generator-1" in text for text in run.warnings), "nobody died"
    assert not run.complaints
