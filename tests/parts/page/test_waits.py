"""Who waited for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.observability.spans import Span
from llamarl.parts.page.document import described, window
from llamarl.parts.page.waits import LIMIT, NOBODY, waits, without
from tests.parts.page.runs import BEGAN_S, add_step, flow_row, make_run, read, span_rows, step_row, write_rows


def test_a_wait_is_for_whoever_works() -> None:
    spans = {
        "generator-0": [Span("generate", 0, 4)],
        "generator-1": [Span("generate", 1, 3)],
        "reward": [Span("score", 4, 5)],
        "trainer": [Span("train", 6, 9)],
    }
    found = waits(spans, 0, 10)
    assert found["trainer"] == {"rollouts": 4, "scores": 1, NOBODY: 2}
    assert found["generator-0"] == {LIMIT: 3, "scores": 1, NOBODY: 2}
    assert found["reward"] == {"rollouts to finish": 4, LIMIT: 3, NOBODY: 2}
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
    assert found == {"trainer": {"rollouts": 2}, "generator-0": {LIMIT: 1}}


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


def later(row: dict, pause_s: float) -> dict:
    """An event of a session that began `pause_s` later than it would have without a pause."""
    if "spans" in row:
        moved = {
            name: [[kind, *(at_s + pause_s for at_s in ends)] for kind, *ends in of_one]
            for name, of_one in row["spans"].items()
        }
        return row | {"at_s": row["at_s"] + pause_s, "spans": moved}
    groups = [[group[0], *(at_s + pause_s for at_s in group[1:])] for group in row["groups"]]
    return row | {"groups": groups} | {name: row[name] + pause_s for name in row if name.endswith(("ed_s", "at_s"))}


@pytest.mark.parametrize("has_end", [True, False], ids=["interrupted", "killed"])
def test_a_pause_between_two_sessions_is_no_time_of_the_run(tmp_path: Path, has_end: bool) -> None:
    """An hour between an end, or a kill, and `--resume`: neither the axis nor a share of the waits has it."""
    folder, pause_s = make_run(tmp_path / "made", steps=10, end=None), 3600.0
    if has_end:
        write_rows(folder / "events.jsonl", [{"kind": "end", "at_s": BEGAN_S + 20.0, "end": "interrupted"}])
    start = {"kind": "start", "at_s": BEGAN_S + 20.0 + pause_s, "resumed": True}
    events = [later(row, pause_s) for step in range(11, 21) for row in (span_rows(step), flow_row(step))]
    write_rows(folder / "events.jsonl", [start, *events])
    write_rows(folder / "metrics.jsonl", [step_row(step, wall_s=2.0 * (step - 10)) for step in range(11, 21)])
    data = read(folder)
    whole = make_run(tmp_path / "whole", steps=20, end=None)
    assert window(data) == window(read(whole)), "as if nobody had stopped it"
    assert data.flows == read(whole).flows
    assert list(data.columns["wall_s"]) == [2.0 * step for step in range(1, 21)]
    assert described(data)["pauses"] == [[20.0, 3600.0]]
    assert not any(share > 1000 * 60 for causes in window(data)["waits"].values() for share in causes.values())


def test_a_second_pause_adds_to_the_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "made", steps=2, end=None)
    for at_s in (100.0, 300.0):
        write_rows(folder / "events.jsonl", [{"kind": "start", "at_s": BEGAN_S + at_s, "resumed": True}])
    add_step(folder, 3)
    assert read(folder).pauses == [(BEGAN_S + 4.0, 96.0), (BEGAN_S + 4.0, 200.0)]


def test_stopping_and_starting_executors_belong_to_the_pause(tmp_path: Path) -> None:
    """Nobody works while a session winds down and while the next one starts: the controller is not to blame."""
    folder = make_run(tmp_path / "made", steps=10, end=None)
    end = {"kind": "end", "at_s": BEGAN_S + 25.0, "end": "interrupted", "reason": ""}
    start = {"kind": "start", "at_s": BEGAN_S + 100.0, "resumed": True}
    phase = {"kind": "phase", "at_s": BEGAN_S + 101.0, "text": "starting executors"}
    events = [later(row, 150.0) for step in range(11, 21) for row in (span_rows(step), flow_row(step))]
    write_rows(folder / "events.jsonl", [end, start, phase, *events])
    data, whole = read(folder), read(make_run(tmp_path / "whole", steps=20, end=None))
    assert window(data) == window(whole)
    assert data.pauses == [(BEGAN_S + 20.0, 150.0)]
    times = [at_s for _, at_s, _ in data.texts]
    assert times == sorted(times) and max(times) == BEGAN_S + 20.0
