"""What the folder of a run has on record, to be compared with what happens again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from llamarl.observability.events import machine
from llamarl.observability.files import read_run_rows
from llamarl.observability.metrics import flat
from llamarl.observability.recorder import rows_of
from llamarl.run.folder import RunFolder
from llamarl.training.result import PolicyStepResult
from llamarl.types import RolloutGroup

_EXACT = ("value_loss", "critic_grad_norm", "explained_variance")
"""Metrics of steps that depend on nothing but groups and weights, beside those of the update."""
_FIX = "give the folder of a run"


class Diverged(RuntimeError):
    """What was recorded did not happen again."""

    def __init__(self, step: int, what: str, recorded: object, found: object, cause: str) -> None:
        super().__init__(f"step {step}, {what}: recorded {recorded}, replayed {found}. Likely cause: {cause}")


class Recorded:
    """Rows of `rollouts.jsonl` and `metrics.jsonl`, step by step. Raises ConfigError: a file cannot be read."""

    def __init__(self, folder: RunFolder, close: float, cause: str) -> None:
        """
        Args:
            close: numbers may be so far apart; 0: they are equal.
            cause: of all differences; empty: it depends.
        """
        self._close, self._cause = close, cause
        rows = (row for _, row in read_run_rows(folder.rollouts, _FIX))
        self._rollouts = groupby(rows, key=lambda row: int(row["step"]))
        metrics = (row for _, row in read_run_rows(folder.metrics, _FIX))
        self._metrics = {int(row["step"]): row for row in metrics if row.get("kind") == "step"}

    def check(self, step: int, groups: Sequence[RolloutGroup], result: PolicyStepResult) -> None:
        """Raises Diverged: this is not what the run has on record of the step."""
        known, changed = self._metrics.get(step, {}), "was changed after the run"
        found = flat("step", result.update)
        found |= {f"extra.{name}": value for name, value in result.metrics.items() if name in _EXACT}
        for name, value in found.items():
            if known.get(name, value) != value and not (self._close and name != "learning_rate"):
                cause = f"metrics.jsonl {changed}, or the step took other weights or its groups in another order"
                raise Diverged(step, name, known[name], value, self._cause or cause)
        expected = [
            json.loads(json.dumps(row)) | {name: json.loads(text) for name, text in texts.items()}
            for row, texts in rows_of(step, groups, result.advantages, result.columns)
        ]
        rows = self._of(step)
        if len(rows) != len(expected):
            raise Diverged(step, "rollouts.jsonl, its rows", len(rows), len(expected), "a file that was cut or edited")
        for was, now in zip(rows, expected, strict=True):
            for name in now:
                if where := first_difference(was.get(name), now[name], self._close):
                    what = f"rollout {now['index']} of group {now['group_id']}, {name}{where[0]}"
                    raise Diverged(step, what, *where[1:], self._cause or f"rollouts.jsonl {changed}")

    def _of(self, step: int) -> list[dict[str, Any]]:
        for at, rows in self._rollouts:
            if at >= step:
                return list(rows) if at == step else []
        return []


def first_difference(was: Any, now: Any, close: float = 0.0) -> tuple[str, Any, Any] | None:
    """Where two JSON values differ, and how."""
    if isinstance(was, list) and isinstance(now, list):
        for place, (old, new) in enumerate(zip(was, now, strict=False)):
            if found := first_difference(old, new, close):
                return f"[{place}]{found[0]}", *found[1:]
        return None if len(was) == len(now) else (", its length", len(was), len(now))
    if close and isinstance(was, float) and isinstance(now, float) and abs(was - now) <= close:
        return None
    return None if was == now else ("", was, now)


def first_tensor(recorded: str, found: str, names: Sequence[str]) -> str:
    """Name of the first tensor that is another one, by `Adoption.tensors`; empty: it is not on record."""
    parts = (slice(8 * number, 8 * number + 8) for number in range(len(names)))
    pairs = zip(names, parts, strict=True)
    return next((f", tensor {name}" for name, part in pairs if recorded[part] not in ("", found[part])), "")


def other_machine(folder: RunFolder) -> str:
    """What of this machine is not as it was where the run began or went on last, and changes arithmetic."""
    rows = (row for _, row in read_run_rows(folder.events, _FIX)) if folder.events.exists() else ()
    recorded: Mapping[str, Any] = {}
    for row in rows:
        recorded = row.get("machine", recorded)
    now, versions = machine(), recorded.get("versions", {})
    pairs = [(name, versions.get(name), now["versions"].get(name)) for name in ("torch", "llamarl")]
    pairs += [(name, recorded.get(name), now[name]) for name in ("processor", "instructions")]
    return ", ".join(f"{name} was {old} and is {new}" for name, old, new in pairs if old and old != new)
