"""Problems from JSON Lines files: one object per line with `question` (or `prompt`), `answer` and, if wished, `id`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from llamarl.config.errors import ConfigError
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
            for row, place in _read(Path(file)):
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


def _read(path: Path) -> Iterator[tuple[ProblemRow, str]]:
    """Rows with the place (`file:line`) of each."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of a JSON Lines file") from None
    if not any(line.strip() for line in lines):
        raise ConfigError(f"{path}:1: the file is empty; it needs one JSON object per line")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}:{number}"
            yield _row(_parse(line, place), f"{path.stem}-{number}", place), place


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: malformed JSON ({error.msg}, column {error.colno}); one object per line") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: holds a JSON {type(value).__name__}, not an object with `question` and `answer`")
    return value


def _row(fields: dict[str, Any], default_id: str, place: str) -> ProblemRow:
    question_field = "question" if "question" in fields else "prompt"
    question = fields.pop(question_field, None)
    if not isinstance(question, str) or not question:
        raise ConfigError(f"{place}: `question` (or `prompt`) is missing or not text; every row needs one")
    answer = fields.pop("answer", None)
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise ConfigError(
            f"{place}: `answer` is missing or not text or a number; every row needs one (it may be empty)"
        )
    problem_id = str(fields.pop("id", default_id))
    return ProblemRow(problem_id=problem_id, question=question, answer=str(answer), metadata=fields)
