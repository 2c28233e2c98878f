"""Scores Python programs by the tests of their row."""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llamarl.parts.episodes.sandbox.judge import JudgeJob, ProgramJudge
from llamarl.rewards._base import Reward, invalid, right, wrong
from llamarl.sandbox.pool import Failure
from llamarl.types import RewardItem, RewardResult

_FENCE = "```"
_DEFINITION = re.compile(r"^def (\w+)", re.MULTILINE)


@dataclass
class Code(Reward):
    """Right if the last closed Python block of the response (or the whole response without one) passes the row's tests.

    A row has `test` and `entry_point` (HumanEval; the program continues the prompt or repeats it), `test_list` with
    optional `test_imports` and `test_setup_code` (MBPP), or `tests`, a list of pairs of standard input and output. The
    program can only compute, and runs separately from its tests. A program that fails or exceeds a limit is WRONG. A
    row without runnable tests, or a failure of the judge, is INVALID.
    """

    correct: float = 1.0
    """Reward of a program that passes all tests."""
    wrong: float = 0.0
    """Reward of any other program."""
    workers: int = field(default_factory=lambda: max(2, (os.cpu_count() or 2) // 2))
    """Programs that run in parallel. The default is half of the cores, at least 2."""
    cpu_s: int = 5
    """CPU seconds of a program, and separately of its tests. Correct programs usually take milliseconds."""
    wall_s: float = 30.0
    """Wall-clock seconds of one program. Generous, because a busy machine must not make a program wrong."""
    memory_bytes: int = 1 << 29
    """Address space of a program in bytes, and separately of its tests."""
    batch_s: float = 120.0
    """Seconds of one call of `score`. Programs without a verdict by then are INVALID."""

    def __post_init__(self) -> None:
        self._judge = ProgramJudge(
            workers=self.workers, cpu_s=self.cpu_s, wall_s=self.wall_s, memory_bytes=self.memory_bytes
        )

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        jobs = [_job(item) for item in items]
        asked = dict.fromkeys(job for job in jobs if isinstance(job, JudgeJob))  # judges equal programs once
        verdicts = dict(zip(asked, self._judge.judge(list(asked), self.batch_s) if asked else [], strict=True))
        results = []
        for job in jobs:
            verdict = verdicts[job] if isinstance(job, JudgeJob) else job
            if isinstance(verdict, str):
                results.append(invalid(verdict))
            elif isinstance(verdict, Failure) or verdict.is_right is None:
                results.append(invalid(verdict.reason))
            else:
                results.append(right(self.correct) if verdict.is_right else wrong(self.wrong, verdict.reason))
        return results

    def written(self, answer: str) -> str | None:
        return answer or None

    def close(self) -> None:
        self._judge.close()


def program_of(response: str) -> str:
    """Returns the last closed block marked as Python, or the last closed block without a mark, or the whole
    response."""
    found: dict[str, str] = {}
    lines: list[str] = []
    mark = None
    for line in response.split("\n"):
        text = line.strip()
        if mark is None and text.startswith(_FENCE):
            mark, lines = text.removeprefix(_FENCE).strip().lower(), []
        elif mark is not None and text == _FENCE:
            found["python" if mark in ("py", "python3") else mark] = "\n".join(lines)
            mark = None
        else:
            lines.append(line)
    return found.get("python", found.get("", response))


def _job(item: RewardItem) -> JudgeJob | str:
    """Returns the job that judges a response, or why it cannot be judged."""
    row, code = item.metadata, program_of(item.response)
    try:
        code.encode()
    except UnicodeEncodeError:  # not valid in a Python file
        code = "'not text'"
    if "test" in row and "entry_point" in row:
        prompt, test, entry = row.get("prompt", item.prompt), row["test"], row["entry_point"]
        if all(isinstance(text, str) for text in (prompt, test, entry)):
            return JudgeJob(code=code, prelude=prompt, setup=prompt, tests=test, entry=entry, names=(entry,))
    elif "test_list" in row:
        tests, imports, setup = row["test_list"], row.get("test_imports", []), row.get("test_setup_code", "")
        if tests and _are_texts(tests) and _are_texts(imports) and isinstance(setup, str):
            names = _builtin_names(item.answer)
            return JudgeJob(code=code, setup="\n".join([*imports, setup]), tests="\n".join(tests), names=names)
    elif "tests" in row:
        cases = row["tests"]
        if cases and isinstance(cases, list) and all(_are_texts(case) and len(case) == 2 for case in cases):
            return JudgeJob(code=code, cases=tuple((text, printed) for text, printed in cases))
    else:
        return "the row has no tests: neither `test` and `entry_point`, nor `test_list`, nor `tests`"
    return "the row's tests are not what `code` reads; see its docstring"


def _are_texts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)


def _builtin_names(reference: str) -> tuple[str, ...]:
    """Returns names of builtins that the reference solution redefines, so that the tests use the program's
    definitions."""
    return tuple(name for name in _DEFINITION.findall(reference) if hasattr(builtins, name))
