"""Rollouts of a run for its page: a sample of whole groups, or the results of a query."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.observability.metrics import counted, last_question
from llamarl.parts.page.follow import CHUNK_ROWS, RowOffset, RowReader
from llamarl.parts.page.run_data import LARGEST
from llamarl.run.folder import RunFolder
from llamarl.run.rollouts import RecordOffset, TrainedSteps, what_lacks

Decode = Callable[[int], str]
"""Returns the text of one token."""
SEARCH_S = 2.0
"""Maximum seconds to search prompts for one query."""
NUM_FOUND = 100
"""Maximum number of rollouts in the answer to a query."""
MAX_ROLLOUTS = 2_000_000
"""Maximum number of searchable rollouts, from the start of the run; 57 bytes each."""
ROW_BYTES, TOKEN_BYTES = 400, 32
"""Approximate bytes of a row without its texts, and of each token."""
_FIELDS = ("step", "reward", "tokens", "staleness")
VERDICTS = ("right", "wrong", "not judged", "not recorded")
"""Verdicts of a reward on a rollout. Older runs with `rollouts.jsonl` recorded none."""


class Rollouts:
    """Index of a run's rollouts. Texts and tokens stay in the journal, or in the `rollouts.jsonl` of an older run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clear()

    def _clear(self) -> None:
        self._steps, self._begins = TrainedSteps(self._folder), dict[int, RecordOffset]()
        self._file, self._of_file = RowReader(self._folder / "rollouts.jsonl"), set[int]()
        """The file, and the steps that only the file has."""
        self._places, self._groups, self._sizes = array("q"), array("q"), array("l")
        self._fields = {name: array("d") for name in _FIELDS}
        self._verdicts = array("b")
        """Index in `VERDICTS` of each rollout."""
        self._done = 0
        """Completed steps at the last complete read."""

    def __len__(self) -> int:
        return len(self._verdicts)

    def refresh(self) -> bool:
        """Reads new data or a part of it. Returns whether there may be more."""
        if self._file.was_replaced() or self._steps.was_replaced():
            self._clear()
        num, done = 0, RunFolder(self._folder).done_steps()
        for one in self._steps.new():
            if one.step in self._of_file:  # the journal now has the step and replaces the file's rows
                self._clear()
                return True
            self._begins[one.step], before = one.place, num
            for group in one.groups:
                for rollout, result, text in zip(group.rollouts, group.results, group.responses, strict=True):
                    age = one.step - 1 - rollout.oldest_version if rollout.num_tokens else 0
                    values, texts = (one.step, result.value, rollout.num_tokens, age), (group.prompt.text, text)
                    place, num = RowOffset(-one.step, num - before), num + 1
                    self._add(place, group.group_id, values, verdict_of(result.right), texts)
            if num >= CHUNK_ROWS:
                return True
        for place, row in () if 0 < self._steps.step == len(self._begins) else self._file.rows():
            num += 1
            if _is_rollout(row) and row["step"] not in self._begins:
                self._of_file.add(row["step"])
                texts = row.get("prompt"), row.get("response")
                values = row["step"], row["reward"], len(row["token_ids"]), row["staleness"]
                self._add(place, row["group_id"], values, verdict_of(row.get("right", "")), texts)
        self._done = self._done if num >= CHUNK_ROWS else done
        return num >= CHUNK_ROWS

    def _add(
        self, place: RowOffset, group_id: int, values: Sequence[float], verdict: str, texts: Iterable[object]
    ) -> None:
        if len(self) < MAX_ROLLOUTS:
            self._places.extend(place)
            self._groups.append(group_id)
            self._sizes.append(ROW_BYTES + TOKEN_BYTES * int(values[2]) + sum(len(str(text)) for text in texts))
            for column, value in zip(self._fields.values(), values, strict=True):
                column.append(value)
            self._verdicts.append(VERDICTS.index(verdict))

    def _read(self, places: Sequence[RowOffset]) -> Iterator[dict[str, Any]]:
        """Yields rows in order. Positions in the journal are negative step numbers instead of a file."""
        yield from self._file.read(place for place in places if place.piece >= 0)
        wanted = {place for place in places if place.piece < 0}
        for one in self._steps.again({-piece: self._begins[-piece] for piece, _ in wanted}):
            first, numbers = 0, {number for piece, number in wanted if piece == -one.step}
            for group in one.groups:
                if not numbers.isdisjoint(range(first, first + len(group.rollouts))):
                    lines = enumerate(one._replace(groups=[group]).lines(), start=first)
                    yield from (json.loads(line) for number, line in lines if number in numbers)
                first += len(group.rollouts)

    def find(self, wanted: Mapping[str, str], decode: Decode | None) -> dict[str, Any]:
        """Returns the newest matching rollouts, and the number of rollouts searched.

        Args:
            wanted: `step`, `reward`, `tokens`, `staleness` as `3` or `3..7`; `right` as one of `VERDICTS`; a substring
                of `source` or `prompt`.
        """
        ranges = {name: bounds(wanted.get(name, "")) for name in _FIELDS if wanted.get(name)}
        verdict, text = wanted.get("right", ""), wanted.get("prompt", "").lower()
        order = np.argsort(self._fields["step"], kind="stable")  # steps of the file come last
        found, looked, until, at = list[dict[str, Any]](), 0, time.monotonic() + SEARCH_S, len(self)
        while at and len(found) < NUM_FOUND and time.monotonic() < until:
            places = list[RowOffset]()
            while at and len(places) < NUM_FOUND:
                at, looked, n = at - 1, looked + 1, order[at - 1]
                fits = all(low <= self._fields[name][n] <= high for name, (low, high) in ranges.items())
                if fits and (not verdict or VERDICTS[self._verdicts[n]] == verdict):
                    places.append(RowOffset(*self._places[2 * n : 2 * n + 2]))
            read = sorted(self._read(places), key=lambda row: row["step"])
            rows = [row for row in read if text in f"{row.get('source', '')} {row.get('prompt', '')}".lower()]
            found = rows[-(NUM_FOUND - len(found)) :] + found
        said = f"Showing the newest {len(found):,} matching rollouts ({looked:,} of {len(self):,} searched)"
        said = said if len(self) else what_lacks(self._folder, self._done, (), self._steps.faults)
        return {"rows": _slim(found), "said": said} | _words(found, decode)

    def sample(self, decode: Decode | None, max_bytes: int) -> dict[str, Any]:
        """Returns a sample of whole groups. See the function of this name."""
        found = dict[int, dict[int, list[int]]]()
        for at, (step, group_id) in enumerate(zip(self._fields["step"], self._groups, strict=True)):
            found.setdefault(int(step), {}).setdefault(group_id, []).append(at)
        chosen, num_bytes = list[list[int]](), 0
        for step, group_id in _order(found):
            members = found[step][group_id]
            size = sum(self._sizes[at] for at in members)
            if num_bytes + size <= max_bytes:
                chosen.append(members)
                num_bytes += size
            if num_bytes > 0.98 * max_bytes:
                break
        places = [RowOffset(*self._places[2 * at : 2 * at + 2]) for members in chosen for at in members]
        rows = sorted(self._read(places), key=lambda row: (row["step"], row["group_id"], row["index"]))
        said = f"sample of {len(rows):,} of the run's {len(self):,} rollouts, in {counted(len(chosen), 'whole group')}"
        done = self._done if len(self) < MAX_ROLLOUTS else max(found)  # later rollouts are not indexed
        lacks = what_lacks(self._folder, done, found, self._steps.faults)
        said = "; ".join(filter(None, (said if len(self) else "", lacks)))
        return {"rows": _slim(rows), "said": said} | _words(rows, decode)


def verdict_of(right: object) -> str:
    """Returns text for the field `right` of a rollout."""
    if right is None:
        return "not judged"
    return ("wrong", "right")[right] if isinstance(right, bool) else "not recorded"


def bounds(text: str) -> tuple[float, float]:
    """Parses `3`, `3..`, `..7` or `3..7`. Any other text means no bounds."""
    low, dots, high = text.partition("..")
    try:
        first = float(low) if low.strip() else -math.inf
        last = float(high) if high.strip() else math.inf if dots else first
    except ValueError:
        return -math.inf, math.inf
    return first, last


def _is_rollout(row: Mapping[str, Any]) -> bool:
    numbers = (row.get("step"), row.get("reward"), row.get("staleness"), row.get("group_id"), row.get("index"))
    return all(isinstance(value, (int, float)) and abs(value) < LARGEST for value in numbers) and isinstance(
        row.get("token_ids"), list
    )


def sample(folder: Path, decode: Decode | None, max_bytes: int) -> dict[str, Any]:
    """Returns whole groups of evenly spaced steps, including the first and the last, of about `max_bytes` in total."""
    rollouts = Rollouts(folder)
    while rollouts.refresh():
        pass
    return rollouts.sample(decode, max_bytes)


def _order(of_step: Mapping[int, Mapping[int, Any]]) -> Iterator[tuple[int, int]]:
    """Yields (step, group): the first and the last step, then the midpoints of the remaining gaps, repeatedly."""
    steps = sorted(of_step)
    if not steps:
        return
    picked, gaps = [0, len(steps) - 1], [(0, len(steps) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle < high:
            picked.append(middle)
            gaps += [(low, middle), (middle, high)]
    for depth in range(max(map(len, of_step.values()))):
        for index in dict.fromkeys(picked):
            groups = list(of_step[steps[index]])
            if depth < len(groups):
                yield steps[index], groups[depth]


def _slim(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows without unused fields, with numbers rounded to the displayed precision."""
    found = list[dict[str, Any]]()
    for row in rows:
        short = {name: value for name, value in row.items() if name not in _DROPPED}
        for name in ("behavior_logprobs", "trainer_logprobs", "advantages", "reward", "advantage"):
            if isinstance(value := row.get(name), list):
                short[name] = [_short(one) for one in value]
            elif value is not None:
                short[name] = _short(value)
        prompt = row.get("prompt")
        if isinstance(prompt, str) and (question := last_question(prompt)) != prompt:
            short["question"] = question
        found.append(short)
    return found


_DROPPED = {"error", "prompt_id"}


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _words(rows: Sequence[dict[str, Any]], decode: Decode | None) -> dict[str, Any]:
    """Returns the text of each occurring token by its id. Empty without a tokenizer."""
    ids = {token for row in rows for token in row["token_ids"] if isinstance(token, int) and 0 <= token < 1 << 31}
    return {"words": {str(token): decode(token) for token in sorted(ids)} if decode else {}}
