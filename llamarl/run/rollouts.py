"""Rollouts and metrics of a run as rows: read from its journal and files, for `llamarl export` and for pandas."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from llamarl.config import ConfigError, RunConfig, from_home, load_recorded, read_json
from llamarl.config.errors import told_in_python
from llamarl.config.load import flat_settings
from llamarl.config.section import not_a_run
from llamarl.journal.reader import BEGIN, JournalWalk, RecordOffset, joined_runs, segments
from llamarl.journal.records import ADVANTAGES, Record, decoded_group
from llamarl.observability.files import pieces, read_run_rows
from llamarl.observability.metrics import finite
from llamarl.run.folder import RunFolder
from llamarl.run.placement import ranges
from llamarl.types import COLUMNS, Prompt, RolloutGroup

_FIX = "it may be the only record of its rollouts: restore it, or remove the damaged row"
_RESUME = "record.kind = 'resume' keeps only what --resume needs; record the next run with 'all'"


class TrainedStep(NamedTuple):
    """A recorded step."""

    step: int
    groups: Sequence[RolloutGroup]
    advantages: Mapping[int, np.ndarray]
    """One number per rollout, by group."""
    columns: Mapping[str, Mapping[int, Mapping[int, np.ndarray]]]
    """One number per token, by name, group and index."""
    place: RecordOffset = BEGIN

    def lines(self) -> Iterator[str]:
        """Yields the JSON of each rollout."""
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
                row = _row(self.step, group, index, finite(float(self.advantages[group.group_id][index])))
                numbers = (f', "{name}": {_numbers(values_T)}' for name, values_T in texts.items())
                yield f"{json.dumps(row, allow_nan=False)[:-1]}{''.join(numbers)}}}"


def _row(step: int, group: RolloutGroup, index: int, advantage: float | None) -> dict[str, Any]:
    rollout, result = group.rollouts[index], group.results[index]
    turns = [[len(part), "policy" if is_sampled else "environment"] for is_sampled, part in rollout.turns]
    return {
        "step": step,
        "group_id": group.group_id,
        "index": index,
        **({"source": group.prompt.source} if group.prompt.source else {}),
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": group.responses[index],
        "outcome": result.outcome.value,
        "right": result.right,
        "reward": result.value,
        **({"reward_parts": {name: finite(value) for name, value in result.parts.items()}} if result.parts else {}),
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
    """Returns numbers as JSON. float32 values are restored exactly, and non-finite values are null. Formatting all at
    once is four times as fast."""
    values = values_T.tolist()
    if values_T.dtype.kind != "f":
        return json.dumps(values)
    if not np.isfinite(values_T).all():
        return json.dumps([finite(value) for value in values])
    return f"[{', '.join(['%.9g'] * len(values)) % tuple(values)}]"


class TrainedSteps:
    """Reads the completed steps in a run's journal that have training data, in order and each once."""

    def __init__(self, folder: Path, place: RecordOffset = BEGIN) -> None:
        """Starts at `place`."""
        self._folder, self._run = folder, _identity(folder)
        self._walk = JournalWalk(folder, {}, place, OSError)
        self.faults = self._walk.faults
        self.step = 0
        """The last step that was read."""
        self.bare = set[int]()
        """Steps with only the data that is needed to repeat them."""

    def new(self) -> Iterator[TrainedStep]:
        """Yields steps that are new since the last call."""
        for record, groups, place in () if self.was_replaced() else self._walk.new():
            if "trained" in record.header and all(groups):
                self.step = record.header["step"]
                yield TrainedStep(self.step, [*map(_group, groups)], *_decoded(record), place)
            elif record.header["kind"] == "step" and all(groups):
                self.bare.add(record.header["step"])

    def was_replaced(self) -> bool:
        """Returns whether earlier steps no longer belong to the run, so that a new reader must start again. Else
        registers files that have begun since, for `new`."""
        numbers, walk = segments(self._folder), self._walk
        headers = walk.headers(number for number in numbers if number not in walk.begins)
        begins = {number: header["version"] for number, header in headers}
        if any(version < self.step for version in begins.values()) or max(numbers, default=0) < walk.at.segment:
            return True
        walk.begins |= begins
        return self._run != _identity(self._folder)

    def again(self, places: Mapping[int, RecordOffset]) -> Iterator[TrainedStep]:
        """Yields earlier steps again, given the places where they begin."""
        reader, start = self, RecordOffset(1 << 62, 0)
        steps: Iterator[TrainedStep] = iter(())
        for step in sorted(places):
            if places[step] < start or places[step].segment > reader._walk.at.segment:
                start = places[step]
                reader = TrainedSteps(self._folder, start)
                reader._walk.begins |= self._walk.begins
                steps = reader.new()
            for found in steps:
                if found.step in places:
                    yield found
                if found.step >= step:
                    break


def _identity(folder: Path) -> tuple[int, int]:
    """Returns an identity of the run in a folder, which a new run changes."""
    path = folder / "config.toml"
    return ((found := path.stat()).st_ino, found.st_mtime_ns) if path.exists() else (0, 0)


def _decoded(record: Record) -> tuple[dict[int, np.ndarray], dict[str, dict[int, dict[int, np.ndarray]]]]:
    """Returns advantages by group, and per-token numbers by name, group and index, as in `PolicyStepResult`."""
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
        prompt_id=header["prompt_id"], text=header["text"], token_ids_T=nothing, answer=header["answer"],
        source=header.get("source", ""),
    )  # fmt: skip
    return decoded_group(header, prompt, map(joined_runs, one.parts))


def file_steps(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields the rows of `rollouts.jsonl` in a run's folder, step by step. Raises ConfigError if it is damaged."""
    file = folder / "rollouts.jsonl"

    def step_of(found: tuple[str, dict[str, Any]]) -> int:
        if not isinstance(step := found[1].get("step"), int):
            raise ConfigError(f"{found[0]} is not a rollout: it has no step; {_FIX}")
        return step

    has_rows = any(path.exists() for path in pieces(file))
    for step, rows in groupby(read_run_rows(file, _FIX) if has_rows else (), key=step_of):
        yield step, [row for _, row in rows]


def _merged(folder: Path, journal: TrainedSteps) -> Iterator[tuple[int, Iterator[str], list[dict[str, Any]]]]:
    """Yields step, JSON of its rollouts, and rows of `rollouts.jsonl`, which are used if the journal lacks the step."""
    last, file, held = 0, file_steps(folder), None
    for one in chain(journal.new(), [None]):
        end = one.step if one else (RunFolder(folder).done_steps() or sys.maxsize) + 1
        if end > last + 1:
            held = held or next(file, None)
        while held and held[0] < end:
            if held[0] > last:
                last = held[0]
                yield last, map(json.dumps, held[1]), held[1]
            held = next(file, None)
        if one:
            last = one.step
            yield last, one.lines(), []


def rollout_lines(
    folder: Path, tell: Callable[[str], None] = lambda text: None, output: Path | None = None
) -> Iterator[str]:
    """Yields the JSON of each rollout that a run was trained on, in the order of steps.

    Args:
        tell: called at the end with text about missing steps.
        output: file that the lines will replace. None means no file.

    Raises:
        ConfigError: there are no rollouts, a file is damaged, or `output` is the only record of a step.
    """
    done = RunFolder(folder).done_steps()  # later steps are left to the next export
    journal, found, rows = TrainedSteps(folder), set[int](), list[dict[str, Any]]()
    for step, lines, of_file in _merged(folder, journal):
        if of_file and output and output.resolve() in [path.resolve() for path in pieces(folder / "rollouts.jsonl")]:
            raise ConfigError(f"{output} is the only record of the rollouts of step {step}; name another --output")
        found.add(step)
        rows = of_file or rows
        yield from lines
    with suppress(ConfigError):
        of_step = load_recorded(folder / "config.toml").rollout
        if rows and len(rows) < of_step.prompts_per_step * of_step.group_size:  # its writer died
            journal.faults[f"{folder}/rollouts.jsonl has only {len(rows)} rows of step {rows[0]['step']}"] = None
            found -= {rows[0]["step"]}
    if said := what_lacks(folder, done, found, journal.faults):
        if not found and not rows:
            raise ConfigError(said)
        tell(said)


def rollout_rows(path: Path, fix: str = "give the folder of a run") -> Iterator[dict[str, Any]]:
    """Yields the rows of `rollout_lines`, or of a file, as objects."""
    if path.is_dir():
        yield from map(json.loads, rollout_lines(path))
    else:
        yield from (row for _, row in read_run_rows(path, fix))


def what_lacks(folder: Path, done: int, found: Collection[int], faults: Iterable[str]) -> str:
    """Returns text on which of the `done` steps lack rollouts, and why. Empty means none."""
    lacking = tuple(step for step in range(1, done + 1) if step not in found)
    if not lacking and found:
        return ""
    why = next(iter(faults), "the journal does not have them")
    with suppress(ConfigError):
        why = _RESUME if load_recorded(folder / "config.toml").record.kind == "resume" else why
    what = f"rollouts of steps {ranges(lacking)} cannot be derived" if done else "no rollout is on record"
    return f"{folder}: {what}: {why}" if done else f"{folder}: {what}"


class RunRecord:
    """A run's folder, read again at each call."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if there is no run."""
        self.path = path.resolve()
        self._folder = RunFolder(self.path)
        if not self._folder.config.exists():
            raise not_a_run(path)

    def __repr__(self) -> str:
        return f"RunRecord({str(self.path)!r}, {self._folder.recorded_steps()} steps)"

    @property
    def config(self) -> RunConfig:
        """All settings. Raises ConfigError if the file is damaged."""
        return load_recorded(self._folder.config)

    @property
    def summary(self) -> dict[str, Any]:
        """Numbers of a run that has ended, else empty. Raises ConfigError if the file is damaged."""
        return read_json(self._folder.summary, "start again") if self._folder.summary.exists() else {}

    def metrics(self) -> list[dict[str, Any]]:
        """Returns a flat row per step, with dotted names for nested numbers and NaN for missing ones. Raises
        ConfigError if a row is damaged."""
        return [_flat(row) for row in self._rows("step")]

    def evals(self) -> list[dict[str, Any]]:
        """Returns a row per evaluation, as `metrics`. Raises ConfigError."""
        return [_flat(row) for row in self._rows("eval")]

    def rollouts(self) -> Iterator[dict[str, Any]]:
        """Yields a row per rollout that was trained on: step, prompt, response, reward, advantage and more. Raises
        ConfigError if there are none."""
        return rollout_rows(self.path)

    @told_in_python
    def export(
        self,
        folder: str | Path | None = None,
        *,
        step: int | None = None,
        merge: bool = False,
        dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> Path:
        """Writes a checkpoint as a Hugging Face folder, or adapters as PEFT's, as `llamarl export` does.

        Args:
            folder: to write. None means `export` in the run's folder, or `merged` with `merge`.
            step: of the checkpoint. None means the newest valid one.
            merge: merge adapters into the base model.
            dtype: type of the weights. None means the type that the run trained with, and float32 for adapters.

        Returns:
            The folder.

        Raises:
            ConfigError: there is no such checkpoint, it is damaged, or `folder` has other contents.
        """
        from llamarl.run.export import export

        to = None if folder is None else from_home(folder)
        return export(self.path, self.config, to, step, merge, command="llamarl", dtype=dtype).folder

    def _rows(self, kind: str) -> Iterator[dict[str, Any]]:
        if not any(one.stat().st_size for one in pieces(self._folder.metrics) if one.exists()):
            return  # the run has just begun
        for _, row in read_run_rows(self._folder.metrics, "start again"):
            if row.get("kind") == kind:
                yield {name: value for name, value in row.items() if name != "kind"}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found = flat_settings(row)
    return {name: math.nan if value is None else value for name, value in found if value != {}}
