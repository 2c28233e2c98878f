"""The reward executor decodes, asks and checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamarl.config.schema import RewardConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.reward import RewardExecutor
from llamarl.rewards._base import sound
from llamarl.rewards._weighted import weighted_sum
from llamarl.types import MAX_REASON_CHARS, FinishReason, Outcome, Prompt, RewardResult, Rollout
from tests.executors.rewards import NO_RESULTS


def group(tokenizer: Tokenizer, *responses: str) -> tuple[Prompt, list[Rollout]]:
    prompt = Prompt(prompt_id="p", text="2+2", token_ids_T=tokenizer.encode("2+2"), answer="4")
    end = tokenizer.eos_token_ids[0]
    rollouts = [
        Rollout(
            group_id=0,
            index=index,
            columns={
                "token_ids": np.append(tokenizer.encode(text), end).astype(np.int32),
                "behavior_logprobs": np.zeros(1, np.float32),
                "policy_versions": np.zeros(1, np.int32),
            },
            finish_reason=FinishReason.STOP,
        )
        for index, text in enumerate(responses)
    ]
    return prompt, rollouts


def test_responses_are_decoded_without_special_tokens(model: Path) -> None:
    executor = RewardExecutor(str(model), RewardConfig.model_validate({"parts": ["exact"]}))
    tokenizer = Tokenizer(model)
    scored = executor.score([group(tokenizer, "4", "five"), group(tokenizer, "4")])
    assert [[(one.response, one.result.value) for one in answers] for answers in scored] == [
        [("4", 1.0), ("five", 0.0)],
        [("4", 1.0)],
    ]
    executor.close()


def test_each_source_is_judged_by_its_own_rewards(model: Path) -> None:
    """In one call, in any order; one whose grader answers nonsense costs the others nothing."""
    parts = {"a": "exact", "b": {"name": "tests.executors.rewards:Careless", "how": "text"}}
    own = {label: RewardConfig.model_validate({"parts": [part]}) for label, part in parts.items()}
    even = RewardConfig.model_validate({"parts": ["tests.executors.rewards:EvenLength"]})
    executor, tokenizer = RewardExecutor(str(model), even, own), Tokenizer(model)
    prompt, rollouts = group(tokenizer, "4", "44")
    sources = ["b", "", "a", "c", "b"]
    scored = executor.score([(replace(prompt, source=source), rollouts) for source in sources])
    found = [[(one.response, one.result.outcome, one.result.value) for one in answers] for answers in scored]
    unjudged = [("4", Outcome.INVALID, 0.0), ("44", Outcome.INVALID, 0.0)]
    even_length = [("4", Outcome.SCORE, 0.0), ("44", Outcome.SCORE, 1.0)]
    exact = [("4", Outcome.SCORE, 1.0), ("44", Outcome.WRONG, 0.0)]
    assert found == [unjudged, even_length, exact, even_length, unjudged]
    executor.close()


@pytest.mark.parametrize("how", NO_RESULTS)
def test_an_answer_that_is_none_is_invalid(model: Path, how: str) -> None:
    part = {"name": "tests.executors.rewards:Careless", "how": how}
    executor = RewardExecutor(str(model), RewardConfig.model_validate({"parts": [part]}))
    (answers,) = executor.score([group(Tokenizer(model), "4", "5")])
    assert [one.result.outcome for one in answers] == [Outcome.INVALID] * 2
    assert all(one.result.reason.startswith("the reward gave ") for one in answers)


@pytest.mark.parametrize(
    "given",
    [
        RewardResult(outcome=Outcome.SCORE, value=10**5000),
        RewardResult(outcome=Outcome.SCORE, value=float("nan")),
        RewardResult(outcome=Outcome.SCORE, value="x" * 10_000),  # type: ignore[arg-type]
        RewardResult(outcome="score", value=1.0),  # type: ignore[arg-type]
        RewardResult(outcome=Outcome.SCORE, value=1.0, reason=None),  # type: ignore[arg-type]
        "x" * 10_000,
        10**5000,
        None,
    ],
    ids=range(8),
)
def test_what_is_no_result_is_invalid_and_shortly_said(given: object) -> None:
    found = sound(given)
    assert found.outcome is Outcome.INVALID and len(found.reason) < 300


def test_a_reason_has_a_bound() -> None:
    long = RewardResult(outcome=Outcome.WRONG, value=0.0, reason="x" * 10_000_000)
    assert len(long.reason) == MAX_REASON_CHARS
    both = weighted_sum(("a", "b"), (1.0, 1.0), (long, long))
    assert len(both.reason) == MAX_REASON_CHARS and both.reason.startswith("a: x")
