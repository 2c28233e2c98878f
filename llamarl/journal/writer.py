"""`Journal`: what was generated and which groups each step took, so that a crash of the controller loses neither.

`journal/00000001.groups` and so on hold, in the order of events, rollouts as they are finished or parked, what makes
them groups as these are scored, and each completed step: its groups, the controller's state after it, its fingerprint.
A file begins with each checkpoint; those before it are kept and compressed, or deleted once no checkpoint needs them.
`journal.jsonl` has the steps for good, for readers of the run.

Rollouts reach the system before anything is made of them, groups with the step that takes them or a second after they
were scored: killing the process loses nothing that was generated, at most some scores. With each checkpoint all of it
reaches the disk. A step is written before anybody has its weights: no recorded token is newer than the steps before.
A file begins with the version from which the run goes on there: what was recorded after that version before is void.
Experts that were recorded with the tokens of a mixture have files of their own (`route_files.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Literal

import numpy as np

from llamarl.config import open_own
from llamarl.executors.replies import ControllerState
from llamarl.journal.reader import FORMAT, JournalReader, RecordedStep, over, segment_path, segments
from llamarl.journal.records import Arrays, Key, encode, encode_group, encode_step, frames
from llamarl.observability.files import compress, remedy, sync
from llamarl.observability.metrics import Row
from llamarl.observability.sinks import LAST_PIECE_S, RowLog
from llamarl.training.result import PolicyStepResult
from llamarl.types import Prompt, Rollout, RolloutGroup

SEGMENT_BYTES = 256 << 20
"""Size in bytes from which on a file gets no more records."""
UNWRITTEN_S = 1.0
"""Scored groups wait for so long: writing many at once takes a fraction of the time."""


@dataclass(slots=True)
class _Live:
    """A group that no step has taken yet."""

    first: int
    """The first file with a part of it."""
    rollouts: dict[Key, Rollout] = field(default_factory=dict)
    """So far, until it is scored."""
    scored: tuple[RolloutGroup, int] | None = None
    """All of it, with the index of its prompt."""


class Journal(JournalReader):
    """Writes what `JournalReader` reads. If the disk refuses, that costs two warnings, and steps until there is room;
    then all is written again that no step has taken. What the journal promises holds from the next checkpoint on."""

    def __init__(
        self,
        folder: Path | None = None,
        warn: Callable[[str], None] = lambda text: None,
        *,
        prompts: Sequence[Prompt] = (),
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        keep: int = 1,
        saved: Sequence[int] = (),
        keeps: Literal["resume", "all"] = "resume",
    ) -> None:
        """
        Args:
            folder: of the run; None: nothing is kept.
            prompts: that are trained on.
            settings: what rollouts and steps depend on.
            defaults: of settings, which they had when older code did not know them.
            keep: checkpoints from which the run may have to go on.
            saved: steps of those that there are, ascending.
            keeps: every file, or those that may be needed.
        """
        super().__init__(folder, prompts, settings, defaults)
        self._warn, self._keep, self._saved, self._keeps = warn, keep, list(saved)[-keep:], keeps
        self.seconds = 0.0
        """Seconds spent on writing."""
        self._lines = RowLog(None, lambda failure: warn(str(failure)))
        """Opened by `begin`: who only reads changes nothing."""
        self._file: IO[bytes] | None = None
        """None before `begin`, and from a failure to the next step or checkpoint for which there is room."""
        self._told = False
        """Whether a failure has been told, and not yet that the journal goes on."""
        self._recorded = 0
        """The last step on record."""
        self._routes_bytes = 0
        """Size of the file of recorded experts."""
        self._unsynced = list[Path]()
        self._completed = deque[tuple[Sequence[int], ControllerState, PolicyStepResult]]()
        """Steps that are to be written before anything newer."""
        self._unwritten, self._unwritten_since_s = list[tuple[RolloutGroup, int]](), 0.0
        """Scored groups with the indices of their prompts."""
        self._live = dict[int, _Live]()
        """Groups that no step has taken, by id. While there is a file, they are on record."""
        self._compressing = threading.Thread()
        self._compressing.start()

    def begin(self, version: int) -> None:
        """The run starts, or goes on after so many steps. Raises ConfigError: `journal.jsonl` is damaged."""
        if self._folder is not None:
            self._forget_after(version)
            self._pending.forget_after(version)
            self._lines = RowLog(self._folder / "journal.jsonl", lambda failure: self._warn(str(failure)))
            self._lines.drop_after(version)
            self._recorded = version
            self.next_segment()

    def rollouts(self, rollouts: Sequence[tuple[int, Rollout]]) -> None:
        """Records rollouts that were finished or parked, each with the group that it is for."""
        self.write_steps()
        self.write_overdue()
        new = list[tuple[int, int, Rollout]]()
        for group_id, one in rollouts if self._folder else ():
            live = self._live.get(group_id)
            before = live.rollouts.get((one.group_id, one.index)) if live else None
            start = min(_told(before), one.num_tokens) if before else 0  # one that FAILED has none any more
            if one.num_tokens > start or one.finish_reason.is_final:
                new.append((group_id, start, one))
        header, segment = {"kind": "rollouts", "groups": [group_id for group_id, _, _ in new]}, self._segment
        if new:
            self._append(lambda routes: encode(header, [(start, one) for _, start, one in new], routes=routes))
            for group_id, _, one in new:
                self._live.setdefault(group_id, _Live(segment)).rollouts[one.group_id, one.index] = one

    def groups(self, groups: Iterable[RolloutGroup], prompt_of: Callable[[int], int]) -> None:
        """Takes scored groups; `prompt_of` says the index of a group's prompt."""
        if not self._unwritten:
            self._unwritten_since_s = perf_counter()
        self._unwritten += [(group, prompt_of(group.group_id)) for group in groups] if self._folder else ()

    def write_overdue(self) -> None:
        """Scored groups that have waited for long enough; `UNWRITTEN_S` after each somebody calls this."""
        if self._unwritten and perf_counter() - self._unwritten_since_s >= UNWRITTEN_S:
            self._write_groups()

    def _write_groups(self, last: bytes = b"") -> bool:
        """Writes groups that wait, and one more record; whether all is there. Many at once: a write lets other threads
        have the interpreter, who may keep it for milliseconds."""
        groups, self._unwritten = self._unwritten, []
        live = [self._live.setdefault(group.group_id, _Live(self._segment)) for group, _ in groups]
        keeps_all = self._keeps == "all"

        def encoded(routes: Arrays) -> bytes:
            of_groups = zip(groups, live, strict=True)
            made = (encode_group(*one, of.rollouts, routes, has_prompt=keeps_all) for one, of in of_groups)
            return b"".join([*made, last])

        is_there = bool(groups or last) and self._append(encoded)
        for one, of in zip(groups, live, strict=True):
            of.scored, of.rollouts = one, {}
        return is_there

    def with_position(self, state: ControllerState) -> ControllerState:
        """`state` with what it takes to go on from there."""
        if self._folder is None:
            return state
        live = (self._live[group_id].first for group_id, _ in state["unconsumed"] if group_id in self._live)
        first = self._firsts.setdefault(state["step"], min(live, default=self._segment))
        return {**state, "journal": {"first": first, "segment": self._segment, "bytes": self._size}}

    def queue_step(self, group_ids: Sequence[int], state: ControllerState, result: PolicyStepResult) -> None:
        """Has `step` called a bit later: before rollouts that come after it, or when somebody calls `write_steps`."""
        self._completed.append((group_ids, state, result))

    def write_steps(self) -> None:
        """Completed steps that are to be written soon."""
        while self._completed:
            self.step(*self._completed.popleft())

    def step(self, group_ids: Sequence[int], state: ControllerState, result: PolicyStepResult | None = None) -> None:
        """A step on these groups is completed, and nobody has its weights yet; `state` is the one after it. What came
        of it is kept where everything is."""
        if self._folder and self._file is None:
            self._begin_file()
        self.version = step = state["step"]
        row: dict[str, Any] = {"step": step, "groups": list(group_ids), "state": self.with_position(state)}
        if self._write_groups(encode_step(row, result if self._keeps == "all" else None)):
            self._steps[step] = RecordedStep()
            self._lines.write(row)
            self._tell_missing("goes on", step - 1)
            self._recorded = step
        for group_id in over(self._live, group_ids, state):
            del self._live[group_id]

    def published(self, step: int, fingerprint: str, tensors: str = "") -> str:
        """The weights after this step, as generators serve them. What they were in the same step before, if others."""
        before, _ = self.weights(step)
        if fingerprint and fingerprint != before:
            self._weights[step] = fingerprint, tensors
            row: Row = {"step": step, "fingerprint": fingerprint, "tensors": tensors}
            if self._append(lambda _: encode({"kind": "published"} | row)):
                self._lines.write(row)
            return before
        return ""

    def has(self, step: int) -> bool:
        """`steps_after` will give this step, where it gives those before it."""
        return self._file is not None and not self._lack(step)

    def next_segment(self) -> Sequence[Path]:
        """A checkpoint is begun. What is to be on the disk before it counts."""
        self.write_steps()
        self._write_groups()
        unsynced, self._unsynced = self._unsynced, []
        if self._folder is None:
            return ()
        self._begin_file()
        return (*unsynced, self._folder / "journal.jsonl", self._folder / "journal", self._folder)

    def _begin_file(self) -> None:
        """Goes on in another file, after a failure with all that no step has taken: it may not be on the disk."""
        has_failed = self._file is None
        try:
            self._begin_segment()
        except OSError as error:
            self.fail(error)
        if has_failed:
            live, self._live = self._live, {}
            self._unwritten = [*(of.scored for of in live.values() if of.scored), *self._unwritten]
            self.rollouts([(one, part) for one, of in live.items() if not of.scored for part in of.rollouts.values()])
            self._write_groups()

    def committed(self, step: int) -> None:
        """There is a checkpoint of this step: what none of the kept ones needs goes."""
        if self._folder is None:
            return
        self._saved = sorted({*(one for one in self._saved if one < step), step})[-self._keep :]
        first = min((self._firsts.get(one, 0) for one in self._saved), default=0)
        for by_step in (self._steps, self._firsts, self._weights):
            for old in [one for one in by_step if one < self._saved[0]]:
                del by_step[old]
        if self._keeps == "all":
            self._compress(self._segment)
            return
        for number in segments(self._folder):
            if number < first:
                with suppress(OSError):
                    for path in _files(self._folder, number):
                        path.unlink(missing_ok=True)
                        path.with_name(f"{path.name}.gz").unlink(missing_ok=True)

    def _compress(self, end: int) -> None:
        """Files before this one, beside everything else. While others are, nothing: the next time does it."""
        if not self._compressing.is_alive():
            numbers = [number for number in segments(self._folder) if number < end]
            paths = [path for number in numbers for path in _files(self._folder, number) if path.exists()]
            self._compressing = threading.Thread(target=lambda: [*map(compress, paths)], name="compress", daemon=True)
            self._compressing.start()

    def _append(self, encoded: Callable[[Arrays], bytes]) -> bool:
        """Whether it is there."""
        if self._file is None:
            return False
        routes = Arrays()
        start_s, data, is_there = perf_counter(), encoded(routes), False
        try:
            self._append_routes(routes)
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
            self._size += len(data)
            is_there = True
            if self._size + self._routes_bytes > SEGMENT_BYTES:
                self._begin_segment()
        except OSError as error:
            self.fail(error)
        self.seconds += perf_counter() - start_s
        return is_there

    def _append_routes(self, routes: Arrays) -> None:
        """Before the rollouts that name them. Raises OSError."""
        if routes:
            with open_own(_files(self._folder, self._segment)[1], "ab") as file:
                file.writelines(frames(routes))
                self._routes_bytes = file.tell()

    def _begin_segment(self) -> None:
        """Raises OSError: the one before is as it was."""
        before = {"segment": self._segment, "bytes": self._size}
        number = max([self._segment, *segments(self._folder)]) + 1  # files that cannot be read stay
        path = segment_path(self._folder, number)
        header = {"kind": "begin", "format": FORMAT, "version": self.version, "settings": self._settings}
        data = encode(header | {"before": before})
        path.parent.mkdir(exist_ok=True)
        try:
            with open_own(path, "xb") as made:
                made.write(data)
            file = open_own(path, "ab", buffering=0)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._segment, self._size, self._routes_bytes = file, number, len(data), 0
        self._begins[self._segment] = self.version
        self._unsynced += _files(self._folder, number)

    def fail(self, error: OSError) -> None:
        """Nothing more is written until there is room."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(self._size)
            self._file.close()
            self._file = None
        if not self._told:
            self._told = True
            self._warn(
                f"{self._folder}/journal keeps nothing until it can be written ({error.strerror}), so a crash would "
                f"cost what comes until the checkpoint after that; {remedy(error)}"
            )

    def _tell_missing(self, how: str, last: int) -> None:
        if self._told and last > self._recorded:
            steps = f"steps {self._recorded + 1} to {last}, which could not be written"
            self._warn(f"{self._folder}/journal {how} without {steps}; nobody can show their rollouts")
        self._told = False

    def close(self) -> None:
        """Writes what is left, at the end of the run, and closes the files."""
        self.write_steps()
        self._write_groups()
        self._tell_missing("ends", self.version)
        self._lines.close()
        if self._file is not None:
            self._file.close()
            self._compressing.join(LAST_PIECE_S)
            if self._keeps == "all" and not self._compressing.is_alive():
                self._compress(self._segment + 1)
                self._compressing.join(LAST_PIECE_S)


def _files(folder: Path | None, number: int) -> tuple[Path, Path]:
    """A file of the journal, and that of recorded experts, which need not be there."""
    path = segment_path(folder, number)
    return path, path.with_suffix(".routes")


def _told(before: Rollout) -> int:
    """Tokens of a rollout on record of which nothing more will be known: experts of those that its environment wrote
    last come with its next prefill."""
    if "routes" not in before.columns or before.is_sampled_T[-1:].all():
        return before.num_tokens
    return int((np.flatnonzero(before.is_sampled_T)[-1:] + 1).sum())


def to_disk(paths: Sequence[Path]) -> None:
    """May take a while. Raises OSError."""
    for path in paths:
        with suppress(FileNotFoundError):
            sync(path)
