"""Continuous batching of one generator replica, in closed form between events.

While n rollouts run, a decode step takes a + b * n seconds and adds one token to each, so a rollout of length L that
joins after step s ends with step s + L. Between two changes of n, time is linear in steps: a heap of end steps contains
the next change, and nothing is computed per token.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Container
from typing import NamedTuple

STEP_TOLERANCE = 1e-9
"""Relative tolerance of a time at a step boundary, for rounding."""


class Attempt(NamedTuple):
    """One rollout to decode, or one of its segments."""

    group_id: int
    index: int
    num_tokens: int
    earlier_tokens: int = 0
    """Tokens of earlier segments."""
    later_tokens: int = 0
    """Tokens of later segments."""


class Decoded(NamedTuple):
    """One complete rollout, or one with its tokens at the time of its withdrawal."""

    attempt: Attempt
    finished_s: float
    first_version: int
    last_version: int
    end_step: int
    """Decode step of its last token."""
    is_last: bool
    """No rollout of its group is left here."""


class DecodeQueue:
    """A state machine over virtual time. Changes take effect at the next step boundary, as in a real engine."""

    def __init__(self, *, base_s: float, per_rollout_s: float, max_running: int) -> None:
        """A decode step takes `base_s` (a) plus `per_rollout_s` (b) per rollout. Rollouts beyond `max_running` wait."""
        self.base_s = base_s
        self._per_rollout_s = per_rollout_s
        self._max_running = max_running
        self._boundary_s = 0.0
        self.num_steps = 0
        """Decode steps up to the last boundary."""
        self._running = list[tuple[int, Attempt, int]]()  # heap of (end step, attempt, first version)
        self._waiting = deque[tuple[Attempt, float]]()  # with the seconds of prefill that it brings
        self.finished = deque[Decoded]()
        """Rollouts in the order of their ends. An end may be less than one step in the future."""
        self._left = Counter[int]()
        """Unfinished attempts of each group."""
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
        """Virtual time of the next end of a rollout if nothing else happens. Infinite if none runs."""
        return self.finished[0].finished_s if self.finished else self.next_end_s

    @property
    def next_end_s(self) -> float:
        """Same for rollouts that are still running."""
        if not self._running:
            return math.inf
        return self._boundary_s + (self._running[0][0] - self.num_steps) * self.step_s

    def submit(self, now_s: float, attempts: list[Attempt], prefill_s: float) -> None:
        """Queues attempts of one group. The first one to be decoded includes `prefill_s` for their prompt."""
        self.advance(now_s)
        self._left.update(attempt.group_id for attempt in attempts)
        self._waiting.extend((attempt, 0.0 if number else prefill_s) for number, attempt in enumerate(attempts))
        self._admit()

    def adopt(self, now_s: float, version: int, pause_s: float) -> float:
        """Pauses decoding for `pause_s` from the next boundary on. Returns the time when it continues with the new
        version."""
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
        """Returns waiting or running attempts, with their tokens by the first step boundary at or after `now_s`."""
        self.advance(now_s)
        left = [(attempt, attempt.num_tokens, self.version) for attempt, _ in self._waiting]
        left += [(attempt, end_step - self.num_steps, first) for end_step, attempt, first in self._running]
        return [
            Decoded(attempt._replace(num_tokens=attempt.num_tokens - missing), self._boundary_s, first, self.version,
                    self.num_steps, is_last=False)
            for attempt, missing, first in left
        ]  # fmt: skip

    def withdraw(self, now_s: float, group_ids: Container[int]) -> list[Decoded]:
        """Removes attempts of these groups. Returns them with their tokens."""
        withdrawn = [one for one in self.so_far(now_s) if one.attempt.group_id in group_ids]
        self._waiting = deque(one for one in self._waiting if one[0].group_id not in group_ids)
        self._running = [one for one in self._running if one[1].group_id not in group_ids]
        heapq.heapify(self._running)
        for one in withdrawn:
            self._left.pop(one.attempt.group_id, None)
        self._admit()
        return withdrawn

    def _finish(self) -> None:
        """Removes finished rollouts from the batch at a boundary, and admits waiting ones."""
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
