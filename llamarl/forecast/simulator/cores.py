"""Executors that share the cores of one machine: each core's time is split evenly among those who want it.

A simulation runs as if every executor had cores of its own. While executors want K threads on c cores, all of them go
c / K as fast (processor sharing), so the order of events stays and only the clock is stretched: by max(1, K / c).
The controller works too: whenever it does, K is larger by one. It is taken to work evenly over the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llamarl.observability.accounting import account
from llamarl.observability.metrics import StepMetrics
from llamarl.observability.spans import Span, merged

Spans = Mapping[str, Sequence[Span]]


class SharedCores:
    """Simulated seconds, mapped to those on shared cores."""

    def __init__(
        self, spans: Spans, threads: Mapping[str, int], cores: float, controller_s: float, start_s: float = 0.0
    ) -> None:
        """
        Args:
            spans: of every executor, in simulated seconds.
            threads: that each executor keeps busy while it works; 0 for one that does not use the cores.
            cores: of the machine, or a container's part of them.
            controller_s: processor seconds of the controller from `start_s` on.
            start_s: of the loop; before it the controller waits.
        """
        changes = [
            (at_s, change * threads[name])
            for name, work in spans.items()
            for start_s, end_s in merged(work)  # an executor has one thread for all it does
            for at_s, change in ((start_s, 1), (end_s, -1))
        ]
        changes.sort()
        times_s = np.array([0.0, *(at_s for at_s, _ in changes)])
        wanted = np.cumsum([0, *(change for _, change in changes)])[:-1]
        lengths_s = np.diff(times_s)
        alone = np.maximum(1.0, wanted / cores)
        beside = (np.maximum(1.0, (wanted + 1) / cores) - alone) * (times_s[:-1] >= start_s)
        # With controller_s / T the controller's share of the loop, T = sum(lengths * (alone + beside * share)).
        in_loop = np.diff(np.maximum(times_s, start_s))
        without_s, with_s = float(in_loop @ alone), float(in_loop @ beside) * controller_s
        total_s = (without_s + math.sqrt(without_s**2 + 4 * with_s)) / 2
        share = min(1.0, controller_s / total_s) if total_s else 0.0
        self._simulated_s = times_s
        self._real_s = np.concatenate([[0.0], np.cumsum(lengths_s * (alone + share * beside))])

    def __call__(self, simulated_s: float) -> float:
        """Seconds on the shared cores; after the last work both clocks go at the same pace."""
        after_s = max(0.0, simulated_s - float(self._simulated_s[-1]))
        return float(np.interp(simulated_s, self._simulated_s, self._real_s)) + after_s

    def spans(self, spans: Spans) -> dict[str, list[Span]]:
        """The same work on the shared cores."""
        return {
            name: [Span(span.name, self(span.start_s), self(span.end_s)) for span in work]
            for name, work in spans.items()
        }

    def steps(self, steps: Sequence[StepMetrics], loop_start_s: float, spans: Spans) -> list[StepMetrics]:
        """Step metrics on the shared cores; `spans` are those of `self.spans`."""
        start_s = begin_s = self(loop_start_s)
        stretched = list[StepMetrics]()
        for step in steps:
            end_s = self(loop_start_s + step.wall_s)
            slower = (end_s - begin_s) / step.step_s
            stretched.append(
                replace(
                    step,
                    wall_s=end_s - start_s,
                    step_s=end_s - begin_s,
                    samples_per_s=step.samples_per_s / slower,
                    generated_tokens_per_s=step.generated_tokens_per_s / slower,
                    sync_s=step.sync_s * slower,
                    busy_share=account(spans, begin_s, end_s).busy_share,
                )
            )
            begin_s = end_s
        return stretched
