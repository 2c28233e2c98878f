"""Every consumed rollout as one JSON line: enough to see and to prove what was learnt from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        logprobs: Mapping[int, Mapping[int, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """The groups that optimizer step `step` consumed, with the advantage of each rollout, and the trainer's
        log-probabilities of those that it computed."""
        for group in groups:
            for index in range(len(group.rollouts)):
                row = _row(step, group, index, float(advantages[group.group_id][index]))
                if (logprobs_T := logprobs.get(group.group_id, {}).get(index)) is not None:
                    row["trainer_logprobs"] = [finite(value) for value in _plain(logprobs_T)]
                self.write(row)


def _row(step: int, group: RolloutGroup, index: int, advantage: float) -> dict[str, Any]:
    rollout, result = group.rollouts[index], group.results[index]
    versions = rollout.policy_versions_T.tolist()
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
        "turns": rollout.num_turns,
        "turn_tokens": [[len(part), "policy" if is_sampled else "environment"] for is_sampled, part in rollout.turns],
        "environment_s": group.environment_s[index] if group.environment_s else 0.0,
        "policy_versions": [[version, len(list(run))] for version, run in groupby(versions)],  # [version, tokens]
    } | {
        name: _plain(values_T)
        for name, values_T in rollout.columns.items()
        if COLUMNS[name].is_recorded and name != "policy_versions"
    }


def _plain(values_T: np.ndarray) -> list[Any]:
    if values_T.dtype != np.float32:
        return values_T.tolist()
    return [float(f"{value:.9g}") for value in values_T.tolist()]  # always gives back the same float32
