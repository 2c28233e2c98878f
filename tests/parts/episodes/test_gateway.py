"""The gateway executor over agents that misbehave, in real worker processes; the test answers for the generators."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.config import ConfigError, resolved
from llamarl.config.roles import AgentConfig
from llamarl.config.schema import RolloutConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.executors.gateway import GatewayExecutor
from llamarl.parts.episodes.gateway import workers
from llamarl.parts.episodes.gateway._worker import find_agent
from llamarl.parts.episodes.gateway.episode import AgentEpisode
from llamarl.parts.episodes.gateway.news import AgentCall, AgentEnd, AgentTask
from llamarl.parts.episodes.gateway.protocol import CallRefused
from llamarl.parts.episodes.joint import spec
from llamarl.types import OBSERVED, FinishReason, Outcome, Prompt, Rollout, SamplingParams, continued
from tests.nightly import nightly

AGENT = {"name": "tests.parts.episodes.agents:run", "episode_s": 240.0, "workers": 2}


@pytest.fixture
def executor(model: Path) -> Iterator[GatewayExecutor]:
    made = GatewayExecutor(str(model), RolloutConfig.model_validate({"agent": AGENT}))
    yield made
    made.close()


@pytest.fixture
def hurried(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayExecutor]:
    """It waits 3 s for an episode, and 4 s more for the worker to end it."""
    monkeypatch.setattr(workers, "GRACE_S", 4.0)
    made = GatewayExecutor(str(model), RolloutConfig.model_validate({"agent": {**AGENT, "episode_s": 3.0}}))
    yield made
    made.close()


def task(index: int, what: str, **metadata: Any) -> AgentTask:
    prompt = Prompt(
        prompt_id="p", text=what, token_ids_T=np.array([1], np.int32), answer=f"a{index}", metadata=metadata
    )
    return AgentTask(5, index, prompt, SamplingParams(max_new_tokens=40), 0)


def sampled(call: AgentCall, text_T: np.ndarray) -> Rollout:
    start = call.request.starts()[0]
    columns = {
        "token_ids": text_T,
        "behavior_logprobs": np.full(len(text_T), -1, np.float32),
        "policy_versions": np.full(len(text_T), 3, np.int32),
    }
    return Rollout(
        group_id=call.request.group_id, index=0, columns=continued(start.columns, columns),
        finish_reason=FinishReason.STOP,
    )  # fmt: skip


def test_a_call_that_comes_as_its_episode_ends_is_refused(executor: GatewayExecutor) -> None:
    """Nobody would answer it, and its client would wait for ever."""
    given = task(0, "x")
    executor._episodes["key"] = given, AgentEpisode(name="x", sampling=given.sampling, segment_tokens=64)
    endpoint, session = executor._session_of("key")
    del executor._episodes["key"]
    with pytest.raises(CallRefused, match="the episode of this API key is over"):
        asyncio.run(endpoint.complete(session, {"prompt": "late"}))
    assert not executor._answers and not any(executor._news)


def test_chats_of_agents_are_written_with_the_arguments_and_the_day_of_the_run(model: Path, tmp_path: Path) -> None:
    chatty = Path(shutil.copytree(model, tmp_path / "chatty"))
    (chatty / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}{{ tone }}{{ messages[0].content }}")
    data = {"train": "jsonl", "template_arguments": {"tone": "!"}, "date": "2024-07-06"}
    config = resolved(
        {"model": {"path": str(chatty)}, "data": data, "rollout": {"agent": AGENT}, "reward": {"parts": ["exact"]}}
    )
    executor, given = GatewayExecutor(**spec(config).options), task(0, "x")
    try:
        executor._episodes["key"] = given, AgentEpisode(name="x", sampling=given.sampling, segment_tokens=64)
        endpoint, session = executor._session_of("key")
        prompt_T = endpoint._chat_prompt(session, [{"role": "user", "content": "x"}], [])
        assert endpoint.tokenizer.decode(prompt_T) == "06 Jul 2024!x"
    finally:
        executor.close()


def play(executor: GatewayExecutor, tokenizer: Tokenizer, count: int) -> dict[int, AgentEnd]:
    """Answers `12` to every call, but to those that are to stay without an answer, until so many episodes are over."""
    ends, text_T = dict[int, AgentEnd](), tokenizer.encode("12")
    while len(ends) < count:
        news = executor.collect().result(timeout=240)
        ends |= {end.rollout.index: end for end in news.ends}
        unanswered = tokenizer.encode("unanswered").tolist()
        calls = [call for call in news.calls if call.request.prompt_token_ids_T.tolist() != unanswered]
        executor.answer([sampled(call, text_T) for call in calls])
    return ends


@nightly("many sessions in real time; gateway/test_session.py has one by day")
def test_each_episode_ends_in_its_own_way(model: Path, executor: GatewayExecutor) -> None:
    said = [
        "number",
        "silent",
        "raise",
        "exit",
        "stranger",
        "leaves",
        "result",
        "nothing",
        "nan",
        "huge",
        "text",
        "endless",
    ]
    executor.submit([task(n, what, calls=50 if what == "endless" else 2) for n, what in enumerate(said)])
    tokenizer = Tokenizer(model)
    ends = play(executor, tokenizer, len(said))
    found = {what: ends[n].result for n, what in enumerate(said)}
    reasons = {what: one.reason for what, one in found.items() if one and one.outcome is Outcome.INVALID}
    expected = {
        "silent": "the agent got no answer of the policy",
        "raise": "KeyError: 'no such thing'",
        "exit": "its worker died with code 3",
        "stranger": "HTTP Error 401",
        "nan": "the agent gave nan",
        "huge": "not a result with a finite value of at most 1e+30",
        "text": "the agent gave '1.0'",
    }
    assert reasons.keys() == expected.keys()
    assert [what for what, part in expected.items() if part not in reasons[what]] == [], list(reasons.values())
    assert found["number"] and (found["number"].outcome, found["number"].value) == (Outcome.SCORE, 0.5)
    assert found["leaves"] and found["leaves"].value == 0.5 and found["nothing"] is None
    assert found["result"] and (found["result"].value, found["result"].reason) == (-1.0, "as it says")
    assert found["endless"] is None, "it raised as the policy had no tokens left: the reward of the run judges"
    reasons_of = [end.rollout.finish_reason for _, end in sorted(ends.items())]
    assert [said[n] for n, one in enumerate(reasons_of) if one is FinishReason.LENGTH] == ["endless"]
    columns = ends[0].rollout.columns
    first, more = tokenizer.encode("a0:", add_special_tokens=True).tolist(), tokenizer.encode("!").tolist()
    text = tokenizer.encode("12").tolist()
    assert columns["token_ids"].tolist() == [*first, *text, *more, *text]
    assert (columns["policy_versions"] != OBSERVED).tolist() == [
        *[False] * len(first), *[True] * len(text), *[False] * len(more), *[True] * len(text)
    ]  # fmt: skip
    assert not executor._answers and not executor._episodes, "nothing is left of those that are over"


@nightly("many sessions in real time; gateway/test_session.py has one by day")
def test_an_episode_that_takes_too_long_is_given_up(model: Path, hurried: GatewayExecutor) -> None:
    said = ["stuck", "slow"]
    hurried.submit([task(n, what) for n, what in enumerate(said)])
    ends = play(hurried, Tokenizer(model), len(said))
    expected = ["its worker hung for 7 s", "the agent took over 3 s (rollout.agent.episode_s)"]
    for n, part in enumerate(expected):
        result = ends[n].result
        assert result and result.outcome is Outcome.INVALID and result.reason and part in result.reason
    assert not hurried._answers and not hurried._episodes


def test_nobody_learns_from_an_answer_that_the_agent_did_not_wait_for(model: Path, executor: GatewayExecutor) -> None:
    tokenizer, lost, ends = Tokenizer(model), list[AgentCall](), list[AgentEnd]()
    executor.submit([task(0, "gives up", calls=2)])
    while not ends:
        news = executor.collect().result(timeout=240)
        ends += news.ends
        text = tokenizer.encode("lost:", add_special_tokens=True).tolist()
        lost += [call for call in news.calls if call.request.prompt_token_ids_T.tolist() == text]
        waited_for = [call for call in news.calls if call.request.prompt_token_ids_T.tolist() != text]
        if waited_for:
            executor.answer([sampled(call, tokenizer.encode("99")) for call in lost])
        executor.answer([sampled(call, tokenizer.encode("12")) for call in waited_for])
    columns = ends[0].rollout.columns
    assert len(lost) == 1 and ends[0].result is not None and ends[0].result.value == 0.5
    assert tokenizer.decode(columns["token_ids"]) == "a0:12!12"
    assert set(columns["sequence"]) == {0} and not executor._answers


@nightly("many sessions in real time; gateway/test_session.py has one by day")
def test_a_thousand_sessions_opened_and_left(model: Path, executor: GatewayExecutor) -> None:
    executor.submit([task(n, "silent") for n in range(1000)])
    ends = play(executor, Tokenizer(model), 1000)
    assert all(end.result and end.result.outcome is Outcome.INVALID for end in ends.values())
    deadline_s = time.monotonic() + 240
    while len(executor._tasks) > 1 and time.monotonic() < deadline_s:  # the last ones end after they have told
        time.sleep(0.01)
    assert not executor._answers and not executor._episodes and len(executor._tasks) == 1, "the server alone"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.parts.episodes.agents", "is not of the form `package.module:run`"),
        ("tests.parts.episodes.agents:nobody", "cannot be imported"),
        ("tests.parts.episodes.agents:not_async", "must be `async def run"),
    ],
)
def test_mistakes_are_told(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_agent(AgentConfig(name=name))
