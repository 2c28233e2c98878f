"""Every consumed rollout as one JSON line: enough to see and to prove what was learnt from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.observability.sinks import JsonlSink, SinkFailure
from llamarl.types import RolloutGroup


class RolloutRecorder:
    """Appends to `rollouts.jsonl`. A full disk loses rows and says so once; it never ends the run."""

    def __init__(self, path: Path, on_failure: Callable[[SinkFailure], None]) -> None:
        self._sink = JsonlSink(path)
        self._on_failure = on_failure
        self._failed = False

    def record(self, step: int, groups: Sequence[RolloutGroup], advantages: Mapping[int, np.ndarray]) -> None:
        """The groups that optimizer step `step` consumed, with the advantage of each rollout."""
        for group in groups:
            for index in range(len(group.rollouts)):
                failure = self._sink.write(_row(step, group, index, float(advantages[group.group_id][index])))
                if failure and not self._failed:
                    self._failed = True
                    self._on_failure(failure)

    def drop_after(self, step: int) -> None:
        """Takes back the rows of later steps: a resumed run does those steps again. Raises OSError."""
        self._sink.drop_after(step)

    def close(self) -> None:
        if failure := self._sink.close():
            self._on_failure(failure)


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
        "policy_versions": [[version, len(list(run))] for version, run in groupby(versions)],  # [version, tokens]
        "token_ids": rollout.token_ids_T.tolist(),
        # Nine digits always give back the same float32.
        "behavior_logprobs": [float(f"{value:.9g}") for value in rollout.behavior_logprobs_T.tolist()],
    }
