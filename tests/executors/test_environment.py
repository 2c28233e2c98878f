"""The environment executor over environments that misbehave, in real worker processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamarl.config import Ref
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.environment import EnvironmentExecutor
from llamarl.executors.replies import Episode, Replied
from llamarl.types import Outcome, Prompt


@pytest.fixture(scope="module")
def executor(model: Path) -> Iterator[EnvironmentExecutor]:
    options = {"name": "tests.environments.worlds:Bad", "step_s": 1.0, "episode_s": 20.0, "workers": 3,
               "observation_tokens": 60}  # fmt: skip
    made = EnvironmentExecutor(str(model), Ref.model_validate(options))
    yield made
    made.close()


def episode(model: Path, index: int, *turns: str, spent_s: float = 0.0) -> Episode:
    tokenizer = Tokenizer(model)
    prompt = Prompt(prompt_id="p", text="Leo has", token_ids_T=np.array([1], np.int32), answer="4",
                    metadata={"level": 2})  # fmt: skip
    written = [(n % 2 == 0, tokenizer.encode(text)) for n, text in enumerate(turns)]
    return Episode(5, index, prompt, written, spent_s)


def replies(executor: EnvironmentExecutor, count: int) -> dict[int, Replied]:
    found = dict[int, Replied]()
    while len(found) < count:
        found |= {one.index: one for one in executor.collect().result(timeout=60)}
    return found


def test_each_episode_gets_its_own_reply(model: Path, executor: EnvironmentExecutor) -> None:
    tokenizer = Tokenizer(model)
    said = ["task", "nothing", "reward", "number", "raise", "exit", "flood", "long", "empty"]
    executor.submit([episode(model, n, text) for n, text in enumerate(said)])
    executor.submit([episode(model, 20, "first", "seen", "history")])
    found = replies(executor, len(said) + 1)
    texts = {n: tokenizer.decode(one.observation_T) for n, one in found.items() if one.observation_T is not None}
    assert texts == {0: "Leo has|4|2", 20: "2 seen"}
    assert found[1].result is None, "the reward judges it"
    assert found[2].result is not None and found[2].result.value == 0.5
    reasons = {n: found[n].result.reason for n in (3, 4, 5, 6, 7, 8)}
    assert all(found[n].result.outcome is Outcome.INVALID for n in reasons)
    for n, reason in {
        3: "it replied 7", 4: "ValueError: no such thing", 5: "environment died: exit code 3",
        6: "an observation of 2,097,152 characters", 7: "(rollout.environment.observation_tokens = 60)",
        8: "an empty observation",
    }.items():  # fmt: skip
        assert reason in reasons[n], reasons[n]


def test_one_that_hangs_holds_up_nobody(model: Path, executor: EnvironmentExecutor) -> None:
    executor.submit([episode(model, 0, "hang"), episode(model, 1, "spin")])
    time.sleep(0.1)
    executor.submit([episode(model, 10 + n, "task") for n in range(40)])
    first = replies(executor, 40)
    assert {0, 1}.isdisjoint(list(first)[:30])
    found = first | (replies(executor, 42 - len(first)) if len(first) < 42 else {})
    for n in (0, 1):
        assert found[n].result is not None and found[n].result.outcome is Outcome.INVALID
        assert "environment took over 1 s" in found[n].result.reason or "CPU time" in found[n].result.reason


def test_an_episode_that_takes_too_long_in_all_is_over(model: Path, executor: EnvironmentExecutor) -> None:
    executor.submit([episode(model, 0, "task", spent_s=20.1)])
    result = replies(executor, 1)[0].result
    assert result is not None and result.reason == "replies took over 20 s (rollout.environment.episode_s)"


def test_many_quick_ones_go_in_batches(model: Path, executor: EnvironmentExecutor) -> None:
    executor.submit([episode(model, n, "task") for n in range(500)])
    start_s = time.monotonic()
    assert len(replies(executor, 500)) == 500
    assert time.monotonic() - start_s < 30.0
