"""The two processes of a job: the candidate runs the program that is judged, the tester runs what it is judged by.

    judge -> tester      the job, see `Job` in judge.py
    tester -> candidate  {"code": ..., "prelude": ..., "is_script": ...}, then questions [verb, ...]
    candidate -> tester  {"value": ...} or {"error": [exception, text]}, first to the code itself
    tester -> judge      [true, false or null, why]

Both are confined before they hear anything. The candidate never holds a test, and only the tester can say "right".
"""

from __future__ import annotations

import builtins
import io
import json
import random
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from llamarl.sandbox.judge_values import MAX_MESSAGE_BYTES, Handle, pack, receive, send, unpack

_REASON_CHARS = 200
_ROOM = 1024
"""Bytes of a question beside a value: what was answered may be handed back in one."""
_MODULES = ("collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "sys")
"""Names that tests use without an import, as if the program's own imports served them too."""
_NEVER_RAISED = (StopIteration, StopAsyncIteration, ImportError)
"""The first two end loops of the tests, the last would be taken for a fault of the tests."""


def run_candidate(channel: int) -> None:
    """Loads the program and answers what is asked of it, until nobody asks."""
    questions = receive(channel)
    candidate = _Candidate()
    for question in questions:
        try:
            answer = {"value": pack(candidate.answer(question), candidate.keep)}
            send(channel, answer)
        except BaseException as error:  # the sandbox: whatever the program raises is its answer
            send(channel, {"error": [type(error).__name__, f"{error}"[:_REASON_CHARS]]})


class _Candidate:
    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "candidate"}
        self._objects: list[Any] = []
        self._script: Any = None

    def keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def answer(self, question: list[Any]) -> Any:
        verb, *rest = question
        if verb == "load":
            return self._load(*rest)
        if verb == "run":
            return self._run(rest[0])
        if verb == "name":
            if rest[0] not in self._names:
                raise NameError(f"the program does not define {rest[0]}")
            return self._names[rest[0]]
        target, *arguments = (unpack(value, self._objects.__getitem__) for value in rest)
        if verb == "call":
            return target(*arguments[0], **arguments[1])
        return getattr(target, *arguments) if verb == "get" else setattr(target, *arguments)

    def _load(self, prelude: str, code: str, is_script: bool) -> None:
        if is_script:
            self._script = compile(code, "<program>", "exec")
            return
        try:
            programs = [compile(text, "<program>", "exec") for text in (prelude, code)]
        except SyntaxError:  # a continuation of the prelude
            programs = [compile(prelude + code, "<program>", "exec")]
        for program in programs:
            exec(program, self._names)  # noqa: S102

    def _run(self, text: str) -> str:
        """What the program prints, given `text` on standard input."""
        sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
        printed = io.BytesIO()
        sys.stdout = out = io.TextIOWrapper(printed)
        try:
            exec(self._script, {"__name__": "__main__"})  # noqa: S102
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        out.flush()
        return printed.getvalue().decode(errors="replace")


class CandidateError(Exception):
    """The program failed, or answered what is no answer."""


def run_tester(control: int, channel: int) -> None:
    """One job from `control`; the verdict goes back there."""
    job = next(receive(control))
    random.seed(repr(job))  # repeats, and the program cannot foresee it: it does not know the tests
    program = _Program(channel)
    try:
        verdict, why = _verdict(job, program)
    except (ImportError, _TestsError) as error:
        verdict, why = None, f"the row's tests cannot be run: {error}"
    except BaseException as error:  # the sandbox: a test that fails may raise anything
        verdict, why = False, _describe(error, job["tests"])
    send(control, [verdict, why[: job["shows"] if verdict and job["shows"] else _REASON_CHARS]])


class _Program:
    """The candidate, as the tester sees it."""

    def __init__(self, channel: int) -> None:
        self._channel, self._answers = channel, receive(channel)
        self.num_questions = -1  # the first loads the program

    def ask(self, verb: str, *rest: Any) -> Any:
        self.num_questions += 1
        try:
            send(self._channel, [verb, *(pack(value, self._number) for value in rest)])
        except OSError:
            raise CandidateError("the program ended") from None
        except ValueError as error:
            raise _TestsError(error) from None
        try:
            answer = _next(self._answers)
            if "error" not in answer:
                if len(json.dumps(answer["value"])) > MAX_MESSAGE_BYTES - _ROOM:
                    raise ValueError("it is too long")
                return unpack(answer["value"], lambda number: Handle(self.ask, number))
            name, text = answer["error"]
        except (ValueError, TypeError, KeyError, LookupError) as error:
            raise CandidateError(f"the answer is no value: {error}") from None
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NEVER_RAISED):
            raise kind(str(text))
        raise CandidateError(f"{name}: {text}")

    @staticmethod
    def _number(value: Any) -> int:
        if isinstance(value, Handle):
            return value._number
        raise _TestsError(f"a {type(value).__name__} cannot be handed over")


class _TestsError(Exception):
    """The tests cannot be run, whatever the program."""


class _Names(dict[str, Any]):
    """Globals of the tests: what they do not know, the program defines."""

    def __init__(self, program: _Program) -> None:
        super().__init__(__name__="tests")
        self._program = program

    def __missing__(self, name: str) -> Any:
        if name.startswith("__") or hasattr(builtins, name):
            raise KeyError(name)
        self[name] = sys.modules[name] if name in _MODULES else self._program.ask("name", name)
        return self[name]


def _next(answers: Iterator[Any]) -> dict[str, Any]:
    for answer in answers:
        if isinstance(answer, dict):
            return answer
        raise TypeError("not an answer")
    raise CandidateError("the program ended")


def _verdict(job: dict[str, Any], program: _Program) -> tuple[bool | None, str]:
    """Raises whatever fails in a test."""
    if job["shows"]:
        program.ask("load", "", job["code"], True)
        return True, str(program.ask("run", ""))
    names = _Names(program)
    try:
        setup, tests = (compile(job[part], f"<{part}>", "exec") for part in ("setup", "tests"))
    except (SyntaxError, ValueError) as error:
        return None, f"the row's tests are no Python: {error}"
    program.ask("load", job["prelude"], job["code"], bool(job["cases"]))
    for index, (text, expected) in enumerate(job["cases"]):
        printed = program.ask("run", text)
        if not isinstance(printed, str) or _tidy(printed) != _tidy(expected):
            return False, f"case {index}: the output differs"
    exec(setup, names)  # noqa: S102
    names.update((name, program.ask("name", name)) for name in job["names"])
    exec(tests, names)  # noqa: S102
    if job["entry"]:
        if "check" not in names:
            return None, "the row's tests define no check(candidate)"
        names["check"](names[job["entry"]])
    if not program.num_questions:
        return None, "the row's tests ask nothing of the program"
    return True, ""


def _tidy(text: str) -> list[str]:
    """Without spaces at ends of lines and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _describe(error: BaseException, tests: str) -> str:
    places = [f.lineno or 1 for f in traceback.extract_tb(error.__traceback__) if f.filename == "<tests>"]
    line = tests.split("\n")[places[-1] - 1].strip() if places else ""
    text = f"a test failed {error}" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return f"{text[: _REASON_CHARS // 2].strip()}{': ' if line else ''}{line}"
