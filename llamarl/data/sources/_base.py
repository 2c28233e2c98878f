"""Rows that every prompt source yields."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
ROW = "row "
"""Begins the name of a row that came from Python, whose number follows, from 0; others are named by file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRow:
    """One problem before it is rendered and tokenized."""

    problem_id: str
    """Unique within its source, for example `gsm8k-train-00017`."""
    question: str
    """Text of the problem, before a template; of a conversation, the last message's."""
    answer: str
    """The right answer, as a reward compares it; may be empty."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Every other field of the row, unchanged."""
    messages: tuple[dict[str, Any], ...] = ()
    """Conversation that ends with what is to be answered, `role` and `content` each; empty: `question` alone."""
    reply: dict[str, Any] | None = None
    """Message of the assistant that the row ended with, which no prompt holds: what supervised training learns."""

    @property
    def name(self) -> str:
        """The row in a sentence: by its id, or by its number where that id is of a file that nobody has named."""
        return row_name(self.problem_id)

    @property
    def solution(self) -> str | None:
        """A worked solution, where the row has one: what a supervised warm start learns."""
        return self.metadata.get("solution")

    @property
    def fields(self) -> dict[str, Any]:
        """Values that a prompt template may name."""
        asked = {"id": self.problem_id, "question": self.question, "prompt": self.question}
        return {"answer": self.answer} | self.metadata | asked  # `data.solution` may be a column `answer`


def row_name(problem_id: str) -> str:
    """Returns the name of a row in a sentence: by its id, or by its number where that id is of a file that nobody has
    named. The id may stand behind the label of its source and a slash."""
    found = re.fullmatch(r"(?:(.+)/)?[0-9a-f]{32}-(\d+)", problem_id)
    if found is None:
        return f"{ROW}{problem_id!r}"
    return f"{ROW}{int(found[2]) - 1}" + (f" of source {found[1]!r}" if found[1] else "")


class ProblemSource(Protocol):
    """A finite sequence of problems, the same each time it is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> ProblemRow: ...


def distinct(draw: Callable[[], tuple[str, T]], first: int, count: int) -> list[tuple[int, str, T]]:
    """Index, question and making of questions `first` to `first + count - 1`, of the distinct ones in the order in
    which they are drawn. Does not end where there are fewer."""
    drawn = dict[str, T]()
    while len(drawn) < first + count:
        drawn.setdefault(*draw())
    return [(first + n, *one) for n, one in enumerate(list(drawn.items())[first:])]
