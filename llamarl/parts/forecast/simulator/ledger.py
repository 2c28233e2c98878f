"""Records of a simulation's steps, as counters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamarl.controller.progress import SyncReport
from llamarl.controller.telemetry import StepMark, Telemetry
from llamarl.observability.files import write_atomically
from llamarl.observability.metrics import EvalMetrics, StepMetrics
from llamarl.observability.sinks import MetricsLog
from llamarl.training.result import PolicyStepResult
from llamarl.types import RolloutGroup


class CountingTelemetry(Telemetry):
    """Counts the staleness of every trained rollout, and records the trained groups."""

    def __init__(self, *arguments: Any, spend: Callable[[int], None]) -> None:
        """`spend` advances the clock by the time to record this many rollouts."""
        super().__init__(*arguments)
        self._spend = spend
        self.counts = Counter[int]()
        """Rollouts by staleness, in optimizer steps."""
        self.group_ids = list[int]()
        """Groups in the order in which they were trained."""

    def step(
        self,
        groups: Sequence[RolloutGroup],
        result: PolicyStepResult,
        mark: StepMark,
        sync: SyncReport,
        ready_groups: int,
    ) -> None:
        """Counts and records a step."""
        self._spend(sum(len(group.rollouts) for group in groups))
        for group in groups:
            self.group_ids.append(group.group_id)
            self.counts.update(result.policy_version - 1 - rollout.oldest_version for rollout in group.rollouts)
        super().step(groups, result, mark, sync, ready_groups)


class StepLog(MetricsLog):
    """Writes `metrics.jsonl` and keeps the steps in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda _: None)
        self.steps = list[StepMetrics]()
        self._path = path

    def log(self, record: StepMetrics | EvalMetrics) -> None:
        super().log(record)
        if isinstance(record, StepMetrics):
            self.steps.append(record)

    def rewrite(self, steps: Sequence[StepMetrics]) -> None:
        """Replaces `metrics.jsonl` with these steps, after `close`. Raises OSError."""
        write_atomically(self._path, "".join(json.dumps(step.to_json()) + "\n" for step in steps))
