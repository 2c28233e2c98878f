"""The environment with a machine for each episode: forms of commands, the check in a second machine, and cheats."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import ConfigError, Ref
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.environments._base import Task, Turn
from llamarl.parts.episodes.environments._machine_check import is_same
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.environments.machine import Machine
from llamarl.parts.episodes.executors.environment import EnvironmentExecutor
from llamarl.parts.episodes.machines._base import WORK
from llamarl.parts.episodes.ports import OpenTurn
from llamarl.types import Outcome, Prompt, RewardResult, ToolCall
from tests.architecture.repository import ROOT
from tests.nightly import NIGHTLY, nightly
from tests.parts.episodes.machines.here import needs_machines
from tests.parts.episodes.machines.test_bubblewrap import running
from tests.parts.episodes.test_environment import replies
from tests.sandbox.test_pool import until

pytestmark = needs_machines

BUGGY = "def add(a, b):\n    return a - b\n"
RIGHT = "def add(a, b):\\n    return a + b\\n"
TESTS = """
import unittest
from calc import add

class Test(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
"""
BY_CALLS = {"calls": [["calc:add", [2, 3], 5], ["calc:add", [-1, 0.5], -0.5]]}
BY_COMMAND = {"command": "python3 -m unittest -q test_calc", "files": {"test_calc.py": TESTS}}


def row(check: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"files": {"calc.py": BUGGY, "test_calc.py": TESTS}, "answer_files": ["calc.py"], "check": check} | more


def talk(metadata: dict[str, Any], *responses: str, **options: Any) -> list[Any]:
    """Returns the replies to responses, one turn each."""
    made = build_environment(Ref.model_validate({"name": "machine"} | options))
    assert isinstance(made, Machine)
    task, turns, said = Task(prompt="p", answer="", metadata=metadata), list[Turn](), list[Any]()
    made.open(task)
    try:
        for response in responses:
            turns.append(Turn(response=response))
            said.append(asyncio.run(made.reply(task, turns)))
            turns[-1] = Turn(response=response, observation=str(said[-1]))
    finally:
        made.close()
    return said


def sh(command: str) -> str:
    return f"So:\n```sh\n{command}\n```\n"


@pytest.mark.parametrize("check", [BY_CALLS, BY_COMMAND])
def test_a_repaired_file_is_right_and_any_other_is_wrong(check: dict[str, Any]) -> None:
    fix = sh(f"printf '{RIGHT}' > calc.py; python3 -m unittest -q; pwd")
    fix = fix.replace("calc.py", f"{WORK}/calc.py")
    looked, fixed, end = talk(row(check), sh("cat calc.py; cd /tmp; false"), fix, "")
    assert looked == f"```output\n{BUGGY}(exit code 1)\n```\n"
    assert fixed.endswith("/tmp\n```\n") and end == RewardResult(outcome=Outcome.SCORE, value=1.0)
    (end,) = talk(row(check), "I do not know.")
    assert end.outcome is Outcome.WRONG and end.value == 0.0


def test_the_last_turn_counts() -> None:
    (end,) = talk(row(BY_CALLS), sh(f"printf '{RIGHT}' > calc.py"), max_turns=1)
    assert end.outcome is Outcome.SCORE


def test_an_episode_that_runs_out_of_tokens_is_checked_without_its_cut_command() -> None:
    made = build_environment(Ref.model_validate({"name": "machine"}))
    task = Task(prompt="p", answer="", metadata=row(BY_CALLS))
    fix, undo = sh(f"printf '{RIGHT}' > calc.py"), sh("rm calc.py").removesuffix("```\n")
    fixed = [Turn(response=fix, observation="```output\n\n```\n")]
    for replied, turns, outcome in (
        ([Turn(response=fix)], fixed, Outcome.SCORE),
        ([Turn(response=fix)], [*fixed, Turn(response=undo)], Outcome.SCORE),
        ([], [Turn(response=fix.removesuffix("```\n"))], Outcome.WRONG),
    ):
        made.open(task)
        try:
            if replied:
                assert isinstance(asyncio.run(made.reply(task, replied)), str)
            assert asyncio.run(made.ended(task, turns)).outcome is outcome
        finally:
            made.close()


def test_commands_as_lines() -> None:
    said = talk(row(BY_CALLS), "x=5\n", "echo $x\n", f"printf '{RIGHT}' > calc.py\n", "exit\n", form="line")
    assert said[:3] == ["$", "5\n$", "$"] and said[3].outcome is Outcome.SCORE
    (end,) = talk(row(BY_CALLS), "ls", form="line")
    assert end.outcome is Outcome.WRONG


def test_commands_as_calls_of_a_tool() -> None:
    ref = Ref.model_validate({"name": "machine", "form": "tool"})
    (schema,) = build_environment(ref).tools()
    assert schema["function"]["name"] == "shell" and list(schema["function"]["parameters"]["properties"]) == ["command"]
    made = build_environment(ref)
    task = Task(prompt="p", answer="", metadata=row(BY_CALLS))
    calls = [ToolCall(name="shell", arguments={"command": command}) for command in ("x=1", "echo $x; false")]
    made.open(task)
    said = asyncio.run(made.reply(task, [Turn(response="r", calls=(*calls, ToolCall(error="no JSON")))]))
    assert [(one["content"], one["is_error"]) for one in said] == [
        ("", False), ("1\n(exit code 1)\n", False), ("error: no JSON", True),
    ]  # fmt: skip
    kill = ToolCall(name="shell", arguments={"command": "for n in 1 2 3; do (while :; do :; done) & done; wait"})
    made.limits = made._open._limits = type(made.limits)(cpu_s=1)
    made.close()
    made.open(task)
    end = asyncio.run(made.reply(task, [Turn(response="r", calls=(kill, *calls))]))
    assert end.outcome is Outcome.WRONG and "CPU time" in end.reason
    made.close()


def test_long_and_late_output_is_described() -> None:
    long, late, after = talk(
        row(BY_CALLS), sh("seq 2000"), sh("echo a; sleep 100"), sh("echo b"), command_s=1.0, output_bytes=40
    )
    assert "bytes left out)" in long and long.endswith("1999\n2000\n```\n") and len(long) < 120
    assert late == "```output\na\n(killed after 1 s)\n```\n" and after == "```output\nb\n```\n"


CHEATS = {
    "exits": "import os; os._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "equals all": "class E(int):\n    def __eq__(s, o): return True\ndef add(a, b): return E(4)",
    "forges the report": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'\\n[{\"value\": 5}]')\n    except "
    "OSError: pass\nos._exit(0)",
    "patches json": "import json\njson.dumps = lambda *a, **k: '[{\"value\": 5}] * 2'\ndef add(a, b): return 5",
    "reads the calls": "import json\ncalls = json.load(open('.check/calls.json'))\ndef add(a, b): return calls[0][-1]",
    "raises": "def add(a, b): raise SystemExit(0)",
    "never ends": "def add(a, b):\n    while True: pass",
    "deep": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'\\n' + b'[' * 100000)\n"
    "    except OSError: pass\nos._exit(0)",
    "writes the row's tests": "open('.check/caller.py', 'w').write('x')\ndef add(a, b): return 0",
    "kills its machine": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef add(a, b): return 5",
}


@pytest.mark.parametrize("name", list(CHEATS) if NIGHTLY else list(CHEATS)[1::4])
def test_no_cheat_in_the_answer_passes_calls(name: str) -> None:
    (end,) = talk(row(BY_CALLS) | {"files": {"calc.py": CHEATS[name]}}, "", check_s=3.0)
    assert end.outcome is Outcome.WRONG, end


CHANGES = (
    "echo > test_calc.py",
    f"mkdir calc; printf '{RIGHT}' > calc/__init__.py",
    "echo 'raise SystemExit(0)' > unittest.py",
    "rm calc.py; ln -s test_calc.py calc.py",
    "rm calc.py; mkfifo calc.py",
    f"(sleep 0.3; printf '{RIGHT}' > calc.py) & :",
    "head -c 2M /dev/zero > calc.py",
)


@pytest.mark.parametrize("command", CHANGES if NIGHTLY else CHANGES[::3])
def test_only_named_files_count(command: str) -> None:
    """Neither changed tests, nor a module that hides another one, nor a link, nor a file that is written later."""
    *_, end = talk(row(BY_COMMAND), sh(command), "")
    assert end.outcome is Outcome.WRONG, end


@nightly("a worker that is killed; machines/test_bubblewrap.py ends machines by day")
@pytest.mark.parametrize("command", ["kill -9 -1; kill -9 1", "while :; do sh -c '(while :; do :; done) &'; done"])
def test_who_hurts_its_machine_gains_nothing(command: str) -> None:
    *_, end = talk(row(BY_CALLS), sh(command), "", limits={"cpu_s": 2, "processes": 20}, command_s=5.0)
    assert end.outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "missing"),
        (row({}), "one of `calls` and `command`"),
        (row(BY_CALLS | BY_COMMAND), "one of `calls` and `command`"),
        (row(BY_CALLS, answer_files=["../x"]), "not a path inside"),
        (row(BY_CALLS, files={"/etc/x": "1"}), "not a path inside"),
        (row(BY_CALLS, folder="/no/such"), "not a folder"),
    ],
)
def test_rows_that_describe_no_task_are_invalid(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        talk(metadata, "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"command_s": 100.0}, "step_s"),
        ({"max_turns": 100}, "episode_s"),
        ({"limits": {"memory_bytes": 1 << 31}}, "memory_bytes"),
        ({"limits": {"memory": 1}}, "memory"),
        ({"backend": "nothing"}, "backend"),
        ({"backend": "os:PathLike"}, "backend"),
        ({"form": "shout"}, "form"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_environment(Ref.model_validate({"name": "machine"} | options))


def test_values_of_json_are_compared_by_type() -> None:
    assert is_same([1, {"a": None}], [1, {"a": None}]) and is_same(0.1 + 0.2, 0.3) and is_same(1, 1.0)
    nan = float("nan")
    for one, other in ((True, 1), (1, True), ("1", 1), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (nan, 1.0), (1.5, 1)):
        assert not is_same(one, other)


def test_the_example_of_the_page_is_a_task() -> None:
    """docs/machines.md: its row, and the run file's environment."""
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    (example,), (settings,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("json", "toml"))
    environment = tomllib.loads(settings)["rollout"]["environment"]
    repair = sh("sed -i s/-/+/ calc.py; python3 -m unittest")
    tested, end = talk(json.loads(example), repair, "", **environment)
    assert "OK" in tested and end.outcome is Outcome.SCORE
    (end,) = talk(json.loads(example), "", **environment)
    assert end.outcome is Outcome.WRONG
    assert f"none of {len(CHEATS)} cheats" in page


def test_all_threads_fit_into_a_worker() -> None:
    """Its default limit is one of address space, of which each thread takes stack and arena."""
    code = (
        "import asyncio, resource, threading\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from llamarl.parts.episodes.environments._open_machine import AT_ONCE, in_thread\n"
        "meeting = threading.Barrier(AT_ONCE)\nasync def main():\n"
        "    await asyncio.gather(*(in_thread(meeting.wait) for _ in range(AT_ONCE)))\nasyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@nightly("a worker that is killed; machines/test_bubblewrap.py ends machines by day")
def test_a_killed_worker_leaves_no_machine(model: Path) -> None:
    """Its episodes are INVALID, and the next ones get a new worker."""
    executor = EnvironmentExecutor(str(model), Ref.model_validate({"name": "machine", "form": "line"}))
    tokenizer = Tokenizer(model)

    def episode(index: int, *texts: str) -> OpenTurn:
        prompt = Prompt(prompt_id="p", text="", token_ids_T=tokenizer.encode("p"), answer="", metadata=row(BY_CALLS))
        return OpenTurn(5, index, prompt, [(n % 2 == 0, tokenizer.encode(text)) for n, text in enumerate(texts)], 0.0)

    executor.submit([episode(n, "(setsid sleep 987651 &); echo one\n") for n in range(3)])
    assert {tokenizer.decode(one.observation_T) for one in replies(executor, 3).values()} == {"one\n$"}
    executor.submit([episode(n, "(setsid sleep 987651 &); echo one\n", "one\n$", "sleep 100\n") for n in range(3)])
    until(lambda: running("sleep\x00100"), "a command runs")
    os.kill(executor._open[""].crew._processes[0]._child.pid, signal.SIGKILL)
    assert all(one.result.outcome is Outcome.INVALID for one in replies(executor, 3).values())
    until(lambda: not running("987651"), "all machines end")
    executor.submit([episode(9, "(setsid sleep 987651 &); echo two\n")])
    assert tokenizer.decode(replies(executor, 1)[9].observation_T) == "two\n$"
    executor.leave([(5, 9)])
    until(lambda: not running("987651"), "the machine of an episode that was left ends")
    executor.close()
