"""Data of a first run: the source, and the columns with questions and answers, detected in the first rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError
from llamarl.config.errors import one_of
from llamarl.config.hub import HubName, hub_name, of_hub_anyway, open_hub
from llamarl.config.section import near_path
from llamarl.data.files import read_file, suffix

SAMPLED = 64
"""Rows that are inspected."""
MOST_BYTES = 64 << 20
"""Maximum bytes of a file that is fetched to inspect its columns."""
QUESTIONS = ("question", "prompt", "messages", "problem", "instruction", "query", "task", "input")
ANSWERS = (
    *("answer", "final_answer", "expected_answer", "ground_truth", "gold", "target", "label", "solution", "output"),
    *("response", "completion", "reward_model.ground_truth"),
)
"""Candidate columns, the best first. A source finds the first three question columns and the first answer column
itself."""
KNOWN = ("question", "prompt", "messages", "answer")
_TRAINED, _HELD_OUT = ("train", "training"), ("test", "validation", "dev", "eval")


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundData:
    """Settings of `data`, and sentences with the reasons."""

    train: dict[str, Any]
    eval: dict[str, Any] | None = None
    why: list[str] = field(default_factory=list)
    reward: str = "math"
    """Name of the reward that compares such answers."""


def found_data(name: str, question: str = "", answer: str = "") -> FoundData:
    """Detects source and columns of a file or of a Hub dataset. Of a dataset, reads the README, the list of files and
    one file that is not large.

    Args:
        question: name of the question column. Empty means the best of `QUESTIONS`.
        answer: name of the answer column. Empty means the best of `ANSWERS`.

    Raises:
        ConfigError: the data do not exist, or no column is recognized as question or answer.
    """
    if Path(name).is_file():
        if not suffix(name):
            raise ConfigError(
                f"--data {name}: its suffix is of no kind that is read; use .jsonl, .json, .csv or .parquet"
            )
        train, held_out, rows = {"name": "file", "path": name}, None, _rows(read_file(Path(name)))
        why = ["no file to evaluate on is known; data.eval takes one that is held out"]
    elif of_hub := hub_name(name):
        train, held_out, rows, why = _of_hub(of_hub)
    elif meant := [*filter(None, (near_path(name), of_hub_anyway(name)))]:
        raise ConfigError(f"--data {name}: there is no such file; {one_of(meant)}")
    else:
        raise ConfigError(f"--data {name} is neither a file nor a name of the Hub; give owner/name, or a .jsonl file")
    given = {name: column for name, column in (("question", question), ("answer", answer)) if column}
    if not rows:
        why.append("no row was read, so columns are as named here, or `question` and `answer`: look at the data")
        columns = given
    else:
        columns = given | _columns(name, rows, given)
        known = ", ".join(f"`{column}`" for column in rows[0])
        why.append(f"columns are {known}; question and answer were told by their names")
    hashes = [str(value) for row in rows if (value := _value(row, columns.get("answer", "answer"))) is not None]
    of_gsm8k = bool(hashes) and all("####" in one for one in hashes)
    held_out = held_out and held_out | columns
    return FoundData(train=train | columns, eval=held_out, why=why, reward="gsm8k" if of_gsm8k else "math")


def _of_hub(name: HubName) -> tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]], list[str]]:
    """Returns training and evaluation sources, first rows, and sentences. Raises ConfigError."""
    try:
        hub = open_hub()
        pinned, _, found = hub.with_data(name)
        commit, sizes = hub.listing(pinned, "dataset")
    except ConfigError as error:
        raise ConfigError(f"--data {name}: {error}") from None
    config = next((one for one in ("default", "main") if one in found), min(found))
    splits, why = found[config], list[str]()
    split = next((one for one in _TRAINED if one in splits), min(splits))
    held_out = next((one for one in _HELD_OUT if one in splits and one != split), "")
    source = {"name": "hub", "path": name.repo, "config": config}
    if name.revision or pinned.repo != name.repo:
        source["revision"] = name.revision
    if len(found) > 1:
        why.append(f"of its configurations {', '.join(sorted(found))}, {config!r} was taken")
    if not held_out:
        why.append("no split is held out to evaluate on; data.eval takes one")
    path, rows = splits[split][0], list[dict[str, Any]]()
    if sizes.get(path, 0) <= MOST_BYTES:
        folder = hub.fetched(pinned.at(commit), "dataset", lambda _: [path]).folder
        rows = _rows(read_file(folder / path))
    else:
        why.append(f"{path} has {sizes[path] / 1e6:,.0f} MB, so it was not fetched for its columns")
    evaluated = source | {"split": held_out} if held_out else None
    return source | {"split": split}, evaluated, rows, why


def _rows(placed: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for _, row in islice(placed, SAMPLED)]


def _columns(name: str, rows: Sequence[Mapping[str, Any]], given: Mapping[str, str]) -> dict[str, str]:
    """Returns options of the source for columns that it does not find itself. Raises ConfigError."""
    found = dict[str, str]()
    for option, known, kinds in (("question", QUESTIONS, str | list), ("answer", ANSWERS, str | int | float)):
        wanted = (given[option],) if option in given else known
        fits = (one for one in wanted if all(isinstance(_value(row, one), kinds) for row in rows))
        column = next(fits, "")
        is_told = option == "answer" and any("messages" in row or isinstance(row.get("prompt"), list) for row in rows)
        if not column and not is_told:
            of = (
                f"--{option} {given[option]}: it"
                if option in given
                else f"no column that is known to hold the {option}"
            )
            what = "is not among the columns, or has values of another kind" if option in given else "is there"
            columns = ", ".join(rows[0])
            raise ConfigError(f"--data {name}: {of} {what}; name it by --{option}, of {columns}")
        if column and (option in given or column not in KNOWN):
            found[option] = column
    return found


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Returns the value of a column, which may be nested. None means missing."""
    found: Any = row
    for part in [column] if column in row else column.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if isinstance(found, bool) else found
