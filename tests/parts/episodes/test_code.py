from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamarl.config import Ref
from llamarl.config.schema import RewardConfig
from llamarl.data.sources.jsonl import Jsonl
from llamarl.parts.episodes.rewards.code import Code, program_of
from llamarl.parts.episodes.sandbox import seccomp
from llamarl.rewards import build_reward
from llamarl.types import Outcome, RewardItem
from tests.nightly import NIGHTLY, nightly

pytestmark = pytest.mark.skipif(bool(seccomp.missing()), reason=seccomp.missing())

DATA = Path(__file__).parents[4] / "shared" / "data"
STEP = 1 if NIGHTLY else 12
"""Of the reference solutions, every so many are judged."""

DOUBLE = {
    "prompt": "def twice(x: int) -> int:\n    '''Twice as much.'''\n",
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n",
}
ADD = {"test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(0.1, 0.2), half(0.6))"],
       "test_imports": ["import math"], "test_setup_code": "def half(x): return x / 2"}  # fmt: skip
ECHO = {"tests": [["4\n", "8\n"], ["5", "10"]]}


@pytest.fixture(scope="module")
def reward() -> Iterator[Code]:
    made = build_reward(RewardConfig(parts=[Ref(name="code", wrong=-0.5, cpu_s=10)]))
    assert isinstance(made, Code)
    yield made
    made.close()


def item(response: str, row: dict[str, Any], answer: str = "") -> RewardItem:
    return RewardItem(prompt="<user>\n", response=response, answer=answer, metadata=row)


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        (DOUBLE, "    return 2 * x\n", "    return x\n"),
        (
            DOUBLE,
            "So:\n```python\ndef twice(x):\n    return 2 * x\n```\nDone.",
            "```python\ndef twice(x): return x\n```",
        ),
        (ADD, "```python\ndef add(a, b):\n    return a + b\n```", "def add(a, b): return 3"),
        (ECHO, "```py\nprint(int(input()) * 2)\n```", "print(8)"),
    ],
)
def test_rows(reward: Code, row: dict[str, Any], right: str, wrong: str) -> None:
    first, second, third = reward.score([item(right, row), item(wrong, row), item("I do not know \ud800.", row)])
    assert (first.outcome, first.value) == (Outcome.SCORE, 1.0)
    assert (second.outcome, second.value) == (Outcome.WRONG, -0.5)
    assert third.outcome is Outcome.WRONG
    assert second.reason and third.reason


def test_names_of_python_that_the_reference_defines_are_the_programs(reward: Code) -> None:
    row, answer = {"test_list": ["assert sum(10, 15) == 6"]}, "def sum(a, b): return 6"
    assert reward.score([item(answer, row, answer)])[0].outcome is Outcome.SCORE
    assert reward.score([item(answer, row)])[0].outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "no tests"),
        ({"test_list": []}, "not what `code` reads"),
        ({"tests": [["1", 2]]}, "not what `code` reads"),
        (DOUBLE | {"test": None}, "not what `code` reads"),
        (DOUBLE | {"test": "x = 1"}, "no check"),
        ({key: DOUBLE[key] for key in ("test", "entry_point")}, "no Python"),  # the prompt went through a template
        (ADD | {"test_imports": ["import no_such_module"]}, "no_such_module"),
    ],
)
def test_a_row_that_cannot_be_judged_is_invalid(reward: Code, row: dict[str, Any], says: str) -> None:
    (result,) = reward.score([item("def add(a, b): return a + b", row)])
    assert result.outcome is Outcome.INVALID
    assert says in result.reason


def test_a_judge_without_time_is_invalid(reward: Code) -> None:
    hurried = Code(workers=1, batch_s=0.3)
    try:
        endless = item("while True: pass", ADD)
        assert hurried.score([endless])[0].outcome is Outcome.INVALID
    finally:
        hurried.close()


def test_equal_programs_are_judged_once(reward: Code) -> None:
    asked: list[int] = []
    judge = reward._judge.judge

    class Counting:
        def judge(self, jobs: list[Any], batch_s: float) -> list[Any]:
            asked.append(len(jobs))
            return judge(jobs, batch_s)

    counted = Code.__new__(Code)
    counted.__dict__ |= {**reward.__dict__, "_judge": Counting()}
    results = counted.score([item("    return x + x", DOUBLE)] * 3 + [item("    return x", DOUBLE), item("", {})])
    assert asked == [2]
    assert [result.outcome.name for result in results] == ["SCORE"] * 3 + ["WRONG", "INVALID"]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```Python\ny = 2\n```\n", "y = 2"),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1"),
        (" - so\n   ```python3\nx = 1\n   ```", "x = 1"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("", ""),
    ],
)
def test_program_of(response: str, program: str) -> None:
    assert program_of(response) == program


@nightly("judges whole data sets; by day single solutions are judged")
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_reference_solutions_are_right(reward: Code, name: str) -> None:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine; it is not part of the repository")
    rows = list(Jsonl(path=str(path)))[::STEP]
    solutions = [RewardItem(prompt="", response=row.answer, answer=row.answer, metadata=row.metadata) for row in rows]
    results = reward.score(solutions)
    assert {row.problem_id for row, result in zip(rows, results, strict=True) if not result.is_right} == set()
    nothing = reward.score([RewardItem(prompt="", response="pass", answer="", metadata=row.metadata) for row in rows])
    assert {result.outcome for result in nothing} == {Outcome.WRONG}


def test_a_prompt_reaches_the_reward_as_it_was(tmp_path: Path, reward: Code) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(DOUBLE | {"answer": "    return x * 2\n"}) + "\n", encoding="utf-8")
    (row,) = Jsonl(path=str(path))
    assert reward.score([item(row.answer, row.metadata)])[0].is_right
