"""Reads the journal of a run, after the process that wrote it has ended or while it writes.

The record of a group holds what its rollouts' earlier records lack: rewards, values, the order. Tokens are in the
earlier records. So a journal is read in order, and memory holds only the groups that no step has taken yet and those of
one step.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llamarl.config.load import translated
from llamarl.executors.replies import ControllerState, JournalPosition
from llamarl.journal.records import Key, Record, TokenRun, decoded_group, joined, newest_version, records
from llamarl.observability.files import last_lines
from llamarl.types import Prompt, Rollout, RolloutGroup

FORMAT = 2
"""Version of the files' format. Files of another version are not read."""
GIVEN = "given"
"""Name, among the settings of a journal's file, of digests of the files that a run executes. They may change."""
_NOTHING = -2
"""Older than a rollout without tokens."""
_BEGIN_BYTES = 1 << 20
"""Longest first record of a file."""


class RecordOffset(NamedTuple):
    """Place of a record."""

    segment: int
    """Number of the file."""
    offset: int
    """Bytes from its beginning."""


BEGIN = RecordOffset(0, 0)


class RecordedGroup(NamedTuple):
    """A group as its records hold it."""

    header: dict[str, Any]
    parts: list[list[TokenRun]]
    """Parts of each rollout."""


class RecordedStep(NamedTuple):
    """A completed step."""

    missing: str = ""
    """Why it cannot be trained again, or an empty string."""
    state: ControllerState | None = None
    """State of the controller after the step; None means that this process wrote the step."""


class PendingGroups:
    """Groups that no step has taken yet, at some place of the journal."""

    def __init__(self) -> None:
        self.held = dict[int, dict[Key, list[TokenRun]]]()
        """Rollouts of groups that are not scored."""
        self.scored = dict[int, RecordedGroup]()
        self.firsts = dict[int, RecordOffset]()
        """Place of the first record of each group."""

    def add(self, segment: int, record: Record) -> None:
        """Adds the next record of the journal, from this file."""
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
            complete, held = dict(zip(header["places"], record.parts, strict=True)), self.held.get(group_id, {})
            parts = [
                [complete[place]] if place in complete else held.get((group_id, place), [])
                for place in range(len(header["tokens"]))
            ]
            self.scored.pop(group_id, None)
            if [runs[-1].stop if runs else -1 for runs in parts] == header["tokens"]:
                self.scored[group_id] = RecordedGroup(header, parts)
                self.held.pop(group_id, None)

    def resolve(self, header: dict[str, Any]) -> None:
        """Removes groups that a completed step took, and groups that were dropped by then."""
        for by_group in (self.held, self.scored, self.firsts):
            for group_id in consumed_or_dropped(by_group, header["groups"], header["state"]):
                del by_group[group_id]

    def forget_after(self, version: int) -> None:
        """Removes what weights newer than `version` sampled, which is not part of the run."""
        self.scored = {group_id: group for group_id, group in self.scored.items() if group.header["newest"] <= version}
        for held in self.held.values():
            newer = [key for key, parts in held.items() if newest_version([run.rollout for run in parts]) > version]
            for key in newer:
                del held[key]


def consumed_or_dropped(group_ids: Iterable[int], taken: Sequence[int], state: ControllerState) -> list[int]:
    """Returns the groups that a step has taken or that were dropped by then.

    Args:
        taken: groups of the step.
        state: state of the controller after it.
    """
    unconsumed = {group_id for group_id, _ in state["unconsumed"]}
    admitted = range(state["next_group_id"])
    return [
        group_id for group_id in group_ids if group_id in taken or (group_id in admitted and group_id not in unconsumed)
    ]


class JournalWalk:
    """The journal of a run in the order of events, each once, including later writes.

    A step that the run took back is not part of it.

    Example::

        walk = JournalWalk(folder, begins, BEGIN)
        for record, groups, place in walk.new():
            record.header["step"]
    """

    def __init__(self, folder: Path | None, begins: dict[int, int], at: RecordOffset, skips: Any = ()) -> None:
        """
        Args:
            folder: of the run.
            begins: version from which the run continues in a file, by number. Other files are not read.
            at: place of the first record to read.
            skips: exceptions that skip the rest of a file.
        """
        self._folder, self.begins, self.at, self._skips = folder, begins, at, skips
        self.pending = PendingGroups()
        """Groups that no step has taken by `at`."""
        self.ends = dict[int, int]()
        """Readable bytes of each file."""
        self.faults = dict[str, None]()
        """Sentences on files that cannot be read."""

    def headers(self, numbers: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields numbers and first records of the files that can be read."""
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
        """Yields the records of steps up to `last`, and of published weights, in order.

        With each step come its groups (None for each group that is not on record), and the place at which these begin.
        """
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
                    firsts = [self.pending.firsts[group_id] for group_id in taken if group_id in self.pending.firsts]
                    groups = [self.pending.scored.get(group_id) for group_id in taken]
                    if header["kind"] == "step":
                        self.pending.resolve(header)
                    yield record, groups, min(firsts, default=RecordOffset(number, record.start))


@dataclass(kw_only=True, slots=True)
class JournalIndex:
    """What the files of a journal hold. `JournalReader` fills it, and `Journal` keeps it up to date."""

    version: int = 0
    """Newest completed step that the journal knows."""
    segment: int = 0
    """Number of the newest file."""
    size: int = 0
    """Readable bytes of the newest file."""
    steps: dict[int, RecordedStep] = field(default_factory=dict)
    """Completed steps since the oldest kept checkpoint, by number."""
    begins: dict[int, int] = field(default_factory=dict)
    """Version from which the run continues in a file, by the file's number. Newer rollouts in earlier files are not
    part of the run."""
    firsts: dict[int, int] = field(default_factory=dict)
    """First file that is needed to continue after a step, by step."""
    weights: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Fingerprints of the weights that generators served, and of their tensors, by version."""

    def missing(self, step: int) -> str:
        """Returns why a step cannot be trained again, or an empty string."""
        return self.steps[step].missing if step in self.steps else f"step {step} is missing in the journal"

    def forget_after(self, version: int) -> None:
        """Removes later steps, which are not part of the run."""
        self.version = max(version, 0)
        for by_step in (self.steps, self.firsts, self.weights):
            for step in [step for step in by_step if step > version]:
                del by_step[step]

    def forget_before(self, version: int) -> None:
        """Removes earlier steps, from which no run continues."""
        for by_step in (self.steps, self.firsts, self.weights):
            for step in [step for step in by_step if step < version]:
                del by_step[step]


class JournalReader:
    """Reads the journal of a run, and writes nothing.

    Example::

        reader = JournalReader(folder, prompts, settings)
        state, warning = reader.resume(checkpoint_state)
        for step, groups in reader.steps_after(checkpoint_state["step"]):
            ...                                    # train on these groups again
        group, rollouts = reader.pop_generated(7)  # already generated, not trained on
    """

    def __init__(
        self,
        folder: Path | None,
        prompts: Sequence[Prompt] = (),
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        saved: Sequence[int] = (),
    ) -> None:
        """
        Args:
            folder: of the run; None means that nothing is kept.
            prompts: that are trained on.
            settings: settings on which rollouts and steps depend.
            defaults: values of settings that older code did not know.
            saved: steps of the kept checkpoints, ascending.
        """
        self.folder, self._prompts = folder, prompts
        self.saved: Sequence[int] = list(saved)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings or {}))
        self._defaults = json.loads(json.dumps(defaults or {}))
        self.index = JournalIndex()
        self.settings_since = 0, ""
        """Step from which on the settings are the current ones, and the name of a setting that differed before."""
        self.pending = PendingGroups()
        """Groups that were generated when the run continued, and that no step had taken."""
        self.changed_setting: tuple[str, Any, Any] | None = None
        """Name, old value and new value of a setting that has changed; None means that none has."""
        self.missing = ""
        """Why `resume` found no more steps."""

    def resume(self, state: ControllerState | None) -> tuple[ControllerState | None, str]:
        """Reads the journal since the oldest kept checkpoint.

        Args:
            state: of the checkpoint to resume from; None means the beginning of the run.

        Returns:
            The state after the last step that can be trained again, and a sentence on what cannot be used.

        Raises OSError.
        """
        start, position = state["step"] if state else 0, state.get("journal") if state else None
        faults, recorded = self._read_segments(position, self._first_needed({start, *self.saved}))
        index = self.index
        reached, last = start, max(index.steps, default=start)
        if name := _first_difference(recorded, self.settings):
            self.changed_setting = name, recorded.get(name), self.settings.get(name)
            faults.append(f"{name} is not what it was")
            index.forget_after(_NOTHING)
        while (missing := index.missing(reached + 1)) == "":
            reached += 1
        newest = segment_path(self.folder, index.segment)
        is_torn = not faults and reached == last and newest.exists() and newest.stat().st_size > index.size
        end = f"{newest} was cut, or is damaged after byte {index.size}"
        self.missing = end if is_torn else "; ".join(faults) or missing
        index.forget_after(reached)
        walk = self._walk(index.firsts.get(reached, 0))
        for _ in walk.new(reached):
            pass
        self.pending = walk.pending
        self.pending.forget_after(_NOTHING if name else reached)
        if reached < last:
            warning = f"steps {reached + 1} to {last} are done again: {'; '.join(faults) or missing}"
        else:
            warning = f"some of what was generated is generated again: {'; '.join(faults)}" if faults else ""
        return (index.steps[reached].state if reached > start else state), warning

    def steps_after(self, step: int) -> Iterator[tuple[int, list[RolloutGroup]]]:
        """Yields the number and the groups of each completed step after this one, in order, until a step that cannot be
        trained again. Raises OSError."""
        if not self.index.missing(step + 1):
            for record, groups, _ in self._walk(self.index.firsts.get(step, 0)).new(self.index.version):
                if record.header["kind"] == "step" and record.header["step"] == step + 1:
                    step += 1
                    if len(decoded := [self._decode(group) for group in groups if group]) < len(groups):
                        raise OSError(errno.EIO, f"a group of step {step} is missing", str(self.folder))
                    yield step, decoded
                    if self.index.missing(step + 1):
                        return

    def weights(self, version: int) -> tuple[str, str]:
        """Returns the fingerprint of a version, and those of its tensors, or empty strings if it is not on record."""
        return self.index.weights.get(version, ("", ""))

    def pop_generated(self, group_id: int) -> tuple[RolloutGroup | None, Mapping[Key, Rollout]]:
        """Hands out what was generated of a group before the run continued: the scored group, or some rollouts."""
        held, scored = self.pending.held.pop(group_id, {}), self.pending.scored.pop(group_id, None)
        return self._decode(scored) if scored else None, {key: joined_runs(parts) for key, parts in held.items()}

    def _walk(self, first: int) -> JournalWalk:
        return JournalWalk(self.folder, self.index.begins, RecordOffset(first, 0))

    def _decode(self, group: RecordedGroup) -> RolloutGroup:
        return decoded_group(group.header, self._prompts[group.header["prompt"]], map(joined_runs, group.parts))

    def _first_needed(self, steps: set[int]) -> int:
        """Returns the first file that is needed to continue after the first of these steps, by `journal.jsonl`, or 0 if
        that is unknown."""
        if self.folder is None or not min(steps):
            return 0
        with suppress(OSError):
            for line in last_lines(self.folder / "journal.jsonl"):
                with suppress(ValueError, LookupError, TypeError):
                    row = json.loads(line)
                    if row["step"] <= min(steps) and "state" in row:
                        return row["state"]["journal"]["first"] if row["step"] == min(steps) else 0
        return 0

    def _read_segments(self, position: JournalPosition | None, first: int) -> tuple[list[str], dict[str, Any]]:
        """Reads the files from `first` on. Returns sentences on damage, and the settings of the newest file. Raises
        OSError."""
        index, walk, newest, expected = self.index, self._walk(0), self.settings, list[JournalPosition]()
        numbers = [number for number in segments(self.folder) if number >= first]
        for number, header in walk.headers(numbers):
            recorded = self._defaults | translated(header["settings"])
            before, changed = header["before"], _first_difference(newest, recorded)
            if changed and number > numbers[0]:
                self.settings_since = header["version"], changed
            is_next = number == numbers[0] or before["segment"] == index.segment
            index.begins[number] = header["version"] if is_next and not changed else _NOTHING
            newest, index.segment = recorded, number
            expected += [before] if number > (first or numbers[0]) else []
        if position and position["segment"] > index.segment:
            # The first record of the checkpoint's file is lost, so it is unknown which steps were taken back there.
            index.begins.clear()
            expected.clear()
        expected += [position] if position and position["segment"] >= index.segment else []
        for record, groups, _ in walk.new():
            header, step = record.header, record.header["step"]
            if header["kind"] == "published":
                index.weights[step] = header["fingerprint"], header["tensors"]
                continue
            lost = [group_id for group_id, group in zip(header["groups"], groups, strict=True) if not group]
            missing = f"group {lost[0]} of step {step} is missing in the journal" if lost else ""
            index.steps[step] = RecordedStep(missing, header["state"])
            index.firsts[step] = header["state"]["journal"]["first"]
        index.size = walk.ends.get(index.segment, 0)
        for place in expected:
            if (size := walk.ends.get(place["segment"], 0)) < place["bytes"]:
                path = segment_path(self.folder, place["segment"])
                walk.faults[f"{path} is missing, or damaged after byte {size}"] = None
        return [*walk.faults], newest


def segments(folder: Path | None) -> list[int]:
    """Returns the numbers of the files, ascending."""
    paths = folder.glob("journal/" + "[0-9]" * 8 + ".groups*") if folder else ()
    return sorted({int(path.name[:8]) for path in paths})


def segment_path(folder: Path | None, number: int) -> Path:
    """Returns the path of a file of the journal, without the `.gz` of a compressed one."""
    return Path(folder or "", "journal", f"{number:08d}.groups")


def joined_runs(parts: Sequence[TokenRun]) -> Rollout:
    """Joins the parts of a rollout, in order."""
    rollout = None
    for part in parts:
        rollout = joined(rollout, part.start, part.rollout)
    assert rollout is not None, "each part continues those before"
    return rollout


def _first_difference(settings: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Returns the name of a setting that differs, or an empty string. Older code need not know a setting that is
    off."""
    names = (name for name in (*settings, *others) if name != GIVEN)
    return next((name for name in names if (settings.get(name) or None) != (others.get(name) or None)), "")
