"""What an evaluation makes of its answers."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llamarl.config.schema import EvalConfig
from llamarl.controller.evaluation import Evaluation, HeldOutSet
from llamarl.observability.metrics import EvalMetrics
from llamarl.observability.screen import eval_facts
from llamarl.types import OBSERVED, FinishReason, RewardResult, SamplingParams
from tests.controller.fakes import prompts
from tests.executors.ledger import RIGHT, UNJUDGED, WRONG


def evaluated(*answers: tuple[RewardResult, ...]) -> EvalMetrics:
    async def found() -> EvalMetrics:
        config = EvalConfig(samples=len(answers[0]), max_prompts=99)
        sampling = SamplingParams(max_new_tokens=4, temperature=1.0, seed=0, stop_token_ids=(2,))
        held_out = HeldOutSet(settings=config, prompts=prompts(len(answers)))
        evaluation = Evaluation(held_out, lambda prompt: sampling, 3, 100)
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
