"""Environments of the package verifiers, in the gateway and in a run. `make verifiers` runs these tests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.config import ConfigError, Ref, build
from llamarl.config.roles import AgentConfig
from llamarl.config.schema import RolloutConfig
from llamarl.data.prompts import SOURCES
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.executors.gateway import GatewayExecutor
from llamarl.parts.episodes.gateway._worker import find_agent
from llamarl.parts.episodes.gateway.news import AgentCall, AgentEnd, AgentTask
from llamarl.run.rollouts import rollout_lines
from llamarl.types import OBSERVED, Outcome, Prompt, SamplingParams
from tests.data.test_chat import TEMPLATES
from tests.end_to_end.tiny import ROOT, TOML, make_model, rows
from tests.parts.episodes.test_gateway import sampled

pytest.importorskip("verifiers", reason="the package verifiers is not installed; `make verifiers` installs it")
TASKSETS = Path(__file__).parent / "tasksets"
SUMS = {"name": "verifiers", "id": "llamarl-sums"}


@pytest.fixture(autouse=True)
def _tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model(tmp_path_factory.mktemp("chatty") / "model", context=4096)
    (model / "chat_template.jinja").write_text(TEMPLATES["qwen"].replace("<|im_end|>", "<|endoftext|>"))
    return model


def executor_of(model: Path, **options: Any) -> GatewayExecutor:
    agent = {"name": "verifiers", "episode_s": 240.0} | options
    return GatewayExecutor(str(model), RolloutConfig.model_validate({"agent": agent}))


def tasks(count: int, most: int = 40, **options: Any) -> list[AgentTask]:
    """Episodes of the rows of the data source, in turn."""
    source = build(Ref.model_validate(SUMS | ({"options": options} if options else {})), SOURCES, "data.train")
    found = []
    for n in range(count):
        row = source[n % len(source)]
        prompt = Prompt(prompt_id=row.problem_id, text=row.question, token_ids_T=np.array([1], np.int32), answer="",
                        metadata=json.loads(json.dumps(row.metadata)))  # fmt: skip
        found.append(AgentTask(5, n, prompt, SamplingParams(max_new_tokens=most), 0))
    return found


def play(executor: GatewayExecutor, count: int, answer: Callable[[AgentCall], np.ndarray]) -> dict[int, AgentEnd]:
    ends = dict[int, AgentEnd]()
    while len(ends) < count:
        news = executor.collect().result(timeout=240)
        ends |= {end.rollout.index: end for end in news.ends}
        executor.answer([sampled(call, answer(call)) for call in news.calls])
    return ends


def test_rewards_metrics_and_errors_are_those_of_the_environment(chatty: Path) -> None:
    executor, tokenizer = executor_of(chatty), Tokenizer(chatty)
    try:
        executor.submit(tasks(8))
        ends = play(executor, 8, lambda _: tokenizer.encode("12"))
    finally:
        executor.close()
    results = {n: end.result for n, end in ends.items()}
    for n, result in results.items():
        assert result is not None
        if n == 3:
            assert result.outcome is Outcome.INVALID and "task 3 is broken" in result.reason
        else:
            exact = float(str(2 * n) in "12")
            assert (result.outcome, result.value) == (Outcome.SCORE, 2 * exact)
            assert result.parts == {"exact": 2 * exact, "num_turns_seen": 1.0}
    text = tokenizer.decode(ends[6].rollout.columns["token_ids"], skip_special=False)
    assert "system\nAdd." in text and "user\n6 + 6" in text and text.endswith("assistant\n12")
    assert (ends[6].rollout.columns["policy_versions"] != OBSERVED).sum() == len(tokenizer.encode("12"))


def test_tools_of_a_task_answer_the_policy(chatty: Path) -> None:
    """Two turns in one sequence: each token of the policy is trained once, and the tool's answer is observed."""
    executor, tokenizer = executor_of(chatty), Tokenizer(chatty)
    call = '<tool_call>\n{"name": "adder_add", "arguments": {"a": 6, "b": 6}}\n</tool_call>'
    call_T = np.append(tokenizer.encode(call), tokenizer.eos_token_ids[0]).astype(np.int32)
    calls = list[AgentCall]()

    def answer(one: AgentCall) -> np.ndarray:
        calls.append(one)
        return call_T if len(calls) == 1 else tokenizer.encode("12")

    try:
        executor.submit([one for one in tasks(7, most=400, task={"has_tool": True}) if one.index == 6])
        (end,) = play(executor, 1, answer).values()
    finally:
        executor.close()
    assert end.result is not None and end.result.outcome is Outcome.SCORE, end.result
    assert end.result.parts == {"exact": 2.0, "num_turns_seen": 2.0}
    columns = end.rollout.columns
    assert set(columns["sequence"]) == {0}
    is_sampled_T = columns["policy_versions"] != OBSERVED
    assert columns["token_ids"][is_sampled_T].tolist() == [*call_T.tolist(), *tokenizer.encode("12").tolist()]
    observed = tokenizer.decode(columns["token_ids"][~is_sampled_T], skip_special=False)
    assert '"name": "adder_add"' in observed and "<tool_response>\n12\n</tool_response>" in observed


def test_an_episode_without_tokens_left_is_scored_as_it_is(chatty: Path) -> None:
    executor, tokenizer = executor_of(chatty), Tokenizer(chatty)
    call = tokenizer.encode('<tool_call>\n{"name": "adder_add", "arguments": {"a": 6, "b": 6}}\n</tool_call>')
    call_T = np.append(call, tokenizer.eos_token_ids[0]).astype(np.int32)
    try:
        given = tasks(7, most=len(call_T), task={"has_tool": True})[6]
        executor.submit([given])
        (end,) = play(executor, 1, lambda _: call_T).values()
    finally:
        executor.close()
    assert end.result is not None and (end.result.outcome, end.result.value) == (Outcome.SCORE, 0.0)
    assert end.rollout.finish_reason == "length"


def test_many_episodes_share_one_process(chatty: Path) -> None:
    """A program per episode takes most of a second each; the loop in this process does not."""
    executor, tokenizer = executor_of(chatty), Tokenizer(chatty)
    text_T = tokenizer.encode("12")
    try:
        executor.submit(tasks(1))
        play(executor, 1, lambda _: text_T)  # imports the package, and opens the environment
        executor.submit([one._replace(index=n + 1) for n, one in enumerate(tasks(100))])
        ends = play(executor, 100, lambda _: text_T)
    finally:
        executor.close()
    assert sum(end.result is not None and end.result.outcome is Outcome.SCORE for end in ends.values()) == 87


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ({"id": "no-such-taskset"}, "no-such-taskset"),
        ({"count": 9}, r"data\.train\.count = 9: the taskset 'llamarl-sums' has 8 tasks from 0 on"),
        ({"options": {"counts": 3}}, "counts"),
    ],
)
def test_mistakes_in_the_data_are_told(ref: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        len(build(Ref.model_validate(SUMS | ref), SOURCES, "data.train"))


def test_tasks_that_are_no_longer_the_same_are_invalid(chatty: Path) -> None:
    executor, (given,) = executor_of(chatty), tasks(1)
    key = dict(given.prompt.metadata) | {"key": "another"}
    prompts = [Prompt(prompt_id="p", text="x", token_ids_T=np.array([1], np.int32), answer="", metadata=one)
               for one in (key, {}, key | {"index": 99})]  # fmt: skip
    try:
        executor.submit([given._replace(index=n, prompt=prompt) for n, prompt in enumerate(prompts)])
        ends = play(executor, 3, lambda _: np.array([1], np.int32))
    finally:
        executor.close()
    reasons = [ends[n].result.reason for n in range(3)]
    assert "is not the one that the data source read" in reasons[0] and "is not the one" in reasons[2]
    assert "the row is none of the data source `verifiers`" in reasons[1]


def test_a_run_trains_on_a_taskset(chatty: Path, tmp_path: Path) -> None:
    toml = TOML.format(model=chatty, start_s=240.0)
    toml = toml.replace('train = {name = "running_total", count = 300, first = 100}',
                        'train = {name = "verifiers", id = "llamarl-sums", count = 3}')  # fmt: skip
    toml = toml.replace('eval = {name = "running_total", count = 12}\n', "")
    toml = toml.replace("[rollout]\n", '[rollout]\nenvironment = "verifiers"\n').replace("steps = 4", "steps = 2")
    (tmp_path / "sums.toml").write_text(toml)
    done = subprocess.run(
        [sys.executable, "-m", "llamarl", "train", "sums.toml"], cwd=tmp_path, capture_output=True, text=True,
        timeout=500, env=os.environ | {"PYTHONPATH": f"{TASKSETS}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = rows(tmp_path / "runs/tiny/metrics.jsonl")
    assert [row["step"] for row in steps if "invalid_share" in row] == [1, 2]
    lines = [json.loads(line) for line in rollout_lines(tmp_path / "runs/tiny")]
    assert len(lines) == 12 and all(line["outcome"] == "score" for line in lines)


def test_the_agent_asks_for_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llamarl.parts.episodes.programs._verifiers", None)
    with pytest.raises(ConfigError, match=r"pip install 'llamarl\[verifiers\]'"):
        find_agent(AgentConfig(name="verifiers"))
    assert asyncio.iscoroutinefunction(build(Ref(name="verifiers"), "llamarl.parts.episodes.programs", "x").run)
