"""What a run says besides its numbers, as it happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamarl.observability.screen import NullScreen
from llamarl.observability.sinks import EventLog, Flow, RecordedScreen, machine
from llamarl.observability.spans import Span


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_phases_and_warnings_are_kept_and_shown(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = EventLog(path, lambda failure: pytest.fail(str(failure)))
    screen = RecordedScreen(NullScreen(), events)
    for done in range(3):
        screen.phase("loading", done, 3)
    screen.warn("slow disk")
    events.close()
    phase, warning = rows(path)
    assert (phase["kind"], phase["text"]) == ("phase", "loading"), "once, however often it goes on"
    assert (warning["kind"], warning["text"]) == ("warning", "slow disk")
    assert "slow disk" in capsys.readouterr().err
    assert warning["at_s"] >= phase["at_s"] > 1.6e9


def test_a_phase_that_comes_again_is_kept_again(path: Path, make_view) -> None:
    events = EventLog(path, lambda failure: pytest.fail(str(failure)))
    screen = RecordedScreen(NullScreen(), events)
    for _ in range(2):
        screen.phase("evaluating")
        screen.show(make_view())
    events.close()
    assert [row["text"] for row in rows(path)] == ["evaluating", "evaluating"]


def test_spans_come_in_rows_of_a_second(path: Path) -> None:
    events = EventLog(path, lambda failure: pytest.fail(str(failure)))
    for number in range(50):
        events.add_spans("trainer", [Span("train", number, number + 0.5)])
        events.flush()
    events.flush(is_last=True)
    events.flush(is_last=True)
    events.close()
    first, second = rows(path)
    assert first["spans"] == {"trainer": [["train", 0, 0.5]]}
    assert len(second["spans"]["trainer"]) == 49


def test_the_flow_of_a_step(path: Path) -> None:
    now, events = [0.0], EventLog(path, lambda failure: pytest.fail(str(failure)))
    flow = Flow(lambda: now[0], events)
    for at_s, stage, ids in [
        (1.0, "admitted", [7, 8]), (2.0, "generated", [7]), (3.0, "scored", [7, 8]), (4.0, "taken", [7]),
    ]:  # fmt: skip
        now[0] = at_s
        flow.mark(stage, ids)
    flow.done(3, [7], 5.0, 0.25, float("nan"))
    flow.mark("taken", [8])
    flow.done(4, [8, 9], 6.0, 0.25, 0.5)
    events.close()
    first, second = rows(path)
    assert first["groups"] == [[7, 1.0, 2.0, 3.0, 4.0]]
    assert (first["step"], first["trained_s"], first["published_s"]) == (3, 5.0, 5.25)
    assert "adopted_s" not in first, "it was interrupted"
    assert second["groups"] == [[8, 1.0, 3.0, 3.0, 4.0], [9]], "what was passed over was passed at once; 9 is unknown"
    assert second["adopted_s"] == 6.5


def test_a_group_that_starts_again_forgets_what_was(path: Path) -> None:
    now, events = [1.0], EventLog(path, lambda failure: pytest.fail(str(failure)))
    flow = Flow(lambda: now[0], events)
    flow.mark("admitted", [1])
    flow.mark("generated", [1])
    now[0] = 5.0
    flow.mark("admitted", [1])
    flow.done(1, [1], 6.0, 0.1, 0.1)
    events.close()
    assert rows(path)[0]["groups"] == [[1, 5.0]]


def test_groups_that_never_get_further_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarl.observability.sinks.MAX_GROUPS", 3)
    flow = Flow(lambda: 0.0)
    flow.mark("admitted", range(10))
    assert list(flow._times) == [7, 8, 9]


def test_the_machine_says_what_counts_for_speed() -> None:
    found = machine()
    assert found["cores"] >= 1
    assert found["versions"]["torch"]
    json.dumps(found, allow_nan=False)
