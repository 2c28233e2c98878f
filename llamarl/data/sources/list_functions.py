"""A demo task for the reward `code`: small functions on lists, from words to Python.

    keep even, add 3, reverse

    def f(x):
        x = [v for v in x if v % 2 == 0]
        x = [v + 3 for v in x]
        x = x[::-1]
        return x

`error_rate` makes a teacher that confuses steps ("keep even" and "keep odd"). A model trained on `solution` writes
programs that run and are often wrong, in a way that their tests detect.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import Field

from llamarl.data.sources._base import ProblemRow, distinct

Numbers = list[int]


class _Op(NamedTuple):
    right: str
    wrong: str
    """Code of the teacher's mistake."""
    apply: Callable[[Numbers, int], Numbers]


STEPS: dict[str, _Op] = {
    "keep even": _Op(
        "[v for v in x if v % 2 == 0]", "[v for v in x if v % 2]", lambda x, n: [v for v in x if v % 2 == 0]
    ),
    "keep odd": _Op("[v for v in x if v % 2]", "[v for v in x if v % 2 == 0]", lambda x, n: [v for v in x if v % 2]),
    "above {n}": _Op("[v for v in x if v > {n}]", "[v for v in x if v < {n}]", lambda x, n: [v for v in x if v > n]),
    "below {n}": _Op("[v for v in x if v < {n}]", "[v for v in x if v > {n}]", lambda x, n: [v for v in x if v < n]),
    "add {n}": _Op("[v + {n} for v in x]", "[v - {n} for v in x]", lambda x, n: [v + n for v in x]),
    "times {n}": _Op("[v * {n} for v in x]", "[v + {n} for v in x]", lambda x, n: [v * n for v in x]),
    "first {n}": _Op("x[:{n}]", "x[{n}:]", lambda x, n: x[:n]),
    "drop {n}": _Op("x[{n}:]", "x[:{n}]", lambda x, n: x[n:]),
    "reverse": _Op("x[::-1]", "x[::2]", lambda x, n: x[::-1]),
    "sort": _Op("sorted(x)", "sorted(x)[::-1]", lambda x, n: sorted(x)),
}
MOST_STEPS, NUM_TESTS = 3, 4


@dataclass
class ListFunctions:
    """Problems `first` to `first + count - 1` of the seed's sequence. All problems are distinct, so ranges that do not
    overlap share no question."""

    count: Annotated[int, Field(ge=1)]
    """Number of problems."""
    first: Annotated[int, Field(ge=0)] = 0
    """Index of the first problem. Use different ranges of one seed for training and held-out problems."""
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a step is wrong in `solution`. Tests are always right."""
    seed: int = 0
    """Selects the sequence of problems."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> ProblemRow:
        return self._rows[index]

    @cached_property
    def _rows(self) -> list[ProblemRow]:
        rng = random.Random(self.seed)

        def draw() -> tuple[str, list[tuple[str, int]]]:
            names = rng.sample(list(STEPS), rng.randint(1, MOST_STEPS))
            steps = [(name, rng.randint(1, 9)) for name in names]
            return ", ".join(name.format(n=n) for name, n in steps), steps

        return [self._row(*one) for one in distinct(draw, self.first, self.count)]

    def _row(self, index: int, question: str, steps: list[tuple[str, int]]) -> ProblemRow:
        rng = random.Random(f"{self.seed}/{index}")
        lines, tests = list[str](), list[str]()
        for name, n in steps:
            code = STEPS[name].wrong if rng.random() < self.error_rate else STEPS[name].right
            lines.append(f"    x = {code.format(n=n)}\n")
        for _ in range(NUM_TESTS):
            given = [rng.randint(0, 12) for _ in range(12)]
            result = given
            for name, n in steps:
                result = STEPS[name].apply(result, n)
            tests.append(f"assert f({given}) == {result}")
        solution = f"def f(x):\n{''.join(lines)}    return x"
        metadata = {"solution": solution, "test_list": tests}
        return ProblemRow(
            problem_id=f"list_functions-{self.seed}-{index}", question=question, answer="", metadata=metadata
        )
