"""Continuous batching in closed form equals an engine that decodes token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.parts.forecast.simulator.decoding import Attempt, DecodeQueue
from tests.nightly import examples

BASE_S, PER_ROLLOUT_S = 0.5, 0.25
"""Binary fractions, so that times are exact."""


@dataclass(frozen=True)
class Arrival:
    at_s: float
    lengths: tuple[int, ...]
    prefill_s: float


def token_by_token(arrivals: list[Arrival], max_running: int) -> dict[tuple[int, int], float]:
    """End of each rollout, by the loop of a real engine."""
    now_s, ends_s = 0.0, dict[tuple[int, int], float]()
    to_come = [(arrival.at_s, number, arrival) for number, arrival in enumerate(arrivals)]
    waiting, running = list[tuple[tuple[int, int], int, float]](), dict[tuple[int, int], int]()
    while to_come or waiting or running:
        if not running and not waiting:
            now_s = max(now_s, to_come[0][0])
        while to_come and to_come[0][0] <= now_s:
            _, number, arrival = to_come.pop(0)
            for index, length in enumerate(arrival.lengths):
                waiting.append(((number, index), length, 0.0 if index else arrival.prefill_s))
            # A prefill takes time, in which more may arrive; they join at the next boundary.
            while waiting and len(running) < max_running:
                name, length, prefill_s = waiting.pop(0)
                now_s += prefill_s
                running[name] = length
        now_s += BASE_S + PER_ROLLOUT_S * len(running)
        for name in list(running):
            running[name] -= 1
            if not running[name]:
                del running[name]
                ends_s[name] = now_s
        while waiting and len(running) < max_running:
            name, length, prefill_s = waiting.pop(0)
            now_s += prefill_s
            running[name] = length
    return ends_s


def in_closed_form(arrivals: list[Arrival], max_running: int) -> dict[tuple[int, int], float]:
    queue = DecodeQueue(base_s=BASE_S, per_rollout_s=PER_ROLLOUT_S, max_running=max_running)
    for number, arrival in enumerate(arrivals):
        attempts = [Attempt(number, index, length) for index, length in enumerate(arrival.lengths)]
        queue.submit(arrival.at_s, attempts, arrival.prefill_s)
    queue.advance(1e9)
    ends_s = {(done.attempt.group_id, done.attempt.index): done.finished_s for done in queue.finished}
    assert list(ends_s.values()) == sorted(ends_s.values()), "in the order of their ends"
    return ends_s


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_s=st.integers(0, 200).map(lambda eighths: eighths / 8),
        lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple),
        prefill_s=st.sampled_from([0.0, 0.125, 1.0]),
    ),
    max_size=8,
).map(lambda arrivals: sorted(arrivals, key=lambda arrival: arrival.at_s))


@settings(max_examples=examples(200), deadline=None)
@given(arrivals=ARRIVALS, max_running=st.integers(1, 9))
def test_closed_form_equals_token_by_token(arrivals: list[Arrival], max_running: int) -> None:
    assert in_closed_form(arrivals, max_running) == pytest.approx(token_by_token(arrivals, max_running))


def test_adoption_waits_for_the_step_and_pauses_decoding() -> None:
    queue = DecodeQueue(base_s=1.0, per_rollout_s=0.0, max_running=8)
    queue.submit(0.0, [Attempt(0, 0, 5), Attempt(0, 1, 2)], 0.0)
    assert queue.adopt(2.5, version=7, pause_s=10.0) == 13.0  # the third step ends at 3
    assert queue.generated_tokens == 2 + 2 + 1
    queue.submit(4.0, [Attempt(1, 0, 1)], 0.0)  # during the pause: joins when it is over
    queue.advance(100.0)
    ends = {done.attempt: (done.finished_s, done.first_version, done.last_version) for done in queue.finished}
    assert ends == {
        Attempt(0, 1, 2): (2.0, 0, 0),
        Attempt(1, 0, 1): (14.0, 7, 7),
        Attempt(0, 0, 5): (15.0, 0, 7),
    }
    assert queue.next_finish_s == 2.0
    queue.finished.clear()
    assert queue.next_finish_s == math.inf
