"""The environment executor over environments that misbehave, in real worker processes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llamarl.config import Ref
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.replies import Replied
from llamarl.parts.episodes.executors.environment import EnvironmentExecutor
from llamarl.parts.episodes.ports import OpenTurn
from llamarl.types import Outcome, Prompt
from tests.data.test_chat import TEMPLATES
from tests.nightly import nightly


@pytest.fixture(scope="module")
def executor(model: Path) -> Iterator[EnvironmentExecutor]:
    options = {"name": "tests.parts.episodes.environments.worlds:Bad", "step_s": 4.0, "episode_s": 20.0, "workers": 3,
               "observation_tokens": 60}  # fmt: skip
    made = EnvironmentExecutor(str(model), Ref.model_validate(options))
    yield made
    made.close()


def episode(model: Path, index: int, *turns: str, spent_s: float = 0.0, folder: Path | None = None) -> OpenTurn:
    tokenizer = Tokenizer(model)
    prompt = Prompt(prompt_id="p", text="Leo has", token_ids_T=np.array([1], np.int32), answer="4",
                    metadata={"level": 2, "folder": str(folder)})  # fmt: skip
    written = [(n % 2 == 0, tokenizer.encode(text)) for n, text in enumerate(turns)]
    return OpenTurn(5, index, prompt, written, spent_s)


def replies(executor: EnvironmentExecutor, count: int) -> dict[int, Replied]:
    found = dict[int, Replied]()
    while len(found) < count:
        found |= {one.index: one for one in executor.collect().result(timeout=240)}
    return found


def test_each_episode_gets_its_own_reply(model: Path, executor: EnvironmentExecutor) -> None:
    tokenizer = Tokenizer(model)
    said = ["task", "nothing", "reward", "number", "raise", "exit", "flood", "long", "empty", "fits", "huge", "scored"]
    executor.submit([episode(model, n, text) for n, text in enumerate(said)])
    executor.submit([episode(model, 20, "first", "seen", "history")])
    found = replies(executor, len(said) + 1)
    texts = {n: tokenizer.decode(one.observation_T) for n, one in found.items() if one.observation_T is not None}
    assert texts == {0: "Leo has|4|2", 20: "2 seen", 9: "7" * 60, 11: "more"}
    assert found[9].observation_T is not None and len(found[9].observation_T) == 60
    assert found[1].result is None, "the reward judges it"
    assert found[2].result is not None and found[2].result.value == 0.5
    assert (found[11].turn_reward, found[0].turn_reward) == (0.5, 0.0) and found[11].result is None
    reasons = {n: found[n].result.reason for n in (3, 4, 5, 6, 7, 8, 10)}
    assert all(found[n].result.outcome is Outcome.INVALID for n in reasons)
    for n, reason in {
        3: "it replied 7", 4: "ValueError: no such thing", 5: "environment died: exit code 3",
        6: "an observation of 2,097,152 characters", 7: "(rollout.environment.observation_tokens = 60)",
        8: "an empty observation", 10: "not a result with a finite value of at most 1e+30",
    }.items():  # fmt: skip
        assert reason in reasons[n], reasons[n]


@nightly("workers that hang, die and are replaced; sandbox/test_pool.py has each case by day")
def test_one_that_hangs_holds_up_nobody(model: Path, executor: EnvironmentExecutor) -> None:
    executor.submit([episode(model, 0, "hang"), episode(model, 1, "spin")])
    time.sleep(0.1)
    executor.submit([episode(model, 10 + n, "task") for n in range(40)])
    first = replies(executor, 40)
    assert {0, 1}.isdisjoint(list(first)[:30])
    found = first | (replies(executor, 42 - len(first)) if len(first) < 42 else {})
    for n in (0, 1):
        assert found[n].result is not None and found[n].result.outcome is Outcome.INVALID
        assert "environment took over 4 s" in found[n].result.reason or "CPU time" in found[n].result.reason


def test_an_episode_that_takes_too_long_in_all_is_over(model: Path, executor: EnvironmentExecutor) -> None:
    executor.submit([episode(model, 0, "task", spent_s=20.1)])
    result = replies(executor, 1)[0].result
    assert result is not None and result.reason == "replies took over 20 s (rollout.environment.episode_s)"


@nightly("workers that hang, die and are replaced; sandbox/test_pool.py has each case by day")
def test_many_quick_ones_go_in_batches(model: Path, executor: EnvironmentExecutor) -> None:
    executor.submit([episode(model, n, "task") for n in range(500)])
    start_s = time.monotonic()
    assert len(replies(executor, 500)) == 500
    assert time.monotonic() - start_s < 200.0


@nightly("workers that hang, die and are replaced; sandbox/test_pool.py has each case by day")
def test_states_are_those_of_their_episodes_and_none_stays(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thousand opened and left, some of which die, fail, end, or are asked for twice."""
    options = {"name": "tests.parts.episodes.environments.worlds:Counting", "workers": 2}
    executor, tokenizer = EnvironmentExecutor(str(model), Ref.model_validate(options)), Tokenizer(model)

    def ask(*turns: str, of: range) -> dict[int, str]:
        executor.submit([episode(model, n, *turns, folder=tmp_path) for n in of])
        found = replies(executor, len(of))
        return {n: tokenizer.decode(one.observation_T) if one.observation_T is not None else str(one.result and
                one.result.reason) for n, one in found.items()}  # fmt: skip

    def num_open() -> int:
        return len(list(tmp_path.iterdir()))

    def soon(condition: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + 240
        while not (holds := condition()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return holds

    one_each = range(998, 1000)  # of two workers, who wait: however busy the machine is, both have a state
    assert set(ask("nap", of=one_each).values()) == {"1 of 1"}
    assert set(ask("a", of=range(998)).values()) == {"1 of 1"} and num_open() == 1000
    assert set(ask("a", of=range(10)).values()) == {"1 of 1"} and num_open() == 1000, "asked twice: closed and opened"
    assert set(ask("a", "1 of 1", "b", of=range(900)).values()) == {"2 of 2"}
    assert ask("a", "x", "b", "x", "nothing", of=range(10)) == dict.fromkeys(range(10), "None")
    assert set(ask("a", "x", "b", "x", "raise", of=range(10, 20)).values()) == {
        "environment: ValueError: no such thing"
    }
    assert soon(lambda: num_open() == 980)
    assert "has died" in ask("a", "x", "b", of=range(5))[0], "one that has ended has no state"
    ask("a", "x", "stuck", of=range(20, 21))
    executor.leave([(5, n) for n in range(300)])
    ask("a", "x", "b", of=one_each)  # answered after what was to be closed before
    assert num_open() == 700 and "RuntimeError: it does not close" in capfd.readouterr().out
    assert "exit code 3" in ask("exit", of=range(2000, 2001))[2000]
    said = ask("a", "x", "b", of=range(300, 1000))
    lost = [n for n, text in said.items() if "the worker that had the state of this episode has died" in text]
    assert 0 < len(lost) < 700 and all(said[n] in ("2 of 2", "3 of 2") for n in said.keys() - set(lost))
    executor.close()
    assert num_open() == len(lost) + 2, "what dead workers had cannot be closed"


@pytest.fixture
def waiting(model: Path) -> Iterator[EnvironmentExecutor]:
    options = {"name": "tests.parts.episodes.environments.worlds:Slow", "step_s": 4.0}
    made = EnvironmentExecutor(str(model), Ref.model_validate(options))
    yield made
    made.close()


@nightly("workers that hang, die and are replaced; sandbox/test_pool.py has each case by day")
def test_a_thousand_episodes_wait_in_one_process(model: Path, tmp_path: Path, waiting: EnvironmentExecutor) -> None:
    """Each for half a second; one by one they would take eight minutes. Each has its own state, and none stays."""
    tokenizer, start_s = Tokenizer(model), time.monotonic()
    waiting.submit([episode(model, n, "a", folder=tmp_path) for n in range(1000)])
    found = replies(waiting, 1000)
    assert time.monotonic() - start_s < 200.0
    assert {tokenizer.decode(one.observation_T) for one in found.values()} == {"1 of 1"}
    files = list(tmp_path.iterdir())
    assert len(files) == 1000 and len({one.name.partition("-")[0] for one in files}) == 1
    waiting.submit([episode(model, n, "a", "1 of 1", "b", folder=tmp_path) for n in range(10)])
    assert {tokenizer.decode(one.observation_T) for one in replies(waiting, 10).values()} == {"2 of 2"}
    waiting.leave([(5, n) for n in range(500)])
    waiting.submit([episode(model, n, "a", "1 of 1", "nothing", folder=tmp_path) for n in range(500, 510)])
    assert all(one.observation_T is one.result is None for one in replies(waiting, 10).values())
    until_s = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) > 490 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 490
    waiting.close()
    assert not list(tmp_path.iterdir()), "the end of the process closes what is open"


@nightly("workers that hang, die and are replaced; sandbox/test_pool.py has each case by day")
def test_what_goes_wrong_while_others_wait(model: Path, tmp_path: Path, waiting: EnvironmentExecutor) -> None:
    """A reply that raises or takes too long ends its own episode. A process that dies or computes for ever takes those
    with it that wait for it, and the next ones get a new process."""
    tokenizer = Tokenizer(model)

    def ask(*said: str) -> dict[int, str]:
        waiting.submit([episode(model, n, what, folder=tmp_path) for n, what in enumerate(said)])
        return {
            n: tokenizer.decode(one.observation_T) if one.observation_T is not None else one.result.reason
            for n, one in sorted(replies(waiting, len(said)).items()) if one.result or one.observation_T is not None
        }  # fmt: skip

    assert ask("raise", "a", "hang") == {
        0: "environment: ValueError: no such thing", 1: "1 of 1", 2: "environment took over 4 s",
    }  # fmt: skip
    assert set(ask("exit", "hang").values()) == {"environment died: exit code 3"}
    assert set(ask("spin", "hang").values()) == {"environment hung for 14 s"}
    assert ask("a") == {0: "1 of 1"}


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_tools_are_called_in_the_format_of_the_model(model: Path, tmp_path: Path, family: str) -> None:
    """And answered by its template, after the stop token that was sampled; what was sampled is as it was."""
    stop, key = "<|endoftext|>", "arguments" if family == "qwen" else "parameters"
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    template = TEMPLATES[family].replace("<|im_end|>", stop).replace("<|eot_id|>", stop)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    options = {"name": "tools", "functions": ["tests.parts.episodes.environments.test_tools:shout"]}
    executor = EnvironmentExecutor(str(folder), Ref.model_validate(options))
    call = json.dumps({"name": "shout", key: {"text": "hi"}})
    call = f"<tool_call>{call}</tool_call>" if family == "qwen" else call
    executor.submit([
        episode(folder, 0, call + stop), episode(folder, 1, "done" + stop), episode(folder, 2, call[:-13] + stop),
        episode(folder, 3, call + stop, "said", "done" + stop),
    ])  # fmt: skip
    found = replies(executor, 4)
    executor.close()
    texts = {n: tokenizer.decode(one.observation_T, skip_special=False) for n, one in found.items()
             if one.observation_T is not None}  # fmt: skip
    assert texts.keys() == {0, 2}
    message = {"role": "tool", "name": "shout", "content": "HIŽ"}
    assert texts[0] == tokenizer.after_turn([message], without_stop=True) and "HIŽ" in texts[0]
    assert "error: " in texts[2] and [found[n].calls for n in range(4)] == [(1, 0), (0, 0), (1, 1), (0, 0)]


@nightly("workers once more; by day episodes that end by length are judged with their state")
def test_code_runs_within_the_limits_of_a_worker(model: Path) -> None:
    executor, tokenizer = EnvironmentExecutor(str(model), Ref.model_validate({"name": "python"})), Tokenizer(model)
    code = "```python\nx = 20\n```\n", "```output\n\n```\n", "```python\nprint(x)\nx + 1\n```\n"
    executor.submit([episode(model, 0, *code), episode(model, 1, "done")])
    found = replies(executor, 2)
    executor.close()
    assert tokenizer.decode(found[0].observation_T) == "```output\n20\n21\n```\n"
    assert found[1].observation_T is found[1].result is None


def test_episodes_that_end_by_length_are_judged_with_their_state(model: Path) -> None:
    """After replies, and where the first turn was cut already; then nothing of them is left."""
    ref = Ref(name="tests.parts.episodes.environments.worlds:Judging")
    executor = EnvironmentExecutor(str(model), ref)
    try:
        executor.submit([episode(model, 0, "a"), episode(model, 1, "b")])
        assert {one.result for one in replies(executor, 2).values()} == {None}
        over = [("a",), ("b", "more", "c"), ("cut",), ("raise",), ("text",)]
        executor.submit([episode(model, n, *turns)._replace(is_over=True) for n, turns in enumerate(over)])
        found = {n: one.result for n, one in replies(executor, len(over)).items()}
        assert [found[n].value for n in range(3)] == [101.0, 102.0, 1.0]
        assert "ValueError: no such thing" in found[3].reason and "`ended` returned '7'" in found[4].reason
        executor.submit([episode(model, 1, "b", "more", "c")])
        assert "the worker that had the state of this episode has died" in replies(executor, 1)[1].result.reason
    finally:
        executor.close()


@nightly("workers once more; by day episodes that end by length are judged with their state")
def test_episodes_that_end_by_length_are_judged_by_coroutines(model: Path) -> None:
    executor = EnvironmentExecutor(str(model), Ref(name="tests.parts.episodes.environments.worlds:Waiting"))
    try:
        over = [("a", "more", "b"), ("nothing",)]
        executor.submit([episode(model, n, *turns)._replace(is_over=True) for n, turns in enumerate(over)])
        found = replies(executor, len(over))
        assert found[0].result.value == 2.0 and found[1].result is None
    finally:
        executor.close()
