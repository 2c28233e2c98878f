"""Turns rows of tables into problems: roles of columns, ids, conversations, and values that JSON lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from llamarl.config import ConfigError
from llamarl.config.load import parse_json
from llamarl.data.files import GIVEN, PlacedRow, check_size, no_json
from llamarl.data.sources._base import ROW, ProblemRow

Message = dict[str, Any]
EXACT = 1e22
"""Powers of ten below this are exact floats."""


@dataclass(kw_only=True)
class Table:
    """Base of sources whose rows have columns, read at first use.

    A nested column is `outer.inner`. Columns with types that JSON lacks are dropped, with a warning.

    Raises (at first use):
        ConfigError: a file is missing, empty or damaged, a column is missing or has a wrong type, or an id appears
        twice.
    """

    limit: Annotated[int, Field(ge=0)] = 0
    """Number of rows from the start. 0 means all."""
    question: str = ""
    """Column of the question. Empty means `question`, or else `prompt`."""
    answer: str | None = None
    """Column of the right answer. Default: `answer`, or else the last message if it is the assistant's. Empty means
    that rows have no answer."""
    id: str = ""
    """Column of row names. Empty means `id`, or else the file's name and the line or row."""
    messages: str = ""
    """Column of conversations, lists of `role` and `content`. Empty means `messages`, or else `prompt`, if there is no
    question."""

    def __post_init__(self) -> None:
        if self.question and self.messages:
            raise ValueError("question and messages are both set; a row has only one of them")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ProblemRow:
        return self._rows[index]

    @property
    def left_out(self) -> Mapping[str, str]:
        """Dropped columns, and the type of their values."""
        return self._read[1]

    def _located(self) -> Iterator[tuple[str, PlacedRow]]:
        """Yields a default id and the row."""
        raise NotImplementedError

    @property
    def _rows(self) -> list[ProblemRow]:
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[list[ProblemRow], dict[str, str]]:
        rows, first_places, left_out = list[ProblemRow](), dict[str, str](), dict[str, str]()
        for default_id, (place, fields) in self._located():
            for name in [name for name, value in fields.items() if no_json(value)]:
                left_out.setdefault(name, no_json(fields.pop(name)))
            check_size(place, fields)
            row = self._row(_Fields(place, fields, tuple(fields), left_out), default_id)
            if row.problem_id in first_places:
                raise ConfigError(
                    f"{place}: id {row.problem_id!r} is also the id of {first_places[row.problem_id]}; "
                    "give each row a different `id`"
                )
            first_places[row.problem_id] = place
            rows.append(row)
            if len(rows) == self.limit:
                break
        for row in rows if left_out else ():
            for name in left_out:
                row.metadata.pop(name, None)
        return rows, left_out

    def _row(self, fields: _Fields, default_id: str) -> ProblemRow:
        question, conversation, reply = self._asked(fields)
        if self.answer is None:
            answer = fields.values.pop("answer", None)
            answer = reply["content"] if answer is None and reply else answer
        else:
            answer = fields.named("answer", self.answer) if self.answer else ""
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            raise fields.error("`answer` is missing or not text or a number; every row needs one (it may be empty)")
        own_id = fields.named("id", self.id) if self.id else fields.values.pop("id", None)
        return ProblemRow(
            problem_id=default_id if own_id is None else str(own_id),
            question=question, answer=as_text(answer), metadata=fields.values, messages=conversation, reply=reply,
        )  # fmt: skip

    def _asked(self, fields: _Fields) -> tuple[str, tuple[Message, ...], Message | None]:
        """Returns question, conversation (empty if there is only the question), and the assistant's last message."""
        if self.messages:
            return fields.conversation(fields.named("messages", self.messages))
        if self.question:
            found = fields.named("question", self.question)
        else:
            # A `prompt` stays in the metadata: a reward may need it without the template.
            values = fields.values
            found = values.pop("question") if "question" in values else values.get("prompt", values.get("messages"))
        if isinstance(found, list) and found and all(isinstance(one, dict) for one in found):
            return fields.conversation(found)
        if not isinstance(found, str) or not found:
            what = f"`{self.question}` is" if self.question else "`question` (or `prompt`) is missing or"
            raise fields.error(f"{what} not text, and there is no conversation; every row needs one")
        return found, (), None


def as_text(value: str | int | float) -> str:
    """Returns the text of an answer. Whole floats are written without a decimal point: an integer column with gaps is
    read as floats."""
    if isinstance(value, float) and value % 1 == 0 and abs(value) < EXACT:
        return str(int(value))
    return str(value)


class _Fields(NamedTuple):
    """Values of one row, by column."""

    place: str
    values: dict[str, Any]
    """Columns that are not used by the problem."""
    columns: tuple[str, ...]
    """Names of all columns, including used ones."""
    left_out: Mapping[str, str]

    def error(self, said: str) -> ConfigError:
        """Returns an error about this row that lists its columns."""
        lost = "".join(f"; `{name}` holds {kind}, which is not a JSON value" for name, kind in self.left_out.items())
        return ConfigError(f"{self.place}: {said}; its columns are {', '.join(self.columns) or 'none'}{lost}")

    def named(self, option: str, column: str) -> Any:
        """Returns the value of a column that the settings name. Raises ConfigError if there is none."""
        found: Any = self.values
        for name in [column] if column in self.values else column.split("."):
            if not isinstance(found, dict) or name not in found:
                raise self.error(f"{option} = {column!r} is not among the columns")
            found = found[name]
        return found

    def conversation(self, given: Any) -> tuple[str, tuple[Message, ...], Message | None]:
        """Returns question, conversation and reply of a list of messages, or of its JSON text. Raises ConfigError."""
        if isinstance(given, str):
            try:
                given = parse_json(given)
            except (ValueError, RecursionError):
                given = None
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise self.error("the messages are not a list of objects with `role` and `content`")
        messages = [_message(one) for one in given]
        for number, one in enumerate(messages):
            one.setdefault("content", "" if one.get("tool_calls") else None)
            if not isinstance(one.get("role"), str) or not isinstance(one["content"], str):
                raise self.error(f"message {number + 1} needs `role` and `content`, both text")
        reply = messages.pop() if messages and messages[-1]["role"] == "assistant" else None
        if not messages or messages[-1]["role"] in ("assistant", "system"):
            raise self.error(
                "the conversation has nothing to answer; end it with a user's message, or with the reply to one"
            )
        return messages[-1]["content"], tuple(messages), reply


def _message(given: Message) -> Message:
    """Returns a message without null values, which Parquet adds. Templates test whether a key exists."""
    message = {key: value for key, value in given.items() if value is not None}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(one) for one in calls]
    return message


def _call(given: Any) -> Any:
    """Returns a tool call with its arguments as an object, which templates write as JSON. They may be JSON text."""
    call = _without_nulls(given)
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):  # arguments that are not JSON stay as text
            function["arguments"] = parse_json(function["arguments"])
    return call


def _without_nulls(given: Any) -> Any:
    if isinstance(given, list):
        return [_without_nulls(one) for one in given]
    if isinstance(given, dict):
        return {key: _without_nulls(value) for key, value in given.items() if value is not None}
    return given


def of_files(
    paths: str | tuple[str, ...], read: Callable[[Path], Iterator[PlacedRow]], stem_of: Callable[[str], str]
) -> Iterator[tuple[str, PlacedRow]]:
    """Yields the rows of local files in turn, with ids made of the file's stem and the line or row, or of its path if
    two files share a stem. Raises ConfigError."""
    paths = (paths,) if isinstance(paths, str) else paths
    if not paths:
        raise ConfigError("path = [] names no file; give at least one")
    files = [Path(path).resolve() for path in paths]
    if twice := [path for path, file in zip(paths, files, strict=True) if files.count(file) > 1]:
        raise ConfigError(f"path names {twice[0]} twice, so its rows would appear twice; name each file once")
    stems = [stem_of(path) for path in paths]
    for path, prefix in zip(paths, stems if len(set(stems)) == len(stems) else paths, strict=True):
        is_given = Path(path).parent.name == GIVEN
        for place, values in read(Path(path)):
            line = place.rpartition(":")[2]
            yield f"{prefix}-{line}", (f"{ROW}{int(line) - 1}" if is_given else place, values)
