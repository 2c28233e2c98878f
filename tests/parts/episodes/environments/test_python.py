"""The tool that runs Python, and code that would spoil its state."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from llamarl.config import ConfigError, Ref
from llamarl.parts.episodes.environments._base import Task, Turn
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.environments.python import Python
from llamarl.parts.episodes.machines._base import WORK
from llamarl.types import Outcome, ToolCall
from tests.nightly import nightly
from tests.parts.episodes.machines.here import needs_machines

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


def converse(*codes: str, **options: Any) -> list[Any]:
    """What each code is answered by one living interpreter."""
    limits = {"cpu_s": 60, "wall_s": 60.0, "step_s": 100.0, "episode_s": 2000.0, "program_bytes": 1 << 29}
    made = build_environment(Ref.model_validate({"name": "python", "backend": "bubblewrap"} | limits | options))
    assert made.waits and made.is_stateful
    made.open(TASK)
    try:
        said = [asyncio.run(made.reply(TASK, [Turn(response=f"```python\n{code}\n```\n")])) for code in codes]
    finally:
        made.close()
    return [one[10:-5] if isinstance(one, str) else one for one in said]


@needs_machines
def test_a_living_interpreter_keeps_what_cannot_run_again() -> None:
    """Open files, time and processes, and its packages are those that run llamarl."""
    said = converse(
        f"import os, random, time\nfile = open('{WORK}/x', 'w'); file.write('a')", "file.write('b'); file.close()\n"
        f"open('{WORK}/x').read()", "os.getpid() == os.getppid() + 1, os.fork() or os._exit(3)", "os.wait()[1] >> 8",
        "import numpy as np, sympy\nx = np.arange(3)\nx.sum() + sympy.Integer(2)", "print('Žluť')\n1 / 0", "x[2]",
        "raise SystemExit(4)", "x[0]", "import subprocess\nsubprocess.run(['echo', 'hi'])",
    )  # fmt: skip
    assert said[1] == "'ab'" and said[3] == "3" and said[4] == "5"
    assert said[5] == "Žluť\nline 2: ZeroDivisionError: division by zero" and said[6] == "np.int64(2)"
    assert "SystemExit" in said[7] and said[8] == "np.int64(0)" and said[9].startswith("hi\nCompletedProcess")


@nightly("living interpreters; by day one keeps what cannot run again")
@needs_machines
def test_a_living_interpreter_that_ends_says_so_and_starts_again() -> None:
    said = converse(
        "x = 1", "import os\nprint('then', flush=True)\nos._exit(3)", "x", "import signal, time\nsignal.signal(2, 1)\n"
        "time.sleep(1000)", "y = 2\ny", "print('z' * 100_000)", "import os\nos.close(3); os.close(4)", "len('ab')",
        "while True: pass", "y", wall_s=3.0,
    )  # fmt: skip
    assert "then" in said[1] and "all names are lost" in said[1] and "NameError" in said[2]
    assert "all names are lost" in said[3] and said[4] == "2"
    assert said[5].startswith("zzz") and said[5].endswith("(cut)") and len(said[5]) < 1100
    assert "all names are lost" in said[6] and said[7] == "2"
    assert "KeyboardInterrupt" in said[8] and "over 3 s" in said[8] and "NameError" in said[9]


@nightly("living interpreters; by day one keeps what cannot run again")
@needs_machines
def test_an_interpreter_that_exceeds_its_machine_is_wrong() -> None:
    lost, after = converse("import os\nfor _ in range(4): os.fork()\nwhile True: pass", "1", cpu_s=1)
    assert lost.outcome is after.outcome is Outcome.WRONG and "CPU time" in lost.reason


@pytest.mark.parametrize(
    "options", [{"wall_s": 10.0}, {"max_turns": 20}, {"program_bytes": 1 << 30}, {"output_bytes": 2000}]
)
def test_limits_that_cannot_hold_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be less than"):
        build_environment(Ref.model_validate({"name": "python"} | options))
