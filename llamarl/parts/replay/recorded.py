"""`Recorded`: the rows in the folder of a run, to be compared with what happens again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import Any

import numpy as np

from llamarl.observability.events import machine
from llamarl.observability.files import code_fingerprint, read_run_rows
from llamarl.observability.metrics import flat
from llamarl.run.folder import RunFolder
from llamarl.run.rollouts import TrainedStep, rollout_rows
from llamarl.training.result import PolicyStepResult
from llamarl.types import RolloutGroup

_EXACT = ("value_loss", "critic_grad_norm", "explained_variance")
"""Metrics of steps that depend on nothing but groups and weights, beside those of the update."""
_FIRST = ("token_ids", "behavior_logprobs", "policy_versions", "reward")
"""Columns on which others depend."""
_FIX = "give the folder of a run"


class Diverged(RuntimeError):
    """Something that was recorded did not happen again."""

    def __init__(self, step: int, what: str, recorded: object, found: object, cause: str) -> None:
        super().__init__(f"step {step}, {what}: recorded {recorded}, replayed {found}. Likely cause: {cause}")


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
        self._file = "rollouts.jsonl" if folder.rollouts.exists() else "the journal"
        self._read, self._taken = (_by_step(folder) for _ in range(2))
        metrics = (row for _, row in read_run_rows(folder.metrics, _FIX))
        self._metrics = {int(row["step"]): row for row in metrics if row.get("kind") == "step"}

    def check_journal(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Compares the journal's groups of a step, before it is taken. Raises Diverged: `rollouts.jsonl`, where there
        is one, has others."""
        if self._file == "the journal":
            return
        rows = {(row["group_id"], row["index"]): row for row in _of(step, self._read)}
        unknown = {group.group_id: np.zeros(len(group.rollouts)) for group in groups}
        for now in _expected(step, groups, unknown, {}):
            was = rows.get((now["group_id"], now["index"]), now)
            for name in (*_FIRST, *(name for name in now if name != "advantage")):
                cause = "rollouts.jsonl or the journal was changed after the run"
                _check(step, now, name, first_difference(was.get(name), now[name]), cause)

    def check(self, step: int, groups: Sequence[RolloutGroup], result: PolicyStepResult) -> None:
        """Compares a computed step. Raises Diverged: this is not what the run has on record of it."""
        rows, expected = _of(step, self._taken), [*_expected(step, groups, result.advantages, result.columns)]
        if len(rows) != len(expected):
            raise Diverged(step, f"{self._file}, its rows", len(rows), len(expected), "a file that was cut or edited")
        for name in ("group_id", "index", "advantage", *result.columns):
            differ = [
                first_difference(was.get(name), now.get(name), self._close)
                for was, now in zip(rows, expected, strict=True)
            ]
            cause = "the step took other weights, or its groups in another order, than is on record"
            cause = cause if len([*filter(None, differ)]) > 1 else f"{self._file} was changed after the run"
            cause = "a reward, or a setting of advantages, was changed after the run" if name == "advantage" else cause
            for now, found in zip(expected, differ, strict=True):
                _check(step, now, name, found, self._cause or cause)
        known, found = self._metrics.get(step, {}), flat("step", result.update)
        found |= {f"extra.{name}": value for name, value in result.metrics.items() if name in _EXACT}
        for name, value in found.items():
            if known.get(name, value) != value and not (self._close and name != "learning_rate"):
                cause = "metrics.jsonl was changed after the run, or the step took its groups in another order"
                raise Diverged(step, name, known[name], value, self._cause or cause)


def _check(step: int, row: Mapping[str, Any], name: str, found: tuple[str, Any, Any] | None, cause: str) -> None:
    """Raises Diverged, with what was `found` to differ."""
    if found:
        what = f"rollout {row['index']} of group {row['group_id']}, {name}{found[0]}"
        raise Diverged(step, what, *found[1:], cause)


def _by_step(folder: RunFolder) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
    return groupby(rollout_rows(folder.path), key=lambda row: int(row["step"]))


def _of(step: int, steps: Iterator[tuple[int, Iterator[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Rows of a step, read from `steps`, which are asked for in their order."""
    for at, rows in steps:
        if at >= step:
            return [row | {"policy_versions": [*versions_of(row)]} for row in rows] if at == step else []
    return []


def _expected(step: int, *recorded: Any) -> Iterator[dict[str, Any]]:
    """Rows of what a `TrainedStep` holds, in the shape of those that `_of` reads."""
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
        return "which code of llamarl the run was computed by is not on record"
    return f"the code of llamarl is another one, {now} and not {min(others)}" if others else ""


def other_machine(folder: RunFolder) -> str:
    """Differences that change arithmetic between this machine and the one where the run began or went on last."""
    recorded: Mapping[str, Any] = next((row["machine"] for row in reversed(_starts(folder))), {})
    now, versions = machine(), recorded.get("versions", {})
    pairs = [(name, versions.get(name), now["versions"].get(name)) for name in ("torch", "llamarl")]
    pairs += [(name, recorded.get(name), now[name]) for name in ("processor", "instructions")]
    return ", ".join(f"{name} was {old} and is {new}" for name, old, new in pairs if old and old != new)
