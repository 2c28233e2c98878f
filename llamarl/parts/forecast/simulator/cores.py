"""Executors that share the cores of one machine: each core's time is divided evenly among the running threads.

A simulation runs as if every executor had separate cores. While executors run K threads on c cores, all of them run at
c / K of the speed (processor sharing). The order of events stays, and only the clock is stretched: by max(1, K / c),
and by 1 + (contention - 1) (min(K, max(c, 2)) - 1), because concurrent threads cost caches and waits. The controller is
one more thread whenever it sends or receives a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llamarl.observability.metrics import StepMetrics
from llamarl.observability.report import account
from llamarl.observability.spans import Span, merged

Spans = Mapping[str, Sequence[Span]]


def in_turn(work: Sequence[tuple[float, float]]) -> list[Span]:
    """Returns the spans of one thread, given start times and durations of its work."""
    spans, free_s = list[Span](), 0.0
    for at_s, seconds in work:
        start_s, free_s = max(at_s, free_s), max(at_s, free_s) + seconds
        spans.append(Span("message", start_s, free_s))
    return spans


class SharedCores:
    """Maps simulated seconds to seconds on shared cores."""

    def __init__(self, spans: Spans, threads: Mapping[str, int], cores: float, contention: float = 1.0) -> None:
        """
        Args:
            spans: spans of every executor and of the controller, in simulated seconds.
            threads: threads of each while it works. 0 means that it does not use the cores.
            cores: cores of the machine, or a container's CPU limit.
            contention: slowdown factor while two threads run.
        """
        changes = sorted(
            (at_s, change * threads[name])
            for name, work in spans.items()
            for start_s, end_s in merged(work)  # an executor has one thread for all it does
            for at_s, change in ((start_s, 1), (end_s, -1))
        )
        self._simulated_s = np.array([0.0, *(at_s for at_s, _ in changes)])
        wanted = np.cumsum([0, *(change for _, change in changes)])[:-1]
        beside = np.clip(wanted, 1, max(2.0, cores)) - 1  # further threads wait for a core and disturb none
        stretch = np.maximum(1.0, wanted / cores) * (1 + (contention - 1) * beside)
        stretched_s = np.diff(self._simulated_s) * stretch
        self._real_s = np.concatenate([[0.0], np.cumsum(stretched_s)])

    def __call__(self, simulated_s: float) -> float:
        """Returns the seconds on the shared cores. After the last span both clocks run at the same rate."""
        after_s = max(0.0, simulated_s - float(self._simulated_s[-1]))
        return float(np.interp(simulated_s, self._simulated_s, self._real_s)) + after_s

    def spans(self, spans: Spans) -> dict[str, list[Span]]:
        """Returns the spans on the shared cores."""
        return {
            name: [Span(span.name, self(span.start_s), self(span.end_s)) for span in work]
            for name, work in spans.items()
        }

    def steps(self, steps: Sequence[StepMetrics], loop_start_s: float, spans: Spans) -> list[StepMetrics]:
        """Returns step metrics on the shared cores. `spans` is the result of `self.spans`."""
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
