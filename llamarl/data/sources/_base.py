"""Rows that every prompt source yields."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
ROW = "row "
"""Prefix of the name of a row from Python, before its number from 0. Other rows are named by file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRow:
    """One problem before it is rendered and tokenized."""

    problem_id: str
    """Unique within its source, for example `gsm8k-train-00017`."""
    question: str
    """Text of the problem, before a template. For conversations: the last message."""
    answer: str
    """The right answer, as a reward compares it. May be empty."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """All other fields of the row, unchanged."""
    messages: tuple[dict[str, Any], ...] = ()
    """Conversation up to the message to answer, with `role` and `content` each. Empty means only `question`."""
    reply: dict[str, Any] | None = None
    """Last message of the row, by the assistant. It is not in prompts, and supervised training trains on it."""

    @property
    def name(self) -> str:
        """Name of the row in messages: its id, or its number if the id comes from an unnamed file."""
        return row_name(self.problem_id)

    @property
    def solution(self) -> str | None:
        """Worked solution, on which a supervised warm start trains. None if the row has none."""
        return self.metadata.get("solution")

    @property
    def fields(self) -> dict[str, Any]:
        """Values that a prompt template may use."""
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
    """A finite sequence of problems, equal in each pass."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> ProblemRow: ...


def distinct(draw: Callable[[], tuple[str, T]], first: int, count: int) -> list[tuple[int, str, T]]:
    """Returns index, question and data of the distinct questions `first` to `first + count - 1`, in the order of
    drawing. Does not end if there are fewer."""
    drawn = dict[str, T]()
    while len(drawn) < first + count:
        drawn.setdefault(*draw())
    return [(first + n, *one) for n, one in enumerate(list(drawn.items())[first:])]
