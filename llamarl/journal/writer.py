"""Writes the journal of a run, so that a crash of the controller loses no rollout and no step.

`journal/00000001.groups` and so on hold the events in order: finished or parked rollouts, scored groups, and completed
steps. A step has its groups and the controller's state after it. The fingerprint of its weights follows in a record of
its own, once they are published. Each checkpoint begins a file.
Earlier files are kept and compressed, or deleted once no checkpoint needs them. `journal.jsonl` keeps all steps, for
readers of the run. `records.py` has the format.

Rollouts are written before anything else uses them. Groups are written with the step that takes them, or a second
after they were scored. So killing the process loses at most some scores. Each checkpoint brings all of it to the disk.
A step is written before rollouts that its weights sampled, so no recorded token is newer than the recorded steps. The
first record of a file has the version from which the run continues there; newer rollouts in earlier files are void.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Literal

import numpy as np

from llamarl.config import open_own
from llamarl.executors.replies import ControllerState
from llamarl.journal.reader import (
    FORMAT,
    JournalReader,
    RecordedStep,
    consumed_or_dropped,
    segment_path,
    segments,
)
from llamarl.journal.records import Arrays, Key, encode, encode_group, encode_step, frames
from llamarl.observability.files import compress, remedy, sync
from llamarl.observability.metrics import Row
from llamarl.observability.sinks import LAST_PIECE_S, RowLog
from llamarl.training.result import PolicyStepResult
from llamarl.types import Rollout, RolloutGroup

SEGMENT_BYTES = 256 << 20
"""Size from which on a file gets no more records."""
UNWRITTEN_S = 1.0
"""Time for which scored groups wait to be written together, which takes a fraction of the time."""


@dataclass(slots=True)
class _OpenGroup:
    """A group that no step has taken yet."""

    first: int
    """First file with a part of it."""
    rollouts: dict[Key, Rollout] = field(default_factory=dict)
    """Rollouts on record, until the group is scored."""
    scored: tuple[RolloutGroup, int] | None = None
    """The scored group, and the index of its prompt."""


class Journal:
    """Records rollouts, groups and steps, and gives them back when the run resumes (`JournalReader`).

    If a write fails, the journal warns, and writes nothing until the disk accepts a step or a checkpoint again. Then it
    writes all groups again that no step has taken. Its promises hold from the next checkpoint on; steps in between are
    lost.

    Example::

        journal = Journal(JournalReader(folder, prompts, settings), telemetry.warn)
        state, warning = journal.resume(checkpoint_state)
        journal.begin(version)
        journal.rollouts([(group_id, rollout)])
        journal.groups(scored, admission.prompt_of)
        journal.step(group_ids, state)
    """

    def __init__(
        self,
        reader: JournalReader | None = None,
        warn: Callable[[str], None] = lambda text: None,
        *,
        keep: int = 1,
        keeps: Literal["resume", "all"] = "resume",
    ) -> None:
        """
        Args:
            reader: reads the journal of the same folder; None means that nothing is kept.
            keep: number of checkpoints from which the run may have to resume.
            keeps: all files, or only the files that a resume may need.
        """
        self.reader = reader or JournalReader(None)
        self._folder, self._index = self.reader.folder, self.reader.index
        self._warn, self._keep, self._saved, self._keeps = warn, keep, list(self.reader.saved)[-keep:], keeps
        self.seconds = 0.0
        """Seconds spent on writing."""
        self._lines = RowLog(None, lambda failure: warn(str(failure)))
        """Opened by `begin`, so that a journal that is only read changes nothing."""
        self._file: IO[bytes] | None = None
        """None before `begin`, and after a failure until the disk accepts a step or a checkpoint."""
        self._has_warned = False
        """Whether the user knows of a failure after which the journal has not continued yet."""
        self._recorded = 0
        """Last step that was written."""
        self._routes_bytes = 0
        """Size of the file of recorded experts."""
        self._unsynced = list[Path]()
        self._completed = deque[tuple[Sequence[int], ControllerState, PolicyStepResult]]()
        """Steps to write before anything newer."""
        self._unwritten, self._unwritten_since_s = list[tuple[RolloutGroup, int]](), 0.0
        """Scored groups to write, with the indices of their prompts."""
        self._open = dict[int, _OpenGroup]()
        """Groups that no step has taken, by id. While there is a file, they are on record."""
        self._compressing = threading.Thread()
        self._compressing.start()

    # Reading

    @property
    def version(self) -> int:
        """Newest completed step that the journal knows."""
        return self._index.version

    def resume(self, state: ControllerState | None) -> tuple[ControllerState | None, str]:
        """Reads the journal (`JournalReader.resume`)."""
        return self.reader.resume(state)

    def steps_after(self, step: int) -> Iterator[tuple[int, list[RolloutGroup]]]:
        """Yields the groups of later steps (`JournalReader.steps_after`)."""
        return self.reader.steps_after(step)

    def pop_generated(self, group_id: int) -> tuple[RolloutGroup | None, Mapping[Key, Rollout]]:
        """Hands out what was generated of a group (`JournalReader.pop_generated`)."""
        return self.reader.pop_generated(group_id)

    def has(self, step: int) -> bool:
        """Whether `steps_after` will yield this step, if it yields the earlier ones."""
        return self._file is not None and not self._index.missing(step)

    # Writing

    def begin(self, version: int) -> None:
        """Begins to write, after `version` completed steps. Raises ConfigError if `journal.jsonl` is damaged."""
        if self._folder is not None:
            self._index.forget_after(version)
            self.reader.pending.forget_after(version)
            self._lines = RowLog(self._folder / "journal.jsonl", lambda failure: self._warn(str(failure)))
            self._lines.drop_after(version)
            self._recorded = version
            self.next_segment()

    def rollouts(self, rollouts: Sequence[tuple[int, Rollout]]) -> None:
        """Writes rollouts that were finished or parked, each with the id of its group."""
        self.write_steps()
        self.write_overdue()
        new = list[tuple[int, int, Rollout]]()
        for group_id, rollout in rollouts if self._folder else ():
            group = self._open.get(group_id)
            before = group.rollouts.get((rollout.group_id, rollout.index)) if group else None
            start = min(_num_final(before), rollout.num_tokens) if before else 0  # a FAILED one has lost its tokens
            if rollout.num_tokens > start or rollout.finish_reason.is_final:
                new.append((group_id, start, rollout))
        header, segment = {"kind": "rollouts", "groups": [group_id for group_id, _, _ in new]}, self._index.segment
        if new:
            self._append(lambda routes: encode(header, [(start, rollout) for _, start, rollout in new], routes=routes))
            for group_id, _, rollout in new:
                group = self._open.setdefault(group_id, _OpenGroup(segment))
                group.rollouts[rollout.group_id, rollout.index] = rollout

    def groups(self, groups: Iterable[RolloutGroup], prompt_of: Callable[[int], int]) -> None:
        """Takes scored groups, to be written soon.

        Args:
            prompt_of: returns the index of a group's prompt.
        """
        if not self._unwritten:
            self._unwritten_since_s = perf_counter()
        self._unwritten += [(group, prompt_of(group.group_id)) for group in groups] if self._folder else ()

    def write_overdue(self) -> None:
        """Writes scored groups that have waited for `UNWRITTEN_S`. The score loop calls this in time."""
        if self._unwritten and perf_counter() - self._unwritten_since_s >= UNWRITTEN_S:
            self._write_groups()

    def _write_groups(self, last: bytes = b"") -> bool:
        """Writes the waiting groups, and one more record. Returns whether all was written.

        One write is better than many: each lets other threads take the interpreter for milliseconds.
        """
        groups, self._unwritten = self._unwritten, []
        opened = [self._open.setdefault(group.group_id, _OpenGroup(self._index.segment)) for group, _ in groups]
        keeps_all = self._keeps == "all"

        def encoded(routes: Arrays) -> bytes:
            pairs = zip(groups, opened, strict=True)
            parts = (encode_group(*pair, group.rollouts, routes, has_prompt=keeps_all) for pair, group in pairs)
            return b"".join([*parts, last])

        is_written = bool(groups or last) and self._append(encoded)
        for pair, group in zip(groups, opened, strict=True):
            group.scored, group.rollouts = pair, {}
        return is_written

    def with_position(self, state: ControllerState) -> ControllerState:
        """Returns `state` with the place of the journal that a resumed run needs."""
        if self._folder is None:
            return state
        index = self._index
        files = (self._open[group_id].first for group_id, _ in state["unconsumed"] if group_id in self._open)
        first = index.firsts.setdefault(state["step"], min(files, default=index.segment))
        return {**state, "journal": {"first": first, "segment": index.segment, "bytes": index.size}}

    def queue_step(self, group_ids: Sequence[int], state: ControllerState, result: PolicyStepResult) -> None:
        """Queues a completed step. `write_steps` writes it, at the latest before newer rollouts."""
        self._completed.append((group_ids, state, result))

    def write_steps(self) -> None:
        """Writes queued steps."""
        while self._completed:
            self.step(*self._completed.popleft())

    def step(self, group_ids: Sequence[int], state: ControllerState, result: PolicyStepResult | None = None) -> None:
        """Writes a completed step, before any rollout that its weights sampled.

        Args:
            state: state of the controller after the step.
            result: written if the journal keeps all.
        """
        if self._folder and self._file is None:
            self._begin_file()
        self._index.version = step = state["step"]
        row: dict[str, Any] = {"step": step, "groups": list(group_ids), "state": self.with_position(state)}
        if self._write_groups(encode_step(row, result if self._keeps == "all" else None)):
            self._index.steps[step] = RecordedStep()
            self._lines.write(row)
            self._warn_of_missing("continues", step - 1)
            self._recorded = step
        for group_id in consumed_or_dropped(self._open, group_ids, state):
            del self._open[group_id]

    def published(self, step: int, fingerprint: str, tensors: str = "") -> str:
        """Writes the fingerprint of the weights after this step. Returns the earlier fingerprint of the same step, if
        it differs, or an empty string."""
        before, _ = self.reader.weights(step)
        if fingerprint and fingerprint != before:
            self._index.weights[step] = fingerprint, tensors
            row: Row = {"step": step, "fingerprint": fingerprint, "tensors": tensors}
            if self._append(lambda _: encode({"kind": "published"} | row)):
                self._lines.write(row)
            return before
        return ""

    def next_segment(self) -> Sequence[Path]:
        """Begins a file for a checkpoint. Returns the paths that must be on the disk before the checkpoint counts."""
        self.write_steps()
        self._write_groups()
        unsynced, self._unsynced = self._unsynced, []
        if self._folder is None:
            return ()
        self._begin_file()
        return (*unsynced, self._folder / "journal.jsonl", self._folder / "journal", self._folder)

    def _begin_file(self) -> None:
        """Begins a file. After a failure, writes all groups again that no step has taken: they may not be on the
        disk."""
        has_failed = self._file is None
        try:
            self._begin_segment()
        except OSError as error:
            self.fail(error)
        if has_failed:
            opened, self._open = self._open, {}
            self._unwritten = [*(group.scored for group in opened.values() if group.scored), *self._unwritten]
            unscored = ((group_id, group) for group_id, group in opened.items() if not group.scored)
            self.rollouts([(group_id, part) for group_id, group in unscored for part in group.rollouts.values()])
            self._write_groups()

    def committed(self, step: int) -> None:
        """Notes a complete checkpoint. Deletes what no kept checkpoint needs."""
        if self._folder is None:
            return
        self._saved = sorted({*(saved for saved in self._saved if saved < step), step})[-self._keep :]
        first = min((self._index.firsts.get(saved, 0) for saved in self._saved), default=0)
        self._index.forget_before(self._saved[0])
        if self._keeps == "all":
            self._compress(self._index.segment)
            return
        for number in segments(self._folder):
            if number < first:
                with suppress(OSError):
                    for path in _files(self._folder, number):
                        path.unlink(missing_ok=True)
                        path.with_name(f"{path.name}.gz").unlink(missing_ok=True)

    def _compress(self, end: int) -> None:
        """Compresses files before this one in a thread. Does nothing while that thread runs; the next call does it."""
        if not self._compressing.is_alive():
            numbers = [number for number in segments(self._folder) if number < end]
            paths = [path for number in numbers for path in _files(self._folder, number) if path.exists()]
            self._compressing = threading.Thread(target=lambda: [*map(compress, paths)], name="compress", daemon=True)
            self._compressing.start()

    def _append(self, encoded: Callable[[Arrays], bytes]) -> bool:
        """Appends a record. Returns whether it was written."""
        if self._file is None:
            return False
        routes = Arrays()
        start_s, data, is_written = perf_counter(), encoded(routes), False
        try:
            self._append_routes(routes)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._index.size += len(data)
            is_written = True
            if self._index.size + self._routes_bytes > SEGMENT_BYTES:
                self._begin_segment()
        except OSError as error:
            self.fail(error)
        self.seconds += perf_counter() - start_s
        return is_written

    def _append_routes(self, routes: Arrays) -> None:
        """Appends recorded experts, before the rollouts that name them. Raises OSError."""
        if routes:
            with open_own(_files(self._folder, self._index.segment)[1], "ab") as file:
                file.writelines(frames(routes))
                self._routes_bytes = file.tell()

    def _begin_segment(self) -> None:
        """Begins a file. Raises OSError, after which the previous file is unchanged."""
        index = self._index
        before = {"segment": index.segment, "bytes": index.size}
        number = max([index.segment, *segments(self._folder)]) + 1  # files that cannot be read stay
        path = segment_path(self._folder, number)
        header = {"kind": "begin", "format": FORMAT, "version": index.version, "settings": self.reader.settings}
        data = encode(header | {"before": before})
        path.parent.mkdir(exist_ok=True)
        try:
            with open_own(path, "xb") as created:
                created.write(data)
            file = open_own(path, "ab", buffering=0)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._routes_bytes = file, 0
        index.segment, index.size, index.begins[number] = number, len(data), index.version
        self._unsynced += _files(self._folder, number)

    def fail(self, error: OSError) -> None:
        """Stops writing until the disk accepts it again, and warns once."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(self._index.size)
            self._file.close()
            self._file = None
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self._folder}/journal keeps nothing until it can be written ({error.strerror}), so a crash would "
                f"lose what comes before the checkpoint after that; {remedy(error)}"
            )

    def _warn_of_missing(self, how: str, last: int) -> None:
        if self._has_warned and last > self._recorded:
            steps = f"steps {self._recorded + 1} to {last}, which could not be written"
            self._warn(f"{self._folder}/journal {how} without {steps}; their rollouts are lost")
        self._has_warned = False

    def close(self) -> None:
        """Writes the rest at the end of the run, and closes the files."""
        self.write_steps()
        self._write_groups()
        self._warn_of_missing("ends", self._index.version)
        self._lines.close()
        if self._file is not None:
            self._file.close()
            self._compressing.join(LAST_PIECE_S)
            if self._keeps == "all" and not self._compressing.is_alive():
                self._compress(self._index.segment + 1)
                self._compressing.join(LAST_PIECE_S)


def _files(folder: Path | None, number: int) -> tuple[Path, Path]:
    path = segment_path(folder, number)
    return path, path.with_suffix(".routes")


def _num_final(before: Rollout) -> int:
    """Returns the number of tokens on record that are complete. Recorded experts of the last tokens of an environment
    arrive with its next prefill."""
    if "routes" not in before.columns or before.is_sampled_T[-1:].all():
        return before.num_tokens
    return int((np.flatnonzero(before.is_sampled_T)[-1:] + 1).sum())


def to_disk(paths: Sequence[Path]) -> None:
    """Flushes files and folders to the disk, which may take long. Raises OSError."""
    for path in paths:
        with suppress(FileNotFoundError):
            sync(path)
