"""What a simulation keeps of its steps: the places where a real run writes rollouts and metrics, as counters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from llamarl.observability.files import write_atomically
from llamarl.observability.metrics import EvalMetrics, StepMetrics
from llamarl.observability.recorder import RolloutRecorder
from llamarl.observability.sinks import MetricsLog
from llamarl.types import RolloutGroup


class StalenessCounter(RolloutRecorder):
    """Counts the staleness of every rollout that is trained on, and which groups they were; writes nothing."""

    def __init__(self, spend: Callable[[int], None] = lambda _: None) -> None:
        """`spend` lets the time pass that so many rollouts take to be recorded."""
        super().__init__(None, lambda _: None)
        self._spend = spend
        self.counts = Counter[int]()
        """Rollouts by staleness, in optimizer steps."""
        self.group_ids = list[int]()
        """In the order of their consumption."""

    def record(
        self, step: int, groups: Sequence[RolloutGroup], advantages: object = None, columns: object = None
    ) -> None:
        self._spend(sum(len(group.rollouts) for group in groups))
        for group in groups:
            self.group_ids.append(group.group_id)
            self.counts.update(step - 1 - rollout.oldest_version for rollout in group.rollouts)


class StepLog(MetricsLog):
    """`metrics.jsonl`, and the steps in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda _: None)
        self.steps = list[StepMetrics]()
        self._path = path

    def log(self, record: StepMetrics | EvalMetrics) -> None:
        super().log(record)
        if isinstance(record, StepMetrics):
            self.steps.append(record)

    def rewrite(self, steps: Sequence[StepMetrics]) -> None:
        """`metrics.jsonl` again, with these steps; after `close`. Raises OSError."""
        write_atomically(self._path, "".join(json.dumps(step.to_json()) + "\n" for step in steps))
