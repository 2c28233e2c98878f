"""`Recorded`: the rows in a run folder, for comparison with a replay."""

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
"""Fields that files of older versions lack and the journal has."""
_EXACT = ("value_loss", "critic_grad_norm", "explained_variance")
"""Metrics of steps that depend only on groups and weights, in addition to those of the update."""
_FIRST = ("token_ids", "behavior_logprobs", "policy_versions", "reward")
"""Columns on which others depend."""
_FIX = "give the folder of a run"


class Diverged(RuntimeError):
    """A replayed value differs from the record."""

    def __init__(self, step: int, what: str, recorded: object, found: object, cause: str) -> None:
        super().__init__(step, what, str(recorded), str(found), cause)  # so that it can be pickled

    def __str__(self) -> str:
        step, what, recorded, found, cause = self.args
        return f"step {step}, {what}: recorded {recorded}, replayed {found}. Likely cause: {cause}"


class Recorded:
    """Rows of rollouts and of `metrics.jsonl`, step by step. Raises ConfigError if there are none or a file is
    unreadable."""

    def __init__(self, folder: RunFolder, close: float, cause: str) -> None:
        """
        Args:
            close: maximum difference between equal numbers. 0 means exact equality.
            cause: cause of every difference between computed values. Empty means that it depends on the difference.
        """
        self._close, self._cause = close, cause
        self._journal, self._ahead = TrainedSteps(folder.path), _RowsByStep(file_steps(folder.path))
        of_journal = ((one.step, map(json.loads, one.lines())) for one in self._journal.new())
        self._files = {"rollouts.jsonl": _RowsByStep(file_steps(folder.path)), "the journal": _RowsByStep(of_journal)}
        metrics = (row for _, row in read_run_rows(folder.metrics, _FIX))
        self._metrics = {int(row["step"]): row for row in metrics if row.get("kind") == "step"}

    def check_journal(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Compares the journal's groups of a step with `rollouts.jsonl`, if it exists, before training. Raises Diverged
        if they differ."""
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
        """Compares a computed step with the record. Raises Diverged if they differ, and ConfigError if the record lacks
        the step."""
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
        """Raises Diverged if the rows of `file` differ from the computed rows."""
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
    """Raises Diverged if `found` contains a difference."""
    if found:
        what = f"rollout {row['index']} of group {row['group_id']}, {name}{found[0]}"
        raise Diverged(step, what, *found[1:], cause)


class _RowsByStep:
    """Rows of steps, requested in order."""

    def __init__(self, steps: Iterator[tuple[int, Iterable[dict[str, Any]]]]) -> None:
        self._steps, self._held, self.step = steps, list[dict[str, Any]](), 0

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Returns the rows of one step. Empty means none."""
        while self.step < step:
            self.step, found = next(self._steps, (sys.maxsize, ()))
            self._held = [row | {"policy_versions": [*versions_of(row)]} for row in found]
        return self._held if self.step == step else []


def _expected(step: int, *recorded: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a `TrainedStep` in the form of `_RowsByStep`."""
    for line in TrainedStep(step, *recorded).lines():
        read = json.loads(line)
        yield read | {"policy_versions": [*versions_of(read)]}


def first_difference(was: Any, now: Any, close: float = 0.0) -> tuple[str, Any, Any] | None:
    """Returns path and both values of the first difference between two JSON values. None means equal."""
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
    """Returns the name of the first tensor that differs, by `Adoption.tensors`. Empty means not recorded."""
    parts = (slice(8 * number, 8 * number + 8) for number in range(len(names)))
    pairs = zip(names, parts, strict=True)
    return next((f", tensor {name}" for name, part in pairs if recorded[part] not in ("", found[part])), "")


def versions_of(row: Mapping[str, Any]) -> Iterator[int]:
    """Yields the policy version of each token of a rollout's row."""
    return chain.from_iterable(repeat(version, times) for version, times in row["policy_versions"])


def _starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the rows of `events.jsonl` for each start and resume of the run."""
    rows = (row for _, row in read_run_rows(folder.events, _FIX)) if folder.events.exists() else ()
    return [row for row in rows if "machine" in row]


def other_code(folder: RunFolder) -> str:
    """Returns how this code differs from the run's code. Empty means equal."""
    others = {row.get("code", "") for row in _starts(folder)} - {now := code_fingerprint()}
    if "" in others:
        return "the record does not say by which code of llamarl the run was computed"
    return f"the code of llamarl differs, {now} and not {min(others)}" if others else ""


def other_machine(folder: RunFolder) -> str:
    """Returns differences in arithmetic between this machine and the machine of the run's last start or resume."""
    recorded: Mapping[str, Any] = next((row["machine"] for row in reversed(_starts(folder))), {})
    now, versions = machine(), recorded.get("versions", {})
    pairs = [(name, versions.get(name), now["versions"].get(name)) for name in ("torch", "llamarl")]
    pairs += [(name, recorded.get(name), now[name]) for name in ("processor", "instructions")]
    return ", ".join(f"{name} was {old} and is {new}" for name, old, new in pairs if old and old != new)
