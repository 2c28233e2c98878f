"""Every rollout that a run was trained on as a row: made from the journal, which alone is written, when somebody asks.

Runs of before have a `rollouts.jsonl`, as has one for which `llamarl export --rollouts` has written it: what that says
comes first, and later steps follow from the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamarl.config import ConfigError, load_config
from llamarl.controller.journal_reader import FORMAT, PendingGroups, segment_path, segments, whole
from llamarl.controller.records import ADVANTAGES, Record, decoded_group, records
from llamarl.observability.files import pieces, read_run_rows
from llamarl.observability.metrics import finite
from llamarl.run.folder import RunFolder
from llamarl.run.placement import ranges
from llamarl.types import COLUMNS, Prompt, RolloutGroup

_BEGIN_BYTES = 1 << 20
"""The first record of a file is no longer."""
_RESUME = "record.kind = 'resume' keeps what --resume needs and no more; record the next run with 'all'"


class RecordOffset(NamedTuple):
    """Place of the first record that a step needs."""

    segment: int
    offset: int


BEGIN = RecordOffset(0, 0)


class TrainedStep(NamedTuple):
    """All that is on record of one."""

    step: int
    groups: Sequence[RolloutGroup]
    advantages: Mapping[int, np.ndarray]
    """A number for each rollout, by group."""
    columns: Mapping[str, Mapping[int, Mapping[int, np.ndarray]]]
    """A number per token, by name, group and index."""
    place: RecordOffset = BEGIN

    def lines(self) -> Iterator[str]:
        """JSON of each rollout."""
        for group in self.groups:
            for index, rollout in enumerate(group.rollouts):
                texts = {
                    name: values_T
                    for name, values_T in rollout.columns.items()
                    if COLUMNS[name].is_recorded and name != "policy_versions"
                }
                for name, of_groups in self.columns.items():
                    if (values_T := of_groups.get(group.group_id, {}).get(index)) is not None:
                        texts[name] = values_T
                row = _row(self.step, group, index, float(self.advantages[group.group_id][index]))
                numbers = (f', "{name}": {_numbers(values_T)}' for name, values_T in texts.items())
                yield f"{json.dumps(row, allow_nan=False)[:-1]}{''.join(numbers)}}}"


def _row(step: int, group: RolloutGroup, index: int, advantage: float) -> dict[str, Any]:
    rollout, result = group.rollouts[index], group.results[index]
    turns = [[len(part), "policy" if is_sampled else "environment"] for is_sampled, part in rollout.turns]
    return {
        "step": step,
        "group_id": group.group_id,
        "index": index,
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": group.responses[index],
        "outcome": result.outcome.value,
        "reward": result.value,
        "reason": result.reason,
        "advantage": advantage,
        "staleness": step - 1 - rollout.oldest_version if rollout.num_tokens else 0,
        "finish_reason": rollout.finish_reason.value,
        "error": rollout.error,
        "turns": sum(who == "policy" for _, who in turns),
        "turn_tokens": turns,
        "environment_s": group.environment_s[index] if group.environment_s else 0.0,
        "policy_versions": [[version, len(list(run))] for version, run in groupby(rollout.policy_versions_T.tolist())],
    }


def _numbers(values_T: np.ndarray) -> str:
    """Numbers as JSON; float32 come back as they were, and what is not finite as null. Formatting all at once takes a
    quarter of the time."""
    values = values_T.tolist()
    if values_T.dtype.kind != "f":
        return json.dumps(values)
    if not np.isfinite(values_T).all():
        return json.dumps([finite(value) for value in values])
    return f"[{', '.join(['%.9g'] * len(values)) % tuple(values)}]"


class TrainedSteps:
    """The completed steps in the journal of a run, in their order and each once, without those that were taken back.
    What is in memory are groups that no step has taken yet."""

    def __init__(self, folder: Path, place: RecordOffset = BEGIN) -> None:
        """From a `place` on."""
        self._folder = folder
        self._segment, self._offset = place
        self._begins = dict[int, int]()
        """Version from which the run goes on in a file, by its number."""
        self._run = self._identity()
        self._pending, self._firsts = PendingGroups(), dict[int, RecordOffset]()
        """Groups that no step has taken, and where each begins."""
        self.step = 0
        """The last one."""
        self.faults = list[str]()
        """Files of the journal that cannot be read, and why."""

    def new(self) -> Iterator[TrainedStep]:
        """Steps that nobody has had yet, as far as there are any now."""
        numbers = segments(self._folder)
        if self.was_replaced():
            return
        self._begins |= self._begun(numbers)
        for number in numbers:
            if number > self._segment:
                self._segment, self._offset = number, 0
            last = min((version for later, version in self._begins.items() if later > number), default=1 << 62)
            for record in self._records(number, self._offset) if number == self._segment else ():
                if not record.start and not self._begin(record):
                    break
                self._offset = record.end
                if (found := self._add(record)) and found.step <= last:
                    self.step = found.step
                    yield found

    def was_replaced(self) -> bool:
        """Steps that were given are not part of the run any more: all come again, from another reader."""
        numbers = segments(self._folder)
        is_back = any(version < self.step for version in self._begun(numbers).values())
        return is_back or self._run != self._identity() or max(numbers, default=0) < self._segment

    def _begun(self, numbers: Sequence[int]) -> dict[int, int]:
        """From which version the run goes on with files that nobody has looked at."""
        new = [number for number in numbers if number not in self._begins]
        begins = {number: next(self._records(number, 0, _BEGIN_BYTES), None) for number in new}
        return {number: begin.header["version"] for number, begin in begins.items() if begin}

    def again(self, places: Mapping[int, RecordOffset]) -> Iterator[TrainedStep]:
        """Steps that were had before, by the places where they begin."""
        reader, start = self, RecordOffset(1 << 62, 0)
        steps: Iterator[TrainedStep] = iter(())
        for step in sorted(places):
            if places[step] < start or places[step].segment > reader._segment:
                start = places[step]
                reader = TrainedSteps(self._folder, start)
                reader._begins = dict(self._begins)
                steps = reader.new()
            for found in steps:
                if found.step in places:
                    yield found
                if found.step >= step:
                    break

    def _identity(self) -> tuple[int, int]:
        """Tells the run that is in the folder from another one."""
        path = self._folder / "config.toml"
        return ((found := path.stat()).st_ino, found.st_mtime_ns) if path.exists() else (0, 0)

    def _records(self, number: int, offset: int, most: int = 1 << 62) -> Iterator[Record]:
        try:
            yield from records(segment_path(self._folder, number), offset, most)
        except OSError as error:
            self.faults.append(f"{error.filename}: {error.strerror}")

    def _begin(self, record: Record) -> bool:
        """A file begins; whether it can be read."""
        header = record.header
        if header.get("format") != FORMAT:
            self.faults.append(f"{segment_path(self._folder, self._segment)} was written by another version of llamarl")
            return False
        self._pending.forget_after(header["version"])
        return True

    def _add(self, record: Record) -> TrainedStep | None:
        header, found = record.header, None
        if header["kind"] == "step":
            groups = [self._pending.scored.get(one) for one in header["groups"]]
            if "trained" in header and all(groups):
                firsts = [self._firsts[one] for one in header["groups"]]
                place = min(firsts, default=RecordOffset(self._segment, record.start))
                found = TrainedStep(header["step"], [*map(_group, groups)], *_decoded(record), place)
            self._pending.settle(header)
            pending = self._pending.held.keys() | self._pending.scored.keys()
            self._firsts = {one: first for one, first in self._firsts.items() if one in pending}
        elif record.start:
            self._pending.add(record)
            for group_id in header.get("groups", [header.get("group_id")]):
                self._firsts.setdefault(group_id, RecordOffset(self._segment, record.start))
        return found


def _decoded(record: Record) -> tuple[dict[int, np.ndarray], dict[str, dict[int, dict[int, np.ndarray]]]]:
    """Advantages by group, and by name, group and index a number per token; as of the `PolicyStepResult`."""
    offset, columns = 0, dict[str, dict[int, dict[int, np.ndarray]]]()
    for name, dtype, places in record.header["trained"]:
        for group_id, index, size in places:
            values = np.frombuffer(record.rest, dtype, size, offset)
            columns.setdefault(name, {}).setdefault(group_id, {})[index] = values
            offset += values.nbytes
    return {one: of_group[0] for one, of_group in columns.pop(ADVANTAGES, {}).items()}, columns


def _group(one: Any) -> RolloutGroup:
    header = one.header
    nothing = np.empty(0, np.int32)
    prompt = Prompt(
        prompt_id=header["prompt_id"], text=header["text"], token_ids_T=nothing, answer=header["answer"]
    )  # fmt: skip
    return decoded_group(header, prompt, map(whole, one.parts))


def rollout_lines(folder: Path, tell: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """JSON of each rollout that a run was trained on, in the order of the steps. `tell` hears, at the end, of which
    steps there is nothing, and why. Raises ConfigError: there is nothing at all, or a file is damaged."""
    found, file = set[int](), folder / "rollouts.jsonl"
    if file.exists() or pieces(file)[:-1]:
        for row in read_run_rows(file, "remove it, and export it again"):
            found.add(row[1].get("step", 0))
            yield json.dumps(row[1])
    steps, last = TrainedSteps(folder), max(found, default=0)
    for one in steps.new():
        if one.step > last:
            found.add(one.step)
            yield from one.lines()
    if said := what_lacks(folder, found, steps.faults):
        if not found:
            raise ConfigError(said)
        tell(said)


def rollout_rows(path: Path, fix: str = "give the folder of a run") -> Iterator[dict[str, Any]]:
    """Rows of `rollout_lines`, parsed, or of a file of rows."""
    if path.is_dir():
        yield from map(json.loads, rollout_lines(path))
    else:
        yield from (row for _, row in read_run_rows(path, fix))


def what_lacks(folder: Path, found: Collection[int], faults: Sequence[str]) -> str:
    """Names the completed steps without rollouts, and says why; empty: there are none."""
    done = RunFolder(folder).done_steps()
    lacking = tuple(step for step in range(1, done + 1) if step not in found)
    if not lacking and found:
        return ""
    why = faults[0] if faults else "the journal has nothing of them"
    with suppress(ConfigError):
        why = _RESUME if load_config(folder / "config.toml").record.kind == "resume" else why
    what = f"rollouts of steps {ranges(lacking)} cannot be derived" if done else "no rollout is on record"
    return f"{folder}: {what}: {why}" if done else f"{folder}: {what}"
