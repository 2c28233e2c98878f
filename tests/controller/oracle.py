"""What is recorded of a rollout that was trained on, from memory: what is made from the journal must be the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from llamarl.observability.metrics import finite
from llamarl.training.result import PolicyStepResult
from llamarl.types import COLUMNS, Outcome, RolloutGroup


def lines_of(step: int, groups: Sequence[RolloutGroup], result: PolicyStepResult) -> Iterator[str]:
    """JSON of each rollout."""
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            texts = {
                name: numbers(values_T)
                for name, values_T in rollout.columns.items()
                if COLUMNS[name].is_recorded and name != "policy_versions"
            }
            for name, of_groups in result.columns.items():
                if (values_T := of_groups.get(group.group_id, {}).get(index)) is not None:
                    texts[name] = numbers(values_T)
            row = _row(step, group, index, float(result.advantages[group.group_id][index]))
            yield f"{json.dumps(row)[:-1]}{''.join(f', {json.dumps(name)}: {text}' for name, text in texts.items())}}}"


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
        "right": None if result.outcome is Outcome.INVALID else result.is_right,
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


def numbers(values_T: np.ndarray) -> str:
    """As JSON; what is not finite as null."""
    values = values_T.tolist()
    if values_T.dtype.kind != "f":
        return json.dumps(values)
    if not np.isfinite(values_T).all():
        return json.dumps([finite(value) for value in values])
    return f"[{', '.join(['%.9g'] * len(values)) % tuple(values)}]"
