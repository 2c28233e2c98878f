"""The two processes of a job: the candidate runs the judged program, the tester runs the tests.

    judge -> tester      the job, see `Job` in judge.py
    tester -> candidate  {"code": ..., "prelude": ..., "is_script": ...}, then questions [verb, ...]
    candidate -> tester  {"value": ..., "after": the arguments where it is null} or {"error": [names, text]}, the
                         exception's and those of its bases; first to the code itself
    tester -> judge      [true, false or null, why]

Both are confined before they receive anything. The candidate never has a test, and only the tester can say "right".
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import random
import re
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from llamarl.parts.episodes.sandbox.judge_values import USES, Handle, pack, receive, send, unpack

_REASON_CHARS = 200
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*)?")
_open, _read, _write = open, os.read, os.write
_MODULES = ("collections", "functools", "heapq", "itertools", "math", "random", "re", "string", "sys")
"""Names that tests use without an import, as if they shared the program's imports."""
_NEVER_RAISED = (StopIteration, StopAsyncIteration, ImportError)
"""The first two end loops of the tests, and the last would count as a fault of the tests."""


def run_candidate(channel: int) -> None:
    """Loads the program and answers questions until the channel closes."""
    questions = receive(channel)
    candidate = _Candidate()
    # Threads run synchronously when started, because this process may have only one thread.
    threading.Thread.start, threading.Thread.join = (lambda self: self.run()), (lambda self, timeout=None: None)
    for question in questions:
        try:
            value = pack(candidate.answer(question), candidate.keep)
            after = pack(candidate.given, candidate.keep) if value is None else []
            send(channel, {"value": value, "after": after})
        except BaseException as error:  # any exception of the program is an answer
            send(channel, {"error": [[kind.__name__ for kind in type(error).__mro__], f"{error}"[:_REASON_CHARS]]})


class _Candidate:
    def __init__(self) -> None:
        self._names = _namespace("candidate")
        self._objects: list[Any] = []
        self._script: Any = None
        self.given: list[Any] = []
        """Arguments of the last call."""

    def keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _kept(self, number: int | str) -> Any:
        return getattr(builtins, number) if isinstance(number, str) else self._objects[number]

    def answer(self, question: list[Any]) -> Any:
        verb, *rest = question
        self.given = []
        if verb == "load":
            return self._load(*rest)
        if verb == "run":
            return self._run(rest[0])
        if verb == "name":
            if rest[0] not in self._names:
                raise NameError(f"the program does not define {rest[0]}")
            return self._names[rest[0]]
        target, *arguments = (unpack(value, self._kept) for value in rest)
        if verb == "call":
            self.given = [*arguments[0], *arguments[1].values()]
            return target(*arguments[0], **arguments[1])
        if verb == "use":
            return USES[target](*arguments)
        return getattr(target, *arguments) if verb == "get" else setattr(target, *arguments)

    def _load(self, prelude: str, code: str, is_script: bool) -> None:
        if is_script:
            self._script = _compiled(code, "<program>")
            return
        try:
            programs = [_compiled(text, "<program>") for text in (prelude, code)]
        except SyntaxError:  # the program continues the prelude
            programs = [_compiled(prelude + code, "<program>")]
        for program in programs:
            exec(program, self._names)  # noqa: S102

    def _run(self, text: str) -> str:
        """Returns the program's output for `text` on standard input."""
        given, printed = io.BytesIO(text.encode()), io.BytesIO()
        sys.stdin = stdin = io.TextIOWrapper(given)
        sys.stdout = out = io.TextIOWrapper(printed, write_through=True)
        # The script uses descriptors 0 and 1, and may exit without further output.
        builtins.open = io.open = lambda file, mode="r", *rest, **options: (
            _open(file, mode, *rest, **options) if file != 0 else given if "b" in mode else stdin
        )
        os.read = lambda file, size: _read(file, size) if file else given.read(size)
        os.write = lambda file, data: _write(file, data) if file != 1 else printed.write(data)
        os._exit = sys.exit  # type: ignore[assignment]
        try:
            exec(self._script, _namespace("__main__"))  # noqa: S102
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        out.flush()
        return printed.getvalue().decode(errors="replace")


def _namespace(name: str) -> dict[str, Any]:
    """Returns the names of a new module that is registered as `name`, which dataclasses and pickles need."""
    sys.modules[name] = types.ModuleType(name)
    return vars(sys.modules[name])


def _compiled(text: str, name: str) -> types.CodeType:
    """Returns compiled code of `text`, without the future imports of this file."""
    return compile(text, name, "exec", dont_inherit=True)


class CandidateError(Exception):
    """The program failed, or gave an invalid answer."""


def run_tester(control: int, channel: int) -> None:
    """Runs one job from `control` and sends the verdict back."""
    job = next(receive(control))
    random.seed(repr(job))  # reproducible, and unpredictable for the program, which does not know the tests
    program = _ProgramProxy(channel)
    try:
        verdict, why = _verdict(job, program)
    except (ImportError, _TestsError) as error:
        verdict, why = None, f"the row's tests cannot be run: {error}"
    except BaseException as error:  # a failing test may raise anything
        verdict, why = False, _describe(error, job["tests"])
    send(control, [verdict, why[: job["shows"] if verdict and job["shows"] else _REASON_CHARS]])


class _ProgramProxy:
    """The candidate, as seen by the tester."""

    def __init__(self, channel: int) -> None:
        self._channel, self._answers = channel, receive(channel)
        self.num_questions = -1  # the first question loads the program
        self._has_said = False

    def ask(self, verb: str, *rest: Any) -> Any:
        self.num_questions += 1
        try:
            send(self._channel, [verb, *(pack(value, self._number) for value in rest)])
        except OSError:
            raise CandidateError("the program ended") from None
        except ValueError as error:  # the message contains only text of the program or the tests
            raise (CandidateError if self._has_said else _TestsError)(error) from None
        try:
            answer = _next(self._answers)
            if "error" not in answer:
                value, after = (self._unpacked(answer[part]) for part in ("value", "after"))
                self._has_said = self._has_said or bool(after) or not (value is None or isinstance(value, Handle))
                if verb == "call" and value is None:
                    _put_back([*rest[1], *rest[2].values()], after)
                return value
            names, text = answer["error"]
            kind = _exception(tuple(names))
        except (ValueError, TypeError, KeyError, LookupError) as error:
            raise CandidateError(f"the answer is no value: {error}") from None
        raise kind(str(text))

    def _unpacked(self, value: Any) -> Any:
        if isinstance(value, dict) and list(value) == ["exception"]:
            return _exception(tuple(value["exception"]))
        return unpack(value, lambda number: Handle(self.ask, number))

    @staticmethod
    def _number(value: Any) -> int | str:
        if isinstance(value, Handle):
            return value._number
        if (name := getattr(value, "__name__", "")) and getattr(builtins, name, None) is value:
            return name
        raise _TestsError(f"a {type(value).__name__} cannot be handed over")


@functools.cache
def _exception(names: tuple[str, ...]) -> type[Exception]:
    """Returns a class for an exception of the program, with its name and those of its bases. Raises LookupError if
    tests could not catch it."""
    kind = getattr(builtins, names[0], None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NEVER_RAISED):
        return kind
    return type(names[0], (_exception(names[1:]),), {})


def _put_back(given: list[Any], after: list[Any]) -> None:
    """Copies the modified arguments of a function without a return value back into the tests' containers."""
    for mine, theirs in zip(given, after, strict=True):
        if type(mine) is type(theirs) and type(mine) in (list, dict, set, bytearray, deque) and mine != theirs:
            mine.clear()
            (mine.update if isinstance(mine, dict | set) else mine.extend)(theirs)


class _TestsError(Exception):
    """The tests cannot run with any program."""


class _Names(dict[str, Any]):
    """Globals of the tests. The program provides missing names."""

    def __init__(self, program: _ProgramProxy) -> None:
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


def _verdict(job: dict[str, Any], program: _ProgramProxy) -> tuple[bool | None, str]:
    """Returns verdict and reason. Raises any exception of a test."""
    if job["shows"]:
        program.ask("load", "", job["code"], True)
        return True, str(program.ask("run", ""))
    names = _Names(program)
    try:
        setup, tests = (_compiled(job[part], f"<{part}>") for part in ("setup", "tests"))
    except (SyntaxError, ValueError) as error:
        return None, f"the row's tests are no Python: {error}"
    program.ask("load", job["prelude"], job["code"], bool(job["cases"]))
    for index, (text, expected) in enumerate(job["cases"]):
        printed = program.ask("run", text)
        if not isinstance(printed, str) or not _is_same(printed, expected):
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


def _is_same(printed: str, expected: str) -> bool:
    """Compares outputs, ignoring trailing spaces, empty lines at the end, repeated spaces where the expected line has
    single spaces, and number formats."""
    lines, others = (text.rstrip().split("\n") for text in (printed, expected))
    return len(lines) == len(others) and all(map(_is_same_line, lines, others))


def _is_same_line(printed: str, expected: str) -> bool:
    words = expected.split()
    if " ".join(words) != expected.rstrip():
        return printed.rstrip() == expected.rstrip()
    return list(map(_tidy, printed.split())) == list(map(_tidy, words))


def _tidy(word: str) -> str | Decimal:
    return Decimal(word) if _NUMBER.fullmatch(word) else word


def _describe(error: BaseException, tests: str) -> str:
    places = [f.lineno or 1 for f in traceback.extract_tb(error.__traceback__) if f.filename == "<tests>"]
    line = tests.split("\n")[places[-1] - 1].strip() if places else ""
    try:
        text = f"a test failed {error}" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    except Exception as other:  # an object of the program failed to format itself
        text = type(other).__name__
    return f"{text[: _REASON_CHARS // 2].strip()}{': ' if line else ''}{line}"
