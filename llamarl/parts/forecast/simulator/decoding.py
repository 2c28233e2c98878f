"""Continuous batching of one generator replica, in closed form between events.

While n rollouts run, a decode step takes a + b * n seconds and gives each of them one token, so a rollout of length L
that joins after step s ends with step s + L. Between two changes of n time is linear in steps: a heap of end steps says
when the next change is, and nothing is done per token.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Container
from typing import NamedTuple

STEP_TOLERANCE = 1e-9
"""Share of a decode step by which a time may miss its boundary through rounding."""


class Attempt(NamedTuple):
    """One rollout to decode, or a segment of one."""

    group_id: int
    index: int
    num_tokens: int
    earlier_tokens: int = 0
    """Tokens of the segments before this one."""
    later_tokens: int = 0
    """Tokens left for the segments after this one."""


class Decoded(NamedTuple):
    """One rollout that has all its tokens, or those that it had when it was withdrawn."""

    attempt: Attempt
    finished_s: float
    first_version: int
    last_version: int
    end_step: int
    """Decode step that gave its last token."""
    is_last: bool
    """Nothing of its group is left here."""


class DecodeQueue:
    """A state machine over virtual time. Changes take effect at the next step boundary, as in a real engine."""

    def __init__(self, *, base_s: float, per_rollout_s: float, max_running: int) -> None:
        """`base_s` (a) and `per_rollout_s` (b) make up a decode step; more than `max_running` rollouts wait in line."""
        self.base_s = base_s
        self._per_rollout_s = per_rollout_s
        self._max_running = max_running
        self._boundary_s = 0.0
        self.num_steps = 0
        """Decode steps up to the last boundary."""
        self._running = list[tuple[int, Attempt, int]]()  # heap of (end step, attempt, first version)
        self._waiting = deque[tuple[Attempt, float]]()  # with the seconds of prefill that it brings
        self.finished = deque[Decoded]()
        """Rollouts in the order of their ends; an end may lie less than one step in the future."""
        self._left = Counter[int]()
        """Attempts of each group that have not ended."""
        self.version = 0
        self.generated_tokens = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def step_s(self) -> float:
        """Seconds of one decode step now."""
        return self.base_s + self._per_rollout_s * len(self._running)

    @property
    def next_finish_s(self) -> float:
        """Time when the next rollout ends if nothing else happens, in virtual seconds; infinite when none runs."""
        return self.finished[0].finished_s if self.finished else self.next_end_s

    @property
    def next_end_s(self) -> float:
        """The same, of those that still run."""
        if not self._running:
            return math.inf
        return self._boundary_s + (self._running[0][0] - self.num_steps) * self.step_s

    def submit(self, now_s: float, attempts: list[Attempt], prefill_s: float) -> None:
        """Attempts of one group join the line; the first one to be decoded brings the `prefill_s` of their prompt."""
        self.advance(now_s)
        self._left.update(attempt.group_id for attempt in attempts)
        self._waiting.extend((attempt, 0.0 if number else prefill_s) for number, attempt in enumerate(attempts))
        self._admit()

    def adopt(self, now_s: float, version: int, pause_s: float) -> float:
        """Decoding stands still for `pause_s` from the next boundary on; when it goes on, with the new version."""
        self.advance(now_s)
        self._boundary_s += pause_s
        self.version = version
        return self._boundary_s

    def advance(self, now_s: float) -> None:
        """Decodes up to the first step boundary at or after `now_s`."""
        while self._running:
            step_s = self.step_s
            due = max(0, math.ceil((now_s - self._boundary_s) / step_s - STEP_TOLERANCE))
            steps = min(due, self._running[0][0] - self.num_steps)
            self.num_steps += steps
            self._boundary_s += steps * step_s
            self.generated_tokens += steps * len(self._running)
            if self._running[0][0] > self.num_steps:
                return
            self._finish()
        self._boundary_s = max(self._boundary_s, now_s)

    def so_far(self, now_s: float) -> list[Decoded]:
        """Attempts that wait or run, with the tokens that they have by the first step boundary at or after `now_s`."""
        self.advance(now_s)
        left = [(attempt, attempt.num_tokens, self.version) for attempt, _ in self._waiting]
        left += [(attempt, end_step - self.num_steps, first) for end_step, attempt, first in self._running]
        return [
            Decoded(attempt._replace(num_tokens=attempt.num_tokens - missing), self._boundary_s, first, self.version,
                    self.num_steps, is_last=False)
            for attempt, missing, first in left
        ]  # fmt: skip

    def withdraw(self, now_s: float, group_ids: Container[int]) -> list[Decoded]:
        """Takes attempts of these groups away, with the tokens that they have."""
        withdrawn = [one for one in self.so_far(now_s) if one.attempt.group_id in group_ids]
        self._waiting = deque(one for one in self._waiting if one[0].group_id not in group_ids)
        self._running = [one for one in self._running if one[1].group_id not in group_ids]
        heapq.heapify(self._running)
        for one in withdrawn:
            self._left.pop(one.attempt.group_id, None)
        self._admit()
        return withdrawn

    def _finish(self) -> None:
        """Takes what ends at the boundary out of the batch and admits who waits."""
        while self._running and self._running[0][0] == self.num_steps:
            _, attempt, first_version = heapq.heappop(self._running)
            self._left[attempt.group_id] -= 1
            if is_last := not self._left[attempt.group_id]:
                del self._left[attempt.group_id]
            self.finished.append(
                Decoded(attempt, self._boundary_s, first_version, self.version, self.num_steps, is_last)
            )
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            attempt, prefill_s = self._waiting.popleft()
            self._boundary_s += prefill_s
            heapq.heappush(self._running, (self.num_steps + attempt.num_tokens, attempt, self.version))
