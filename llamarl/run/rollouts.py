"""Every rollout that a run was trained on as a row: made from the journal, which alone is written, when somebody asks.

Runs of before have a `rollouts.jsonl`, as has one for which `llamarl export --rollouts` has written it: it counts for
steps of which the journal has nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llamarl.config import ConfigError, load_recorded
from llamarl.journal.reader import BEGIN, JournalWalk, RecordOffset, joined_runs, segments
from llamarl.journal.records import ADVANTAGES, Record, decoded_group
from llamarl.observability.files import pieces, read_run_rows
from llamarl.observability.metrics import finite
from llamarl.run.folder import RunFolder
from llamarl.run.placement import ranges
from llamarl.types import COLUMNS, Prompt, RolloutGroup

_FIX = "it may be the only record of its rollouts: put back what it was, or take the damaged row out"
_RESUME = "record.kind = 'resume' keeps what --resume needs and no more; record the next run with 'all'"


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
    """Numbers as JSON; float32 come back as they were, and what is not finite as null. Formatting all at once takes a
    quarter of the time."""
    values = values_T.tolist()
    if values_T.dtype.kind != "f":
        return json.dumps(values)
    if not np.isfinite(values_T).all():
        return json.dumps([finite(value) for value in values])
    return f"[{', '.join(['%.9g'] * len(values)) % tuple(values)}]"


class TrainedSteps:
    """The completed steps in the journal of a run that say what they were trained on, in their order and each once."""

    def __init__(self, folder: Path, place: RecordOffset = BEGIN) -> None:
        """From a `place` on."""
        self._folder, self._run = folder, _identity(folder)
        self._walk = JournalWalk(folder, {}, place, OSError)
        self.faults = self._walk.faults
        self.step = 0
        """The last one."""
        self.bare = set[int]()
        """Steps of which there is what it takes to train them again, and no more."""

    def new(self) -> Iterator[TrainedStep]:
        """Steps that nobody has had yet, as far as there are any now."""
        for record, groups, place in () if self.was_replaced() else self._walk.new():
            if "trained" in record.header and all(groups):
                self.step = record.header["step"]
                yield TrainedStep(self.step, [*map(_group, groups)], *_decoded(record), place)
            elif record.header["kind"] == "step" and all(groups):
                self.bare.add(record.header["step"])

    def was_replaced(self) -> bool:
        """Steps that were given are not part of the run any more: all come again, from another reader. Else files that
        were begun meanwhile are read by `new`."""
        numbers, walk = segments(self._folder), self._walk
        headers = walk.headers(number for number in numbers if number not in walk.begins)
        begins = {number: header["version"] for number, header in headers}
        if any(version < self.step for version in begins.values()) or max(numbers, default=0) < walk.at.segment:
            return True
        walk.begins |= begins
        return self._run != _identity(self._folder)

    def again(self, places: Mapping[int, RecordOffset]) -> Iterator[TrainedStep]:
        """Steps that were had before, by the places where they begin."""
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
    """Tells the run that is in the folder from another one."""
    path = folder / "config.toml"
    return ((found := path.stat()).st_ino, found.st_mtime_ns) if path.exists() else (0, 0)


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
        prompt_id=header["prompt_id"], text=header["text"], token_ids_T=nothing, answer=header["answer"],
        source=header.get("source", ""),
    )  # fmt: skip
    return decoded_group(header, prompt, map(joined_runs, one.parts))


def file_steps(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rows of the `rollouts.jsonl` in a run's folder, perhaps in pieces, step by step. Raises ConfigError: it is
    damaged."""
    file = folder / "rollouts.jsonl"

    def step_of(found: tuple[str, dict[str, Any]]) -> int:
        if not isinstance(step := found[1].get("step"), int):
            raise ConfigError(f"{found[0]} is no rollout, as it has no step; {_FIX}")
        return step

    has_rows = any(path.exists() for path in pieces(file))
    for step, rows in groupby(read_run_rows(file, _FIX) if has_rows else (), key=step_of):
        yield step, [row for _, row in rows]


def _merged(folder: Path, journal: TrainedSteps) -> Iterator[tuple[int, Iterator[str], list[dict[str, Any]]]]:
    """Steps, JSON of their rollouts, and the rows of `rollouts.jsonl` that these are, where the journal has none."""
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
    """JSON of each rollout that a run was trained on, in the order of the steps. `tell` hears, at the end, of which
    steps there is nothing, and why. Raises ConfigError: there is nothing at all, a file is damaged, or these lines
    would replace, as the file `output`, the only record of a step."""
    done = RunFolder(folder).done_steps()  # what is done meanwhile comes the next time
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
    """Rows of `rollout_lines`, parsed, or of a file of rows."""
    if path.is_dir():
        yield from map(json.loads, rollout_lines(path))
    else:
        yield from (row for _, row in read_run_rows(path, fix))


def what_lacks(folder: Path, done: int, found: Collection[int], faults: Iterable[str]) -> str:
    """Names those of the `done` steps without rollouts, and says why; empty: there are none."""
    lacking = tuple(step for step in range(1, done + 1) if step not in found)
    if not lacking and found:
        return ""
    why = next(iter(faults), "the journal has nothing of them")
    with suppress(ConfigError):
        why = _RESUME if load_recorded(folder / "config.toml").record.kind == "resume" else why
    what = f"rollouts of steps {ranges(lacking)} cannot be derived" if done else "no rollout is on record"
    return f"{folder}: {what}: {why}" if done else f"{folder}: {what}"
