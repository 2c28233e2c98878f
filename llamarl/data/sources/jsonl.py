"""Problems from JSON Lines files: one object per line with `question` (or `prompt`), `answer` and, if wished, `id`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from llamarl.config import ConfigError, read_rows
from llamarl.data.sources._base import ProblemRow


@dataclass
class Jsonl:
    """Rows of one file, or of several in turn. Files are read at first use.

    Raises (at first use):
        ConfigError: a file is missing or empty, is not UTF-8 or JSON, lacks a field, or repeats an id.
    """

    path: str | tuple[str, ...]
    """File or files; relative paths start at the working folder."""
    limit: Annotated[int, Field(ge=0)] = 0
    """Rows taken from the front; 0 takes all."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ProblemRow:
        return self._rows[index]

    @cached_property
    def _rows(self) -> list[ProblemRow]:
        rows: list[ProblemRow] = []
        first_places: dict[str, str] = {}
        for file in (self.path,) if isinstance(self.path, str) else self.path:
            for place, fields in read_rows(file, "give the path of a JSON Lines file"):
                row = _row(fields, f"{Path(file).stem}-{place.rpartition(':')[2]}", place)
                if row.problem_id in first_places:
                    raise ConfigError(
                        f"{place}: id {row.problem_id!r} is already that of {first_places[row.problem_id]}; "
                        "give each row its own `id`"
                    )
                first_places[row.problem_id] = place
                rows.append(row)
                if len(rows) == self.limit:
                    return rows
        return rows


def _row(fields: dict[str, Any], default_id: str, place: str) -> ProblemRow:
    # A `prompt` stays among the metadata: a reward may need it as it was before a template.
    question = fields.pop("question") if "question" in fields else fields.get("prompt")
    if not isinstance(question, str) or not question:
        raise ConfigError(f"{place}: `question` (or `prompt`) is missing or not text; every row needs one")
    answer = fields.pop("answer", None)
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise ConfigError(
            f"{place}: `answer` is missing or not text or a number; every row needs one (it may be empty)"
        )
    problem_id = str(fields.pop("id", default_id))
    return ProblemRow(problem_id=problem_id, question=question, answer=str(answer), metadata=fields)
