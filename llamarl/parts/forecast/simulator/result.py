"""`Simulation`: the result of simulating a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llamarl.observability.metrics import StepMetrics
from llamarl.observability.report import Accounts, SpeedVerdict
from llamarl.observability.spans import Span
from llamarl.parts.forecast.simulator.split import Split

COUNTS = {
    "deaths": "generators that died",
    "joins": "generators that came in addition",
    "dropped_rollouts": "lost unfinished with their generator",
    "resubmitted_groups": "generated again, from their prompts, for that reason",
    "resumed_rollouts": "that went on under newer weights than they began with",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A complete simulated run."""

    split: Split
    end: str
    """`finished`, or why it ended early."""
    steps: tuple[StepMetrics, ...]
    accounts: Accounts
    """Busy shares of executors and roles in the loop."""
    verdict: SpeedVerdict
    staleness: Mapping[int, int]
    """Trained rollouts, by staleness in optimizer steps."""
    staleness_bound: int
    group_ids: tuple[int, ...]
    """Groups in the order in which they were trained."""
    loop_s: tuple[float, float]
    """Start and end of the loop, virtual seconds."""
    counts: Mapping[str, int]
    """Number of events by name, for each of `COUNTS`."""
    spans: Mapping[str, list[Span]]
    wall_s: float
    """Real seconds of the simulation."""
    cpu_s: float
    """CPU seconds of the simulation."""
    executors_cpu_s: float
    """CPU seconds inside simulated executors. The rest is the controller and its event loop."""

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)

    @property
    def controller_s_per_group(self) -> float:
        """CPU seconds of the controller per rollout group."""
        return (self.cpu_s - self.executors_cpu_s) / max(self.num_groups, 1)

    @property
    def virtual_s(self) -> float:
        """Simulated seconds of the loop."""
        return self.loop_s[1] - self.loop_s[0]

    @property
    def step_s(self) -> np.ndarray:
        """Step times after the first, which begins with empty generators. All step times if there is only one."""
        return np.array([step.step_s for step in self.steps[1:] or self.steps])

    @property
    def staleness_mean(self) -> float:
        return sum(value * count for value, count in self.staleness.items()) / max(sum(self.staleness.values()), 1)
