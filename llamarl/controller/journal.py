"""`Journal`: what was generated and which groups each step took, so that a crash of the controller loses neither.

`journal/00000001.groups` and so on hold, in the order of events, rollouts as they are finished or parked, whole
groups as they are scored, and each completed step: its groups, the controller's state after it, its fingerprint.
A file begins with each checkpoint; those that no kept checkpoint needs are deleted. `journal.jsonl` has the steps for
good, for readers of the run.

Rollouts reach the system before anything is made of them, groups with the step that takes them or a second after they
were scored: killing the process loses nothing that was generated, at most some scores. With each checkpoint all of it
reaches the disk. A step is written before anybody has its weights: no recorded token is newer than the steps before.
A file begins with the version from which the run goes on there: what was recorded after that version before is void.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Literal, NamedTuple

from llamarl.controller.records import Record, decoded_group, encode, encode_group, joined, newest_version, records
from llamarl.executors.replies import ControllerState, JournalPosition
from llamarl.observability.files import sync
from llamarl.observability.metrics import Row
from llamarl.observability.sinks import RowLog
from llamarl.types import Prompt, Rollout, RolloutGroup

SEGMENT_BYTES = 256 << 20
"""From which on a file gets no more records."""
UNWRITTEN_S = 1.0
"""Scored groups wait for so long: writing many at once takes a fraction of the time."""
_NOTHING = -2
"""Older than a rollout without tokens."""
Key = tuple[int, int]
"""Group and index of a rollout; a greedy one has a group of its own."""


class _Place(NamedTuple):
    segment: int
    offset: int
    newest_version: int


class Journal:
    """What the disk refuses costs a warning, and what is said above up to the next checkpoint."""

    def __init__(
        self,
        folder: Path | None = None,
        warn: Callable[[str], None] = lambda text: None,
        *,
        prompts: Sequence[Prompt] = (),
        settings: Mapping[str, Any] | None = None,
        keep: int = 1,
        saved: Sequence[int] = (),
        keeps: Literal["resume", "all"] = "resume",
    ) -> None:
        """
        Args:
            folder: of the run; None: nothing is kept.
            prompts: that are trained on.
            settings: what rollouts and steps depend on.
            keep: checkpoints from which the run may have to go on.
            saved: steps of those that there are, ascending.
            keeps: every file, or those that may be needed.
        """
        self._folder, self._warn, self._prompts = folder, warn, prompts
        self._settings = json.loads(json.dumps(settings or {}))
        self._keep, self._saved, self._keeps = keep, list(saved)[-keep:], keeps
        self.seconds = 0.0
        """Spent on writing."""
        self._lines = RowLog(None, lambda failure: warn(str(failure)))
        """Opened by `begin`: who only reads changes nothing."""
        self._file: IO[bytes] | None = None
        """None before `begin`, and from a failure to the next checkpoint."""
        self._segment = self._size = 0
        self._told = False
        """Of the last failure."""
        self._unsynced = list[Path]()
        self.version = 0
        """Completed steps."""
        self._steps = dict[int, dict[str, Any]]()
        """Since the oldest kept checkpoint; with the controller's states, those that were read."""
        self._firsts = dict[int, int]()
        """The first file that it takes to go on after a step."""
        self._fingerprints, self._tensors = dict[int, str](), dict[int, str]()
        self._unwritten, self._unwritten_since_s = list[tuple[RolloutGroup, int]](), 0.0
        """Scored groups with the indices of their prompts."""
        self._scored = dict[int, _Place]()
        self._live = dict[int, tuple[int, dict[Key, int]]]()
        """Of groups that are not trained on yet: the first file with a part, and tokens of each rollout so far."""
        self._held = dict[int, dict[Key, Rollout]]()
        """Rollouts of groups that were not complete, as they were read."""

    # Writing

    def begin(self, version: int) -> None:
        """The run starts, or goes on after so many steps. Raises ConfigError: `journal.jsonl` is damaged."""
        if self._folder is not None:
            self._forget_after(version)
            self._lines = RowLog(self._folder / "journal.jsonl", lambda failure: self._warn(str(failure)))
            self._lines.drop_after(version)
            self.next_segment()

    def rollouts(self, rollouts: Sequence[tuple[int, Rollout]]) -> None:
        """These were finished or parked; each with the group that it is for."""
        if self._unwritten and perf_counter() - self._unwritten_since_s > UNWRITTEN_S:
            self._write_groups()
        new = list[tuple[int, int, Rollout]]()
        for group_id, one in rollouts if self._file else ():
            start = self._live[group_id][1].get((one.group_id, one.index), 0) if group_id in self._live else 0
            if one.num_tokens > start or one.finish_reason.is_final:
                new.append((group_id, start, one))
        header = {"kind": "rollouts", "groups": [group_id for group_id, _, _ in new]}
        if new and (place := self._append(lambda: encode(header, [(start, one) for _, start, one in new]))):
            for group_id, _, one in new:
                _, num_tokens = self._live.setdefault(group_id, (place[0], {}))
                num_tokens[one.group_id, one.index] = one.num_tokens

    def groups(self, groups: Iterable[RolloutGroup], prompt_of: Callable[[int], int]) -> None:
        """These are scored; `prompt_of` says the index of a group's prompt."""
        if not self._unwritten:
            self._unwritten_since_s = perf_counter()
        self._unwritten += [(group, prompt_of(group.group_id)) for group in groups] if self._file else ()

    def _write_groups(self) -> None:
        """Many at once: a write lets other threads have the interpreter, who may keep it for milliseconds."""
        groups, self._unwritten = self._unwritten, []
        newest, ends = list[int](), [0]

        def encoded() -> bytes:
            newest.extend(newest_version(group.rollouts) for group, _ in groups)
            parts = [encode_group(*one) for one in groups]
            ends.extend(accumulate(map(len, parts)))
            return b"".join(parts)

        if groups and (place := self._append(encoded)):
            segment, start = place
            for (group, _), version, offset in zip(groups, newest, ends, strict=False):
                self._scored[group.group_id] = _Place(segment, start + offset, version)
                self._live[group.group_id] = segment, {}

    def located(self, state: ControllerState) -> ControllerState:
        """`state` with what it takes to go on from there."""
        if self._folder is None:
            return state
        live = (self._live[group_id][0] for group_id, _ in state["unconsumed"] if group_id in self._live)
        first = self._firsts.setdefault(state["step"], min(live, default=self._segment))
        return {**state, "journal": {"first": first, "segment": self._segment, "bytes": self._size}}

    def step(self, group_ids: Sequence[int], state: ControllerState) -> None:
        """A step on these groups is completed, and nobody has its weights yet; `state` is the one after it."""
        self._write_groups()
        self.version = step = state["step"]
        row: dict[str, Any] = {"step": step, "groups": list(group_ids), "state": self.located(state)}
        if self._append(lambda: encode({"kind": "step"} | row)):
            self._steps[step] = {"groups": row["groups"]}
            self._lines.write(row)
        for group_id in group_ids:
            self._live.pop(group_id, None)

    def published(self, step: int, fingerprint: str, tensors: str = "") -> str:
        """The weights after this step, as generators serve them. What they were in the same step before, if others."""
        before = self._fingerprints.get(step, "")
        if fingerprint and fingerprint != before:
            self._fingerprints[step] = fingerprint
            row: Row = {"step": step, "fingerprint": fingerprint, "tensors": tensors}
            if self._append(lambda: encode({"kind": "published"} | row)):
                self._lines.write(row)
            return before
        return ""

    def next_segment(self) -> Sequence[Path]:
        """A checkpoint is begun. What is to be on the disk before it counts."""
        self._write_groups()
        unsynced, self._unsynced = self._unsynced, []
        if self._folder is None:
            return ()
        try:
            (self._folder / "journal").mkdir(exist_ok=True)
            self._begin_segment()
        except OSError as error:
            self.fail(error)
        return (*unsynced, self._folder / "journal.jsonl", self._folder / "journal", self._folder)

    def committed(self, step: int) -> None:
        """There is a checkpoint of this step: what none of the kept ones needs goes."""
        if self._folder is None:
            return
        self._saved = sorted({*(one for one in self._saved if one < step), step})[-self._keep :]
        first = min((self._firsts[one] for one in self._saved if one in self._firsts), default=0)
        for by_step in (self._steps, self._firsts, self._fingerprints, self._tensors):
            for old in [one for one in by_step if one < self._saved[0]]:
                del by_step[old]
        self._scored = {group_id: place for group_id, place in self._scored.items() if place.segment >= first}
        for number in self._segments() if self._keeps == "resume" else ():
            if number < first:
                with suppress(OSError):
                    self._path(number).unlink()

    def _append(self, encoded: Callable[[], bytes]) -> tuple[int, int] | None:
        """File and byte where it begins; None: it is not there."""
        if self._file is None:
            return None
        start_s, data = perf_counter(), encoded()
        place = self._segment, self._size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._size += len(data)
            if self._size > SEGMENT_BYTES:
                self._begin_segment()
        except OSError as error:
            self.fail(error)
            return None
        finally:
            self.seconds += perf_counter() - start_s
        return place

    def _begin_segment(self) -> None:
        """Raises OSError: the one before is as it was."""
        before = {"segment": self._segment, "bytes": self._size}
        path = self._path(self._segment + 1)
        data = encode({"kind": "begin", "version": self.version, "settings": self._settings, "before": before})
        try:
            path.write_bytes(data)
            file = path.open("ab", buffering=0)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._segment, self._size = file, self._segment + 1, len(data)
        self._unsynced.append(path)

    def fail(self, error: OSError) -> None:
        """Nothing more is written until the next checkpoint."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(self._size)
            self._file.close()
            self._file, self._told = None, False
        if not self._told:
            self._told = True
            self._warn(
                f"{self._folder}/journal keeps nothing until the next checkpoint ({error.strerror}), so a crash would "
                "cost what comes until then; make room on the disk"
            )

    def close(self) -> None:
        """At the end of the run."""
        self._write_groups()
        if self._file is not None:
            self._file.close()
        self._lines.close()

    # Reading

    def go_on(self, state: ControllerState | None) -> tuple[ControllerState | None, str]:
        """Reads what there is: the state after the last step that can be trained again from a checkpoint's `state`
        (None: from the beginning), and what cannot be used, in a sentence. Raises OSError."""
        start, position = state["step"] if state else 0, state.get("journal") if state else None
        faults, was = self._read_segments(position) if self._folder is not None else ([], self._settings)
        reached, last = start, max(self._steps, default=start)
        if was != self._settings:
            name = next(one for one in (*was, *self._settings) if was.get(one) != self._settings.get(one))
            faults.append(f"{name} is not what it was")
            self._forget_after(_NOTHING)
        while (lack := self._lacks(reached + 1)) == "":
            reached += 1
        self._forget_after(reached)
        if reached < last:
            said = f"steps {reached + 1} to {last} are done again: {'; '.join(faults) or lack}"
        else:
            said = f"some of what was generated is generated again: {'; '.join(faults)}" if faults else ""
        return (self._steps[reached]["state"] if reached > start else state), said

    def steps_after(self, step: int) -> Iterator[tuple[int, list[RolloutGroup]]]:
        """The groups of each completed step after this one, in the order in which they were trained on; ends before one
        of which something is missing. Raises OSError."""
        while not self._lacks(step + 1):
            step += 1
            yield step, [self._read_group(self._scored[group_id]) for group_id in self._steps[step]["groups"]]

    def weights(self, version: int) -> tuple[str, str]:
        """Fingerprint, and those of the tensors, of a version as generators served it; empty: not on record."""
        return self._fingerprints.get(version, ""), self._tensors.get(version, "")

    def has(self, step: int) -> bool:
        """`steps_after` will give this step, where it gives those before it."""
        return self._file is not None and not self._lacks(step)

    def kept(self, group_id: int) -> tuple[RolloutGroup | None, Mapping[Key, Rollout]]:
        """What was generated of a group before the run went on: all of it, scored, or some rollouts."""
        held = self._held.pop(group_id, {})
        if place := self._scored.get(group_id):
            with suppress(OSError):
                return self._read_group(place), held
        return None, held

    def _read_group(self, place: _Place) -> RolloutGroup:
        path = self._path(place.segment)
        for _, record in records(path, place.offset):
            return decoded_group(record, self._prompts[record.header["prompt"]])
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def _lacks(self, step: int) -> str:
        """Why a step cannot be trained again; empty: it can."""
        if step not in self._steps:
            return f"step {step} is missing in the journal"
        missing = [group_id for group_id in self._steps[step]["groups"] if group_id not in self._scored]
        return f"group {missing[0]} of step {step} is missing in the journal" if missing else ""

    def _read_segments(self, position: JournalPosition | None) -> tuple[list[str], dict[str, Any]]:
        """What is damaged, and the settings of the newest file. Raises OSError."""
        faults, numbers, was = list[str](), self._segments(), self._settings
        for number in numbers:
            for start, record in records(self._path(number)):
                if not start:
                    if number > numbers[0]:
                        faults += self._check_end(record.header["before"])
                    is_next = number in (numbers[0], self._segment + 1)
                    self._forget_after(
                        record.header["version"] if is_next and was == record.header["settings"] else _NOTHING
                    )
                    was, self._segment = record.header["settings"], number
                self._read(start, record)
                self._size = record.end
        faults += self._check_end(position) if position else ()
        return faults, was

    def _check_end(self, said: JournalPosition) -> list[str]:
        """Whether the file that was read last reaches as far as it did when something later was written."""
        if (said["segment"], said["bytes"]) <= (self._segment, self._size):
            return []
        return [f"{self._path(said['segment'])} is missing, or damaged after byte {self._size}"]

    def _read(self, start: int, record: Record) -> None:
        header = record.header
        if header["kind"] == "group":
            newest = newest_version([rollout for _, rollout in record.parts])
            self._scored[header["group_id"]] = _Place(self._segment, start, newest)
            self._held.pop(header["group_id"], None)
        elif header["kind"] == "rollouts":
            for group_id, (skipped, part) in zip(header["groups"], record.parts, strict=True):
                held, key = self._held.setdefault(group_id, {}), (part.group_id, part.index)
                if rollout := joined(held.pop(key, None), skipped, part):
                    held[key] = rollout
        elif header["kind"] == "step":
            self._steps[header["step"]] = header
            self._firsts[header["step"]] = header["state"]["journal"]["first"]
        elif header["kind"] == "published":
            self._fingerprints[header["step"]] = header["fingerprint"]
            self._tensors[header["step"]] = header.get("tensors", "")

    def _forget_after(self, version: int) -> None:
        """Later steps, and what weights sampled that came of them, are not part of the run."""
        self.version = max(version, 0)
        for by_step in (self._steps, self._firsts, self._fingerprints, self._tensors):
            for step in [one for one in by_step if one > version]:
                del by_step[step]
        self._scored = {one: place for one, place in self._scored.items() if place.newest_version <= version}
        for held in self._held.values():
            for key in [key for key, one in held.items() if newest_version([one]) > version]:
                del held[key]

    def _segments(self) -> list[int]:
        assert self._folder is not None
        return sorted(int(path.stem) for path in self._folder.glob("journal/" + "[0-9]" * 8 + ".groups"))

    def _path(self, segment: int) -> Path:
        assert self._folder is not None
        return self._folder / "journal" / f"{segment:08d}.groups"


def to_disk(paths: Sequence[Path]) -> None:
    """May take a while. Raises OSError."""
    for path in paths:
        with suppress(FileNotFoundError):
            sync(path)
