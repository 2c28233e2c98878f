"""A demo task that a tiny model learns on two cores: a running total in words, solved line by line.

    Leo has 17 coins: a+5 b+3. How many coins now?

    a:17+5=22 b:22+3=25
    #### 25

`error_rate` makes a teacher that forgets to carry ("a:17+5=12"). A model trained on `solution` is fluent and often
wrong, in a way that a reward for the right `answer` corrects.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import Field

from llamarl.data.sources._base import ProblemRow, distinct

NAMES = ("Leo", "Mia", "Ann", "Ben", "Eva", "Tom", "Zoe", "Max", "Ida", "Sam", "Kim", "Roy", "Amy", "Dan", "Liv", "Jon")
ITEMS = ("coins", "cards", "books", "shells", "apples", "stamps", "stones", "pens")
LABELS = "abcdefghijklmno"
MEAN_LINES = 3.3
"""Scale of the exponential distribution of the number of lines, so that a few problems are long."""


@dataclass
class RunningTotal:
    """Problems `first` to `first + count - 1` of the seed's sequence.

    Problem i is the i-th *distinct* question that the seed draws. Ranges that do not overlap share no question, and a
    range does not depend on other ranges. All problems before `first` are drawn as well (60,000 per second). The 23,040
    problems of one line run out, so later ranges are longer and harder. Keep ranges below about 40,000.
    """

    count: Annotated[int, Field(ge=1, le=500_000)]
    """Number of problems."""
    first: Annotated[int, Field(ge=0, le=500_000)] = 0
    """Index of the first problem. Use different ranges of one seed for training and held-out problems."""
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a carry is forgotten in `solution`. `answer` is always right."""
    largest_gain: Annotated[int, Field(ge=9, le=99)] = 9
    """Largest gain of one line. Above 9, numbers have two digits, and the total up to three."""
    ask_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the lines of `solution` that ask a calculator, as in "a:17+5?=22"."""
    seed: int = 0
    """Selects the sequence of problems."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> ProblemRow:
        return self._rows[index]

    @cached_property
    def _rows(self) -> list[ProblemRow]:
        rng = random.Random(self.seed)

        def draw() -> tuple[str, tuple[int, list[int]]]:
            start, gains = _draw_numbers(rng, self.largest_gain)
            name, item = rng.choice(NAMES), rng.choice(ITEMS)
            steps = " ".join(f"{label}+{gain}" for label, gain in zip(LABELS, gains, strict=False))
            return f"{name} has {start} {item}: {steps}. How many {item} now?", (start, gains)

        return [self._row(*one) for one in distinct(draw, self.first, self.count)]

    def _row(self, index: int, question: str, numbers: tuple[int, list[int]]) -> ProblemRow:
        start, gains = numbers
        teacher = random.Random(f"{self.seed}/{index}")
        return ProblemRow(
            problem_id=f"running_total-{self.seed}-{index}",
            question=question,
            answer=str(start + sum(gains)),
            metadata={"solution": _solve(start, gains, self.error_rate, self.ask_rate, teacher)},
        )


def _draw_numbers(rng: random.Random, largest: int) -> tuple[int, list[int]]:
    """Draws a start of 10-29 and gains up to `largest`, with a total below 100, or below 1000 for gains above 9."""
    while True:
        num_lines = max(1, round(rng.expovariate(1 / MEAN_LINES)))
        start, gains = rng.randint(10, 29), [rng.randint(1, largest) for _ in range(num_lines)]
        if num_lines <= len(LABELS) and start + sum(gains) < (100 if largest <= 9 else 1000):
            return start, gains


def _solve(start: int, gains: list[int], error_rate: float, ask_rate: float, teacher: random.Random) -> str:
    lines, total = [], start
    for label, gain in zip(LABELS, gains, strict=False):
        carries = total % 10 + gain % 10 >= 10
        forgets = carries and teacher.random() < error_rate
        asks = ask_rate > 0 and teacher.random() < ask_rate
        result = total + gain - (10 if forgets and not asks else 0)
        lines.append(f"{label}:{total}+{gain}{'?' * asks}={result}")
        total = result
    return f"{' '.join(lines)}\n#### {total}"
