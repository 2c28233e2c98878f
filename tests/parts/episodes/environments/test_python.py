"""The tool that runs Python, and code that would spoil its state."""

from __future__ import annotations

import functools

import pytest

from llamarl.config import ConfigError, Ref
from llamarl.parts.episodes.environments._base import Task, Turn
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.environments.python import Python
from llamarl.types import ToolCall

TASK = Task(prompt="p", answer="a", metadata={})


@functools.cache
def python() -> Python:
    return Python(cpu_s=1, wall_s=30.0, step_s=60.0, episode_s=600.0)


def talk(*codes: str, environment: Python | None = None) -> list[str]:
    """What each code is answered, after those before it."""
    turns, said = list[Turn](), list[str]()
    for code in codes:
        turns.append(Turn(response=f"So:\n```python\n{code}\n```\n"))
        answer = (environment or python()).reply(TASK, turns)
        assert isinstance(answer, str) and answer.startswith("```output\n") and answer.endswith("\n```\n")
        said.append(answer[10:-5])
        turns[-1] = Turn(response=turns[-1].response, observation=answer)
    return said


def test_names_stay_and_what_is_printed_is_of_the_newest_code() -> None:
    assert talk("x = 2\nprint('old')", "x += 1\nx", "print(x)\nx * 2") == ["old", "3", "3\n6"]
    assert talk("def f(n):\n    return n * n", "import math\nf(3) + math.floor(2.5)", "None") == ["", "11", ""]
    assert talk("import random\nx = random.random()", "x", "x")[1:] == [talk("import random\nrandom.random()")[0]] * 2
    assert talk("print('Žluť')", "'a\\nb'") == ["Žluť", "'a\\nb'"]


def test_code_stands_alone() -> None:
    """Nothing that this package takes from the future holds for it: annotations are what they say."""
    assert talk("class A:\n    x: int\nA.__annotations__") == ["{'x': <class 'int'>}"]


def test_errors_say_where_and_keep_what_came_before() -> None:
    said = talk("x = 1\nprint('then')\n1 / 0", "x", "def (", "raise SystemExit(3)", "x")
    assert said[0] == "then\nline 3: ZeroDivisionError: division by zero"
    assert said[1] == "1" and "SyntaxError: invalid syntax" in said[2]
    assert said[3:] == ["line 1: SystemExit: 3", "1"]


def test_a_turn_without_code_is_the_last() -> None:
    for response in ("done", "```python\nx", "```\nx\n```\n", "```python\nx\n```\nand so on"):
        assert python().reply(TASK, [Turn(response=response)]) is None


@pytest.mark.parametrize(
    ("code", "says", "then"),
    [
        ("while True: pass", "error: the program used over 1 s of CPU time (left out from here on)", "42"),
        ("import os\nos._exit(0)", "SystemExit: 0", "42"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "Error", "42"),
        ("open('/etc/passwd').read()", "Error", "42"),
        ("import socket\nsocket.socket()", "Error", "42"),
        ("import os\nos.fork()", "Error", "42"),
        ("import subprocess\nsubprocess.run(['ls'])", "Error", "42"),
        ("x = 'a' * (1 << 32)", "line 1: MemoryError", "42"),
        ("print('z' * 10_000_000)", "z\n(cut)", "42"),
        ("print('z' * 100_000_000)", "MemoryError", "42"),
        ("print('(left out from here on)')", "(left out from here on)", "42"),
        ("import sys\nsys.stdout = None\nsys.stderr = None", "", "42"),
        ("import sys\nsys.stdout.close()", "", "42"),
        ("class A:\n    def __repr__(self): raise ValueError('no')\nA()", "ValueError: no", "42"),
        ("def f(): f()\nf()", "RecursionError", "42"),
        ("import builtins\nbuiltins.print = builtins.eval = builtins.compile = None", "", None),
        ("import sys\nsys._getframe(1).f_globals['blocks'].clear()", "", None),
        ("import sys\nsys._getframe(1).f_globals.clear()", "", None),
    ],
)
def test_abuse_ends_within_its_limits_and_harms_nobody(code: str, says: str, then: str | None) -> None:
    """Neither the state from before, where the code has left Python as it is, nor other episodes."""
    said = talk("x = 41", code, "x + 1")
    assert says in said[1] and len(said[1].encode()) < 1100
    assert then is None or said[2] == then
    assert talk("y = 1", "y") == ["", "1"]


def test_as_a_tool_of_the_chat_template() -> None:
    ref = Ref.model_validate(
        {"name": "python", "is_tool": True, "cpu_s": 1, "wall_s": 30.0, "step_s": 60.0, "episode_s": 600.0}
    )
    (schema,) = build_environment(ref).tools()
    assert schema["function"]["name"] == "python" and list(schema["function"]["parameters"]["properties"]) == ["code"]
    environment = build_environment(ref)
    calls = (ToolCall(name="python", arguments={"code": "x = 1"}), ToolCall(name="python", arguments={"code": "x + 1"}))
    first = environment.reply(TASK, [Turn(response="r", calls=calls)])
    assert [(one["content"].strip(), one["is_error"]) for one in first] == [("", False), ("2", False)]
    turns = [Turn(response="r", calls=calls, observation="2"),
             Turn(response="r", calls=(ToolCall(name="python", arguments={"code": "x + 5"}), ToolCall(error="no JSON"),
                                       ToolCall(name="python", arguments={"code": "while 1: pass"})))]  # fmt: skip
    said = environment.reply(TASK, turns)
    assert [one["is_error"] for one in said] == [False, True, True]
    assert said[0]["content"] == "6\n" and "over 1 s of CPU time" in said[2]["content"]
    assert environment.reply(TASK, [Turn(response="```python\n1\n```\n")]) is None


@pytest.mark.parametrize(
    "options", [{"wall_s": 10.0}, {"max_turns": 20}, {"program_bytes": 1 << 30}, {"output_bytes": 2000}]
)
def test_limits_that_cannot_hold_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be less than"):
        build_environment(Ref.model_validate({"name": "python"} | options))
