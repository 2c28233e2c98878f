"""Rollouts of a run for its page: a sample of whole groups, or those that somebody asks for."""

from __future__ import annotations

import json
import math
import re
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.parts.page.follow import CHUNK_ROWS, Follower, Place
from llamarl.parts.page.run_data import LARGEST

Decode = Callable[[int], str]
"""Text of one token."""
SEARCH_S = 2.0
"""Longest look through prompts for one question."""
NUM_FOUND = 100
"""Rollouts that one question brings at most."""
MAX_ROLLOUTS = 2_000_000
"""That can be found, the first ones; 33 bytes each."""
_BEGINS = re.compile(rb'\{"step": (\d+), "group_id": (\d+), "index": (\d+)')
_FIELDS = ("step", "reward", "tokens", "staleness")


class Rollouts:
    """Knows where each rollout lies; texts and tokens stay in the file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "rollouts.jsonl"
        self._clear()

    def _clear(self) -> None:
        self._file = Follower(self._path)
        self._places = array("q")
        self._fields = {name: array("d") for name in _FIELDS}
        self._outcomes, self._known = array("b"), list[str]()

    def __len__(self) -> int:
        return len(self._outcomes)

    def refresh(self) -> bool:
        """Looks at what is new, or at a part of it; whether there may be more."""
        if self._file.was_replaced():
            self._clear()
        num = 0
        for place, row in self._file.rows():
            num += 1
            if len(self) < MAX_ROLLOUTS and _is_rollout(row):
                self._places.extend(place)
                values = (row["step"], row["reward"], len(row["token_ids"]), row["staleness"])
                for column, value in zip(self._fields.values(), values, strict=True):
                    column.append(value)
                if row["outcome"] not in self._known:
                    self._known.append(row["outcome"])
                self._outcomes.append(self._known.index(row["outcome"]))
        return num >= CHUNK_ROWS

    def find(self, wanted: Mapping[str, str], decode: Decode | None) -> dict[str, Any]:
        """The newest that fit, and how many were looked at.

        Args:
            wanted: `step`, `reward`, `tokens`, `staleness` as `3` or `3..7`, an `outcome`, a part of the `prompt`.
        """
        ranges = {name: bounds(wanted.get(name, "")) for name in _FIELDS if wanted.get(name)}
        outcome, text = wanted.get("outcome", ""), wanted.get("prompt", "").lower()
        found, looked, until, at = list[dict[str, Any]](), 0, time.monotonic() + SEARCH_S, len(self)
        while at and len(found) < NUM_FOUND and time.monotonic() < until:
            places = list[Place]()
            while at and len(places) < NUM_FOUND:
                at, looked = at - 1, looked + 1
                fits = all(low <= self._fields[name][at] <= high for name, (low, high) in ranges.items())
                if fits and (not outcome or self._known[self._outcomes[at]] == outcome):
                    places.append(Place(*self._places[2 * at : 2 * at + 2]))
            rows = [row for row in self._file.read(places) if text in str(row.get("prompt", "")).lower()]
            found = rows[-(NUM_FOUND - len(found)) :] + found
        said = f"the newest {len(found)} that fit, of {looked:,} looked at; there are {len(self):,}"
        return {"rows": _slim(found), "said": said} | _words(found, decode)


def bounds(text: str) -> tuple[float, float]:
    """`3`, `3..`, `..7` or `3..7`; anything else is everything."""
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
    """Whole groups of evenly spread steps, the first and the last among them, of so many bytes of the file together."""
    sizes, num = dict[int, dict[int, int]](), 0
    for step, group_id, line in _rollouts(folder):
        of_step = sizes.setdefault(step, {})
        of_step[group_id] = of_step.get(group_id, 0) + len(line)
        num += 1
    chosen, num_bytes = set[tuple[int, int]](), 0
    for step, group_id in _order(sizes):
        if num_bytes + sizes[step][group_id] <= max_bytes:
            chosen.add((step, group_id))
            num_bytes += sizes[step][group_id]
        if num_bytes > 0.98 * max_bytes:
            break
    lines = (line for step, group_id, line in _rollouts(folder) if (step, group_id) in chosen)
    rows = [row for row in map(_parsed, lines) if _is_rollout(row)]
    rows.sort(key=lambda row: (row["step"], row["group_id"], row["index"]))
    said = f"{len(rows):,} of {num:,} rollouts: {len(chosen)} whole groups of steps that are evenly spread"
    return {"rows": _slim(rows), "said": said if num else "no rollout was recorded"} | _words(rows, decode)


def _rollouts(folder: Path) -> Iterator[tuple[int, int, bytes]]:
    """Step, group and line of each."""
    file, is_more = Follower(folder / "rollouts.jsonl"), True
    while is_more:
        is_more = False
        for _, line in file.raw():
            is_more = True
            if begins := _BEGINS.match(line):
                yield int(begins[1]), int(begins[2]), line
    file.close()


def _parsed(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else {}
    return {}


def _order(of_step: Mapping[int, Mapping[int, Any]]) -> Iterator[tuple[int, int]]:
    """Step and group: the first and the last step, then those in the middle of what is left, again and again."""
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
    """Without what the page can do without, numbers as short as they are drawn."""
    found = list[dict[str, Any]]()
    for row in rows:
        short = {name: value for name, value in row.items() if name not in _DROPPED}
        for name in ("behavior_logprobs", "trainer_logprobs", "advantages", "reward", "advantage"):
            if isinstance(value := row.get(name), list):
                short[name] = [_short(one) for one in value]
            elif value is not None:
                short[name] = _short(value)
        found.append(short)
    return found


_DROPPED = {"error", "prompt_id"}


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _words(rows: Sequence[dict[str, Any]], decode: Decode | None) -> dict[str, Any]:
    """Text of each token that occurs, by its id; none where there is no tokenizer."""
    ids = {token for row in rows for token in row["token_ids"] if isinstance(token, int) and 0 <= token < 1 << 31}
    return {"words": {str(token): decode(token) for token in sorted(ids)} if decode else {}}
