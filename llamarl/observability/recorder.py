"""Every consumed rollout as one JSON line: enough to see and to prove what was learnt from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np

from llamarl.observability.metrics import finite
from llamarl.observability.sinks import RowLog
from llamarl.types import COLUMNS, RolloutGroup


class RolloutRecorder(RowLog):
    """`rollouts.jsonl`: a line per rollout that was trained on."""

    def record(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: Mapping[int, np.ndarray],
        columns: Mapping[str, Mapping[int, Mapping[int, np.ndarray]]] = MappingProxyType({}),
    ) -> None:
        """The groups that optimizer step `step` consumed, with the advantage of each rollout, and of some, by name,
        group id and index, a number per token."""
        for row, texts in rows_of(step, groups, advantages, columns):
            self.write(row, texts)


def rows_of(
    step: int,
    groups: Sequence[RolloutGroup],
    advantages: Mapping[int, np.ndarray],
    columns: Mapping[str, Mapping[int, Mapping[int, np.ndarray]]],
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Of each rollout, what is recorded, and values that are JSON already."""
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            texts = {
                name: _numbers(values_T)
                for name, values_T in rollout.columns.items()
                if COLUMNS[name].is_recorded and name != "policy_versions"
            }
            for name, of_groups in columns.items():
                if (values_T := of_groups.get(group.group_id, {}).get(index)) is not None:
                    texts[name] = _numbers(values_T)
            yield _row(step, group, index, float(advantages[group.group_id][index])), texts


def _row(step: int, group: RolloutGroup, index: int, advantage: float) -> dict[str, Any]:
    rollout, result = group.rollouts[index], group.results[index]
    turns = [[len(part), "policy" if is_sampled else "environment"] for is_sampled, part in rollout.turns]
    return {
        "step": step,
        "group_id": group.group_id,
        "index": index,
        "prompt_id": group.prompt.prompt_id,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "response": group.responses[index],
        "outcome": result.outcome.value,
        "reward": result.value,
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
    """As JSON; float32 come back as they were, and what is not finite as null. Formatting all at once takes a quarter
    of the time."""
    values = values_T.tolist()
    if values_T.dtype.kind != "f":
        return json.dumps(values)
    if not np.isfinite(values_T).all():
        return json.dumps([finite(value) for value in values])
    return f"[{', '.join(['%.9g'] * len(values)) % tuple(values)}]"
