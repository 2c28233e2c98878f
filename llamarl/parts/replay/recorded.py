"""`Recorded`: the rows in the folder of a run, to be compared with what happens again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from llamarl.config import ConfigError
from llamarl.observability.files import code_fingerprint, read_run_rows
from llamarl.observability.metrics import flat
from llamarl.observability.sinks import machine
from llamarl.run.folder import RunFolder
from llamarl.run.rollouts import TrainedStep, TrainedSteps, file_steps
from llamarl.training.result import PolicyStepResult
from llamarl.types import RolloutGroup

_DERIVED = ("right", "reward_parts")
"""What files of older versions do not have, and the journal says."""
_EXACT = ("value_loss", "critic_grad_norm", "explained_variance")
"""Metrics of steps that depend on nothing but groups and weights, beside those of the update."""
_FIRST = ("token_ids", "behavior_logprobs", "policy_versions", "reward")
"""Columns on which others depend."""
_FIX = "give the folder of a run"


class Diverged(RuntimeError):
    """Something that was recorded did not happen again."""

    def __init__(self, step: int, what: str, recorded: object, found: object, cause: str) -> None:
        super().__init__(step, what, str(recorded), str(found), cause)  # so that it can be pickled

    def __str__(self) -> str:
        step, what, recorded, found, cause = self.args
        return f"step {step}, {what}: recorded {recorded}, replayed {found}. Likely cause: {cause}"


class Recorded:
    """Rows of rollouts and of `metrics.jsonl`, step by step. Raises ConfigError: there are none, or a file cannot be
    read."""

    def __init__(self, folder: RunFolder, close: float, cause: str) -> None:
        """
        Args:
            close: numbers may be so far apart; 0: they are equal.
            cause: of all differences between what is computed; empty: it depends.
        """
        self._close, self._cause = close, cause
        self._journal, self._ahead = TrainedSteps(folder.path), _RowsByStep(file_steps(folder.path))
        of_journal = ((one.step, map(json.loads, one.lines())) for one in self._journal.new())
        self._files = {"rollouts.jsonl": _RowsByStep(file_steps(folder.path)), "the journal": _RowsByStep(of_journal)}
        metrics = (row for _, row in read_run_rows(folder.metrics, _FIX))
        self._metrics = {int(row["step"]): row for row in metrics if row.get("kind") == "step"}

    def check_journal(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Compares the journal's groups of a step, before it is taken. Raises Diverged: `rollouts.jsonl`, where there
        is one, has others."""
        rows = {(row["group_id"], row["index"]): row for row in self._ahead.rows(step)}
        unknown = {group.group_id: np.zeros(len(group.rollouts)) for group in groups}
        for now in _expected(step, groups, unknown, {}) if rows else ():
            was = rows.get((now["group_id"], now["index"]), now)
            for name in (*_FIRST, *(name for name in now if name != "advantage")):
                cause = "rollouts.jsonl or the journal was changed after the run"
                was_recorded = name in was or name not in _DERIVED
                found = first_difference(was.get(name), now[name]) if was_recorded else None
                _check(step, now, name, found, cause)

    def check(self, step: int, groups: Sequence[RolloutGroup], result: PolicyStepResult) -> None:
        """Compares a computed step. Raises Diverged: this is not what the run has on record of it; ConfigError: it has
        nothing."""
        found = {file: rows for file, steps in self._files.items() if (rows := steps.rows(step))}
        if not found and step in self._journal.bare:
            cause = f"step {step} has nothing to compare training with, as record.kind was 'resume'"
            raise ConfigError(f"--steps: {cause}; give --steps {self._files['the journal'].step}: or --only generate")
        expected = [*_expected(step, groups, result.advantages, result.columns)]
        for file, rows in (found or {"the journal": []}).items():
            self._compare(step, file, rows, expected, result.columns)
        known, now = self._metrics.get(step, {}), flat("step", result.update)
        now |= {f"extra.{name}": value for name, value in result.metrics.items() if name in _EXACT}
        for name, value in now.items():
            if known.get(name, value) != value and not (self._close and name != "learning_rate"):
                cause = "metrics.jsonl was changed after the run, or the step took its groups in another order"
                raise Diverged(step, name, known[name], value, self._cause or cause)

    def _compare(self, step: int, file: str, rows: list[Any], expected: list[Any], columns: Iterable[str]) -> None:
        """Raises Diverged: what `file` has is not what is computed."""
        if len(rows) != len(expected):
            raise Diverged(step, f"{file}, its rows", len(rows), len(expected), "a file that was cut or edited")
        for name in ("group_id", "index", "advantage", *columns):
            differ = [
                first_difference(was.get(name), now.get(name), self._close)
                for was, now in zip(rows, expected, strict=True)
            ]
            cause = "the step took other weights, or its groups in another order, than recorded"
            cause = cause if len([*filter(None, differ)]) > 1 else f"{file} was changed after the run"
            cause = "a reward, or a setting of advantages, was changed after the run" if name == "advantage" else cause
            for now, found in zip(expected, differ, strict=True):
                _check(step, now, name, found, self._cause or cause)


def _check(step: int, row: Mapping[str, Any], name: str, found: tuple[str, Any, Any] | None, cause: str) -> None:
    """Raises Diverged, with what was `found` to differ."""
    if found:
        what = f"rollout {row['index']} of group {row['group_id']}, {name}{found[0]}"
        raise Diverged(step, what, *found[1:], cause)


class _RowsByStep:
    """Rows of steps, which are asked for in their order."""

    def __init__(self, steps: Iterator[tuple[int, Iterable[dict[str, Any]]]]) -> None:
        self._steps, self._held, self.step = steps, list[dict[str, Any]](), 0

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Rows of one step; empty: there are none."""
        while self.step < step:
            self.step, found = next(self._steps, (sys.maxsize, ()))
            self._held = [row | {"policy_versions": [*versions_of(row)]} for row in found]
        return self._held if self.step == step else []


def _expected(step: int, *recorded: Any) -> Iterator[dict[str, Any]]:
    """Rows of what a `TrainedStep` holds, in the shape of those of `_RowsByStep`."""
    for line in TrainedStep(step, *recorded).lines():
        read = json.loads(line)
        yield read | {"policy_versions": [*versions_of(read)]}


def first_difference(was: Any, now: Any, close: float = 0.0) -> tuple[str, Any, Any] | None:
    """Place of the first difference between two JSON values, and both values there; None: they are equal."""
    if was == now:
        return None
    if isinstance(was, list) and isinstance(now, list):
        for place, (old, new) in enumerate(zip(was, now, strict=False)):
            if found := first_difference(old, new, close):
                return f"[{place}]{found[0]}", *found[1:]
        return None if len(was) == len(now) else (", its length", len(was), len(now))
    if close and isinstance(was, float) and isinstance(now, float) and abs(was - now) <= close:
        return None
    return "", was, now


def first_tensor(recorded: str, found: str, names: Sequence[str]) -> str:
    """Name of the first tensor that is another one, by `Adoption.tensors`; empty: it is not on record."""
    parts = (slice(8 * number, 8 * number + 8) for number in range(len(names)))
    pairs = zip(names, parts, strict=True)
    return next((f", tensor {name}" for name, part in pairs if recorded[part] not in ("", found[part])), "")


def versions_of(row: Mapping[str, Any]) -> Iterator[int]:
    """The policy version of each token of a rollout's row."""
    return chain.from_iterable(repeat(version, times) for version, times in row["policy_versions"])


def _starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Rows of `events.jsonl` from each time that the run began or went on."""
    rows = (row for _, row in read_run_rows(folder.events, _FIX)) if folder.events.exists() else ()
    return [row for row in rows if "machine" in row]


def other_code(folder: RunFolder) -> str:
    """Why this code may compute something else than the run's did; empty: it is the same."""
    others = {row.get("code", "") for row in _starts(folder)} - {now := code_fingerprint()}
    if "" in others:
        return "the record does not say by which code of llamarl the run was computed"
    return f"the code of llamarl differs, {now} and not {min(others)}" if others else ""


def other_machine(folder: RunFolder) -> str:
    """Differences that change arithmetic between this machine and the one where the run began or went on last."""
    recorded: Mapping[str, Any] = next((row["machine"] for row in reversed(_starts(folder))), {})
    now, versions = machine(), recorded.get("versions", {})
    pairs = [(name, versions.get(name), now["versions"].get(name)) for name in ("torch", "llamarl")]
    pairs += [(name, recorded.get(name), now[name]) for name in ("processor", "instructions")]
    return ", ".join(f"{name} was {old} and is {new}" for name, old, new in pairs if old and old != new)
