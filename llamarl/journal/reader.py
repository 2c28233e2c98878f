"""`JournalReader`: what the journal of a run says, after the process that wrote it has ended or while it writes.

A group's record has what was not known of its rollouts before: rewards, values, the order. Their tokens are in records
before it. So it is read in order, and what is in memory at a time are the groups of a step and those that no step has
taken.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llamarl.executors.replies import ControllerState, JournalPosition
from llamarl.journal.records import Key, Record, TokenRun, decoded_group, joined, newest_version, records
from llamarl.observability.files import last_lines
from llamarl.types import Prompt, Rollout, RolloutGroup

FORMAT = 2
"""Version of the files' format; files of another one are not read."""
_NOTHING = -2
"""Older than a rollout without tokens."""
_BEGIN_BYTES = 1 << 20
"""The first record of a file is no longer."""


class RecordOffset(NamedTuple):
    """Place of the first record that something needs."""

    segment: int
    offset: int


BEGIN = RecordOffset(0, 0)


class RecordedGroup(NamedTuple):
    """A group, as its records say."""

    header: dict[str, Any]
    parts: list[list[TokenRun]]
    """Parts of each of its rollouts."""


class RecordedStep(NamedTuple):
    """A completed one."""

    lack: str = ""
    """Why it cannot be trained again; empty: it can."""
    state: ControllerState | None = None
    """State of the controller after the step; None: it was not read."""


class PendingGroups:
    """Groups that no step has taken yet, at a place of the journal."""

    def __init__(self) -> None:
        self.held = dict[int, dict[Key, list[TokenRun]]]()
        """Rollouts of groups that are not scored."""
        self.scored = dict[int, RecordedGroup]()
        self.firsts = dict[int, RecordOffset]()
        """Place of the first record of each."""

    def add(self, segment: int, record: Record) -> None:
        """Takes in the next record of the journal, which this file has."""
        header = record.header
        for group_id in header.get("groups", [header["group_id"]] if "group_id" in header else []):
            self.firsts.setdefault(group_id, RecordOffset(segment, record.start))
        if header["kind"] == "rollouts":
            for group_id, part in zip(header["groups"], record.parts, strict=True):
                held, key = self.held.setdefault(group_id, {}), (part.rollout.group_id, part.rollout.index)
                before = held.pop(key, [])
                if part.start <= (before[-1].stop if before else 0):
                    held[key] = [*before, part] if part.start else [part]
        elif header["kind"] == "group":
            group_id = header["group_id"]
            whole, held = dict(zip(header["places"], record.parts, strict=True)), self.held.get(group_id, {})
            parts = [
                [whole[place]] if place in whole else held.get((group_id, place), [])
                for place in range(len(header["tokens"]))
            ]
            self.scored.pop(group_id, None)
            if [of[-1].stop if of else -1 for of in parts] == header["tokens"]:
                self.scored[group_id] = RecordedGroup(header, parts)
                self.held.pop(group_id, None)

    def resolve(self, header: dict[str, Any]) -> None:
        """A step is completed: groups that it took, or that were dropped, are not asked for again."""
        for of in (self.held, self.scored, self.firsts):
            for group_id in over(of, header["groups"], header["state"]):
                del of[group_id]

    def forget_after(self, version: int) -> None:
        """Drops what weights newer than `version` sampled: it is not part of the run."""
        self.scored = {one: group for one, group in self.scored.items() if group.header["newest"] <= version}
        for held in self.held.values():
            for key in [key for key, parts in held.items() if newest_version([one.rollout for one in parts]) > version]:
                del held[key]


def over(group_ids: Iterable[int], taken: Sequence[int], state: ControllerState) -> list[int]:
    """Ids of these groups that a step has taken, or that were dropped by then; `state` is the one after it."""
    unconsumed = {one for one, _ in state["unconsumed"]}
    is_old = range(state["next_group_id"])
    return [one for one in group_ids if one in taken or (one in is_old and one not in unconsumed)]


GIVEN = "given"
"""Name, among the settings of a journal's file, of digests of the files that a run executes. They may change."""


class JournalWalk:
    """The journal of a run in the order of events, those that come later too: each is had once. A step that was taken
    back is not part of it. What is in memory are groups that no step has taken yet."""

    def __init__(self, folder: Path | None, begins: dict[int, int], at: RecordOffset, skips: Any = ()) -> None:
        """
        Args:
            folder: of the run.
            begins: version from which the run goes on in a file, by the file's number; others are not read.
            at: the place of the first record.
            skips: exceptions that cost a file and no more.
        """
        self._folder, self.begins, self.at, self._skips = folder, begins, at, skips
        self.pending = PendingGroups()
        """Groups that no step has taken, after what was had last."""
        self.ends = dict[int, int]()
        """Bytes of each file that could be read."""
        self.faults = dict[str, None]()
        """Sentences: files that cannot be read, and why."""

    def headers(self, numbers: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The first records of files that can be read, with their numbers."""
        for number in numbers:
            if record := next(self._records(number, 0, _BEGIN_BYTES), None):
                if record.header.get("format") == FORMAT:
                    yield number, record.header
                else:
                    path = segment_path(self._folder, number)
                    self.faults[f"{path} was written by another version of llamarl"] = None

    def _records(self, number: int, start: int, most: int = sys.maxsize) -> Iterator[Record]:
        try:
            yield from records(segment_path(self._folder, number), start, most)
        except self._skips as error:
            self.faults[f"{error.filename}: {error.strerror}"] = None

    def new(self, last: int = 1 << 62) -> Iterator[tuple[Record, list[RecordedGroup | None], RecordOffset]]:
        """Steps up to the `last`, with their groups, None for each that is not on record, and the place where these
        begin; and between them the weights that were published, without groups."""
        for number in sorted(number for number in self.begins if number >= self.at.segment):
            self.at = max(self.at, RecordOffset(number, 0))
            until = min([last, *(version for later, version in self.begins.items() if later > number)])
            for record in self._records(number, self.at.offset):
                self.at, header = RecordOffset(number, record.end), record.header
                self.ends[number] = record.end
                if not record.start:
                    self.pending.forget_after(self.begins[number])
                elif header["kind"] not in ("step", "published"):
                    self.pending.add(number, record)
                elif header["step"] <= until:
                    taken = header.get("groups", [])
                    firsts = [self.pending.firsts[one] for one in taken if one in self.pending.firsts]
                    groups = [self.pending.scored.get(one) for one in taken]
                    if header["kind"] == "step":
                        self.pending.resolve(header)
                    yield record, groups, min(firsts, default=RecordOffset(number, record.start))


class JournalReader:
    """Changes nothing."""

    def __init__(
        self,
        folder: Path | None,
        prompts: Sequence[Prompt],
        settings: Mapping[str, Any] | None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            folder: of the run; None: nothing is kept.
            prompts: that are trained on.
            settings: what rollouts and steps depend on.
            defaults: of settings, which they had when older code did not know them.
        """
        self._folder, self._prompts = folder, prompts
        self._saved: Sequence[int] = ()
        """Steps of kept checkpoints."""
        self._settings = json.loads(json.dumps(settings or {}))
        self._defaults = json.loads(json.dumps(defaults or {}))
        self._segment = self._size = 0
        """The newest file, and how much of it there is."""
        self.version = 0
        """Completed steps."""
        self.settings_since = 0, ""
        """The step from which on settings are what they are now, and the name of one that was another before."""
        self._steps = dict[int, RecordedStep]()
        """Completed steps since the oldest kept checkpoint, by number."""
        self._begins = dict[int, int]()
        """Version by file: what is newer when that file begins is not part of the run."""
        self._firsts = dict[int, int]()
        """The first file that it takes to go on after a step."""
        self._weights = dict[int, tuple[str, str]]()
        """Fingerprints of versions as generators served them, and of their tensors."""
        self._pending = PendingGroups()
        """When the run went on."""
        self.changed_setting: tuple[str, Any, Any] | None = None
        """A setting that is not what it was: its name, what it was, and what it is."""
        self.missing = ""
        """Why there are no more steps than `go_on` has found."""

    def resume(self, state: ControllerState | None) -> tuple[ControllerState | None, str]:
        """Reads what there is since the oldest kept checkpoint: the state after the last step that can be trained again
        from a checkpoint's `state` (None: from the beginning), and what cannot be used, in a sentence. Raises
        OSError."""
        start, position = state["step"] if state else 0, state.get("journal") if state else None
        faults, was = self._read_segments(position, self._first_needed({start, *self._saved}))
        reached, last = start, max(self._steps, default=start)
        if name := _first_other(was, self._settings):
            self.changed_setting = name, was.get(name), self._settings.get(name)
            faults.append(f"{name} is not what it was")
            self._forget_after(_NOTHING)
        while (lack := self._lack(reached + 1)) == "":
            reached += 1
        newest = segment_path(self._folder, self._segment)
        is_torn = not faults and reached == last and newest.exists() and newest.stat().st_size > self._size
        end = f"{segment_path(self._folder, self._segment)} was cut, or is damaged after byte {self._size}"
        self.missing = end if is_torn else "; ".join(faults) or lack
        self._forget_after(reached)
        walk = self._walk(self._firsts.get(reached, 0))
        for _ in walk.new(reached):
            pass
        self._pending = walk.pending
        self._pending.forget_after(_NOTHING if name else reached)
        if reached < last:
            said = f"steps {reached + 1} to {last} are done again: {'; '.join(faults) or lack}"
        else:
            said = f"some of what was generated is generated again: {'; '.join(faults)}" if faults else ""
        return (self._steps[reached].state if reached > start else state), said

    def steps_after(self, step: int) -> Iterator[tuple[int, list[RolloutGroup]]]:
        """The groups of each completed step after this one, in the order in which they were trained on; ends before one
        of which something is missing. Raises OSError."""
        if not self._lack(step + 1):
            for record, groups, _ in self._walk(self._firsts.get(step, 0)).new(self.version):
                if record.header["kind"] == "step" and record.header["step"] == step + 1:
                    step += 1
                    if len(whole := [self._group(one) for one in groups if one]) < len(groups):
                        raise OSError(errno.EIO, f"a group of step {step} is missing", str(self._folder))
                    yield step, whole
                    if self._lack(step + 1):
                        return

    def weights(self, version: int) -> tuple[str, str]:
        """Fingerprint, and those of the tensors, of a version as generators served it; empty: not on record."""
        return self._weights.get(version, ("", ""))

    def pop_generated(self, group_id: int) -> tuple[RolloutGroup | None, Mapping[Key, Rollout]]:
        """Hands out what was generated of a group before the run went on: all of it, scored, or some rollouts."""
        held, found = self._pending.held.pop(group_id, {}), self._pending.scored.pop(group_id, None)
        return self._group(found) if found else None, {key: whole(parts) for key, parts in held.items()}

    def _walk(self, first: int) -> JournalWalk:
        """From a file on."""
        return JournalWalk(self._folder, self._begins, RecordOffset(first, 0))

    def _group(self, one: RecordedGroup) -> RolloutGroup:
        return decoded_group(one.header, self._prompts[one.header["prompt"]], map(whole, one.parts))

    def _lack(self, number: int) -> str:
        """Why a step cannot be trained again; empty: it can."""
        return self._steps[number].lack if number in self._steps else f"step {number} is missing in the journal"

    def _first_needed(self, steps: set[int]) -> int:
        """The first file that it takes to go on after the first of these steps, by `journal.jsonl`; 0: not known."""
        if self._folder is None or not min(steps):
            return 0
        with suppress(OSError):
            for line in last_lines(self._folder / "journal.jsonl"):
                with suppress(ValueError, LookupError, TypeError):
                    row = json.loads(line)
                    if row["step"] <= min(steps) and "state" in row:
                        return row["state"]["journal"]["first"] if row["step"] == min(steps) else 0
        return 0

    def _read_segments(self, position: JournalPosition | None, first: int) -> tuple[list[str], dict[str, Any]]:
        """From a file on, what is damaged, and the settings of the newest. Raises OSError."""
        walk, was, expected = self._walk(0), self._settings, list[JournalPosition]()
        numbers = [number for number in segments(self._folder) if number >= first]
        for number, header in walk.headers(numbers):
            recorded = self._defaults | header["settings"]
            before, other = header["before"], _first_other(was, recorded)
            if other and number > numbers[0]:
                self.settings_since = header["version"], other
            is_next = number == numbers[0] or before["segment"] == self._segment
            self._begins[number] = header["version"] if is_next and not other else _NOTHING
            was, self._segment = recorded, number
            expected += [before] if number > (first or numbers[0]) else []
        if position and position["segment"] > self._segment:
            # From which version the run went on in the checkpoint's file is not known: what stands before may be of a
            # life that was taken back.
            self._begins.clear()
            expected.clear()
        expected += [position] if position and position["segment"] >= self._segment else []
        for record, groups, _ in walk.new():
            header, step = record.header, record.header["step"]
            if header["kind"] == "published":
                self._weights[step] = header["fingerprint"], header["tensors"]
                continue
            lacking = [one for one, found in zip(header["groups"], groups, strict=True) if not found]
            lack = f"group {lacking[0]} of step {step} is missing in the journal" if lacking else ""
            self._steps[step] = RecordedStep(lack, header["state"])
            self._firsts[step] = header["state"]["journal"]["first"]
        self._size = walk.ends.get(self._segment, 0)
        for said in expected:
            if (size := walk.ends.get(said["segment"], 0)) < said["bytes"]:
                path = segment_path(self._folder, said["segment"])
                walk.faults[f"{path} is missing, or damaged after byte {size}"] = None
        return [*walk.faults], was

    def _forget_after(self, version: int) -> None:
        """Later steps are not part of the run."""
        self.version = max(version, 0)
        for by_step in (self._steps, self._firsts, self._weights):
            for step in [one for one in by_step if one > version]:
                del by_step[step]


def segments(folder: Path | None) -> list[int]:
    """Numbers of the files, ascending."""
    found = folder.glob("journal/" + "[0-9]" * 8 + ".groups*") if folder else ()
    return sorted({int(path.name[:8]) for path in found})


def segment_path(folder: Path | None, number: int) -> Path:
    """Path of a file of the journal; compressed, it has `.gz` behind it."""
    return Path(folder or "", "journal", f"{number:08d}.groups")


def whole(parts: Sequence[TokenRun]) -> Rollout:
    """A rollout of its parts, in their order."""
    rollout = None
    for part in parts:
        rollout = joined(rollout, part.start, part.rollout)
    assert rollout is not None, "each part continues those before"
    return rollout


def _first_other(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Name of a setting that differs; empty: none does. One that is off need not have been known to older code."""
    names = (name for name in (*one, *other) if name != GIVEN)
    return next((name for name in names if (one.get(name) or None) != (other.get(name) or None)), "")
