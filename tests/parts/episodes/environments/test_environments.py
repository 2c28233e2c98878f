"""Every environment, and what runs it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from llamarl.config import ConfigError, Ref
from llamarl.config.ref import members
from llamarl.parts.episodes.environments import _base
from llamarl.parts.episodes.environments._base import Environment, Task, Turn
from llamarl.parts.episodes.environments._worker import build_environment, reply
from llamarl.parts.episodes.environments.calculator import Calculator
from llamarl.types import Outcome
from tests.architecture.repository import ROOT

TASK = Task(prompt="p", answer="a", metadata={})


@pytest.mark.parametrize("name", members("llamarl.parts.episodes.environments"))
def test_members_are_environments(name: str) -> None:
    found = build_environment(Ref(name=name))
    assert isinstance(found, Environment) and found.max_turns >= 1


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("a:17+5?", "=22"), ("a:17+5?=", "22"), ("9*9?", "=81"), ("3-5?", "=-2"), ("17+5", None), ("#### 22", None),
        ("what?", "=error"), ("?", "=error"), ("99999999999999999999+1?", "=error"), ("1+2? ", "=3"), ("", None),
        ("1+2?\n#### 3", None), ("a:1+2?=3 b:3+4?", "=7"), ("1//0?", "=error"),
    ],
)  # fmt: skip
def test_calculator(said: str, answer: str | None) -> None:
    assert Calculator().reply(TASK, [Turn(response=said)]) == answer


def test_calculator_agrees_with_arithmetic() -> None:
    rng = np.random.default_rng(0)
    for left, right in rng.integers(0, 10**6, (50, 2)).tolist():
        for sign, expected in (("+", left + right), ("-", left - right), ("*", left * right)):
            assert Calculator().reply(TASK, [Turn(response=f"x:{left}{sign}{right}?")]) == f"={expected}"


def test_what_a_worker_answers() -> None:
    item = {"environment": Ref(name="tests.parts.episodes.environments.worlds:Bad").model_dump_json(), "task": {
        "prompt": "q", "answer": "1", "metadata": {"level": 3}}}  # fmt: skip
    assert reply(item | {"turns": [["task", None, []]]}) == {"text": "q|1|3"}
    assert reply(item | {"turns": [["x", "seen", []], ["history", None, []]]}) == {"text": "2 seen"}
    assert reply(item | {"turns": [["nothing", None, []]]}) == {"end": True}
    assert reply(item | {"turns": [["reward", None, []]]})["reward"]["value"] == 0.5
    assert reply(item | {"turns": [["messages", None, []]]}) == {"messages": [{"role": "user", "content": "and now?"}]}
    assert reply(item | {"turns": [["scored", None, []]]}) == {"text": "more", "turn_reward": 0.5}
    assert reply(item | {"turns": [["scored messages", None, []]]})["turn_reward"] == -1.0
    for what, error in (("scored end", TypeError), ("scored nan", ValueError), ("scored text", ValueError)):
        with pytest.raises(error):
            reply(item | {"turns": [[what, None, []]]})
    with pytest.raises(ValueError, match="an observation of 2,097,152 characters"):
        reply(item | {"turns": [["flood", None, []]]})
    with pytest.raises(TypeError, match="it replied 7"):
        reply(item | {"turns": [["number", None, []]]})


@pytest.mark.parametrize(
    ("ref", "sentence"),
    [
        (Ref(name="calculater"), "calculator"),
        (Ref(name="llamarl.rewards.exact:Exact"), "is not an environment; derive it from"),
        (Ref.model_validate({"name": "calculator", "max_turns": 0}), "max_turns"),
        (Ref.model_validate({"name": "calculator", "turns": 3}), "turns"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(ref: Ref, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_environment(ref)


def test_the_game_of_the_tutorial_cannot_be_escaped() -> None:
    """By answers that are no number, or too few of them."""
    page = (ROOT / "docs/episodes.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(@dataclass\nclass Guess.*?)```", page, re.DOTALL)
    names = dict(vars(_base)) | {"Outcome": Outcome}
    exec(compile(source, "docs/episodes.md", "exec"), names)
    game, task = names["Guess"](max_turns=3), Task(prompt="", answer="7", metadata={})

    def said(*turns: str) -> Any:
        return game.reply(task, [Turn(response=one) for one in turns])

    assert [said(one) for one in ("abc !", "9" * 5000, "", "5 !", "9!")] == [" a number! "] * 3 + [
        " higher ",
        " lower ",
    ]
    assert said("5!", "7!").value == 0.5
    for last in ("abc", "6"):
        assert said("", "", last).outcome is Outcome.WRONG
