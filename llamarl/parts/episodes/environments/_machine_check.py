"""The task of an episode in a machine, and its check: a second machine tests named files of the policy's machine."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from llamarl.config import ConfigError
from llamarl.config.ref import make_record
from llamarl.parts.episodes.environments._base import Task
from llamarl.parts.episodes.machines import MachineBackend, MachineLimits
from llamarl.parts.episodes.machines._base import STRICT, is_inside, pack, unpack
from llamarl.rewards._base import right, wrong
from llamarl.types import RewardResult

ANSWER_BYTES = 1 << 20
"""Maximum bytes of all files that a check takes from the policy's machine."""
_VALUES_BYTES = 1 << 20
_FOLDER = ".check"
_CALLER = """
import importlib, json, os, sys
answer = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.path.insert(0, os.getcwd())
values = []
for place, arguments in json.load(open(".check/calls.json")):
    try:
        module, _, name = place.partition(":")
        value = getattr(importlib.import_module(module), name)(*arguments)
        values.append({"value": json.loads(json.dumps(value))})
    except BaseException as error:
        values.append({"raises": type(error).__name__})
os.write(answer, b"\\n")
line = json.dumps(values).encode()
while line:
    line = line[os.write(answer, line):]
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What decides whether the files are right. A row has one of `calls` and `command`."""

    __pydantic_config__ = STRICT

    calls: list[tuple[str, list[Any], Any]] | None = None
    """Calls as `["module:function", [argument, ...], expected]`. Expected values never enter a machine, so no program
    in it can report them. `{"raises": "ValueError"}` expects an exception."""
    command: str | None = None
    """A command that exits with 0 if the files are right. Code of the policy that runs in the same process can do so,
    too."""
    files: dict[str, str] = field(default_factory=dict)
    """Files by path that replace those of the policy, such as the tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineTask:
    """Fields of a row."""

    __pydantic_config__ = STRICT

    check: Check
    answer_files: list[str]
    """Paths of the files that the check takes from the policy's machine. All others are those of the task."""
    files: dict[str, str] = field(default_factory=dict)
    """Files of the task by path."""
    folder: str | None = None
    """A folder of the host with files of the task."""

    @property
    def tar(self) -> bytes:
        """The files as an archive."""
        return pack({path: text.encode() for path, text in self.files.items()})


FIELDS = ("check", "answer_files", "files", "folder")


def task_of(task: Task) -> MachineTask:
    """Returns the fields of a row. Raises ConfigError if they describe no task."""
    row = {name: task.metadata[name] for name in FIELDS if task.metadata.get(name) is not None}
    found = make_record(MachineTask, row, "row", "machine")
    if (found.check.calls is None) == (found.check.command is None):
        raise ConfigError("`check` of the row needs one of `calls` and `command`")
    for path in (*found.answer_files, *found.files, *found.check.files):
        if not is_inside(path):
            raise ConfigError(f"the row has the path {path!r}, which is not a path inside of {'/work'}")
    return found


def checked(
    task: MachineTask, tar: bytes, backend: MachineBackend, limits: MachineLimits, check_s: float
) -> RewardResult:
    """Returns the reward for the files in an archive of the policy's machine. Raises MachineLost if they end or exceed
    the second machine."""
    answers = unpack(tar, task.answer_files, ANSWER_BYTES)
    machine = backend.start(task.folder, limits)
    try:
        files = {path: text.encode() for path, text in (task.files | task.check.files).items()}
        if task.check.calls is None:
            machine.put(pack(files | {path: answers[path] for path in answers if path not in task.check.files}))
            assert task.check.command is not None
            done = machine.run(task.check.command, check_s, 200)
            if done.is_late:
                return wrong(0.0, f"the check took over {check_s:g} s")
            said = done.output.decode(errors="replace")
            return right(1.0) if done.code == 0 else wrong(0.0, f"the check exited with {done.code}: {said}")
        questions = json.dumps([call[:2] for call in task.check.calls]).encode()
        own = {f"{_FOLDER}/caller.py": _CALLER.encode(), f"{_FOLDER}/calls.json": questions}
        machine.put(pack(files | answers | {path: text.encode() for path, text in task.check.files.items()} | own))
        done = machine.run(f"python3 -P {_FOLDER}/caller.py", check_s, _VALUES_BYTES)
        if done.is_late:
            return wrong(0.0, f"the calls took over {check_s:g} s")
        return _compared(task.check.calls, done.output)
    finally:
        machine.close()


def _compared(calls: list[tuple[str, list[Any], Any]], output: bytes) -> RewardResult:
    """Compares the values that a hostile program may have written with the expected ones."""
    try:
        values = json.loads(output.rpartition(b"\n")[2])
        if len(values) != len(calls):
            raise ValueError
        for (place, _, expected), found in zip(calls, values, strict=True):
            wanted = expected if isinstance(expected, dict) and list(expected) == ["raises"] else {"value": expected}
            if not is_same(found, wanted):
                return wrong(0.0, f"a call of {place} has another value")
    except (ValueError, TypeError, RecursionError):
        return wrong(0.0, "the calls did not end")
    return right(1.0)


def is_same(found: Any, expected: Any) -> bool:
    """Compares two values of JSON. Numbers that are not whole may differ by rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(is_same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, float) and isinstance(found, int | float) and not isinstance(found, bool):
        return math.isclose(found, expected, rel_tol=1e-9)
    return type(found) is type(expected) and found == expected
