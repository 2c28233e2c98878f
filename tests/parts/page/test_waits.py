"""Who waited for whom."""

from __future__ import annotations

import pytest

from llamarl.observability.spans import Span
from llamarl.parts.page.waits import NOBODY, waits, without


def test_a_wait_is_for_whoever_works() -> None:
    spans = {
        "generator-0": [Span("generate", 0, 4)],
        "generator-1": [Span("generate", 1, 3)],
        "reward": [Span("score", 4, 5)],
        "trainer": [Span("train", 6, 9)],
    }
    found = waits(spans, 0, 10)
    assert found["trainer"] == {"rollouts": 4, "scores": 1, NOBODY: 2}
    assert found["generator-0"] == {"the step under way, by the staleness bound": 3, "scores": 1, NOBODY: 2}
    assert found["reward"] == {"rollouts to end": 4, "new rollouts, by the staleness bound": 3, NOBODY: 2}
    for name, of_one in spans.items():
        busy = sum(span.end_s - span.start_s for span in of_one)
        assert busy + sum(found[name].values()) == pytest.approx(10), "all time is work or a wait"


def test_an_environment_that_replies_is_a_cause() -> None:
    spans = {"generator-0": [Span("generate", 0, 2)], "environment": [Span("reply", 1, 5)], "trainer": []}
    found = waits(spans, 0, 6)
    assert found["generator-0"] == {"replies of the environment": 3, NOBODY: 1}
    assert found["trainer"] == {"rollouts": 2, "replies of the environment": 3, NOBODY: 1}
    assert found["environment"] == {"turns": 1, NOBODY: 1}


def test_windows_cut() -> None:
    found = waits({"trainer": [Span("train", 0, 4)], "generator-0": [Span("generate", 3, 9)]}, 2, 6)
    assert found == {"trainer": {"rollouts": 2}, "generator-0": {"the step under way, by the staleness bound": 1}}


@pytest.mark.parametrize(
    ("intervals", "others", "rest"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(2, 3), (5, 12)], [(0, 2), (3, 5)]),
        ([(0, 2), (4, 6)], [(1, 5)], [(0, 1), (5, 6)]),
        ([(0, 2)], [(0, 2)], []),
    ],
)
def test_what_is_left(intervals: list, others: list, rest: list) -> None:
    assert without(intervals, others) == rest
