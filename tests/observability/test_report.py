from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from llamarl.observability.files import write_atomically
from llamarl.observability.metrics import share_error
from llamarl.observability.report import RunFile, RunSummary, SpeedVerdict, render_summary, write_summary
from llamarl.observability.screen import CompletionView


@pytest.fixture
def make_summary(make_eval):
    def make(**changes):
        values = {
            "name": "running-total",
            "end": "finished",
            "steps": 100,
            "start_s": 83.0,
            "wall_s": 112.0,
            "samples_per_s": 114.2,
            "unaccounted_share": 0.012,
            "overlap_share": 0.55,
            "busy_share": {"generator-0": 0.97, "trainer": 0.58},
            "staleness_max": 1,
            "staleness_limit": 2,
            "max_staleness": 1,
            "invalid_share": 0.0,
            "verdict": SpeedVerdict(
                bound="generator-bound", reason="the trainer waits", window="steps 1 to 100, 1m 52s"
            ),
            "before": (make_eval(0, 0.184, k=4),),
            "after": (make_eval(100, 0.781, k=4),),
            "completions": (CompletionView(prompt="a" * 500, response="b\x1b[2J" * 200, reward=1.0, advantage=0.5),),
            "files": (RunFile(path=Path("runs/metrics.jsonl"), meaning="one line per step"),),
            "warnings": ("3 rows lost",),
        }
        return RunSummary(**(values | changes))

    return make


def test_report_says_all(make_summary):
    text = render_summary(make_summary())
    for words in (
        *(
            "finished 100 steps in 1m 52s, after a start-up of",
            "18.4%       78.1%    +59.7 points (standard error 3.5)",
        ),
        *(
            "pass@4",
            "generator-bound over steps 1 to 100, 1m 52s: the trainer waits",
            "generator-0 3%, trainer 42%",
            "all idle 1.2%",
        ),
        *("at most 1 of 2 (S 1)", "warning: 3 rows lost", "runs: metrics.jsonl", "advantage +0.50"),
    ):
        assert words in text, words
    assert "\x1b" not in text


def test_a_failed_run_never_looks_finished(make_summary):
    text = render_summary(make_summary(end="failed", end_reason="loss is nan at step 12", steps=12, after=()))
    assert text.startswith("running-total: FAILED: loss is nan at step 12\nafter 12 steps")
    assert "18.4%           –" in text


def test_without_evaluation_there_is_no_table(make_summary):
    assert "held-out" not in render_summary(make_summary(before=(), after=()))


def test_an_evaluation_without_verdicts(make_summary, make_eval):
    nobody = replace(make_eval(100, math.nan, k=4), num_invalid=1024, invalid_reason="grader\nmissing")
    text = render_summary(make_summary(after=(nobody,)))
    assert "accuracy                   18.4%         nan\n" in text, "no change is told"
    assert "invalid                        0       1,024    grader ↵ missing" in text


def test_a_run_that_went_on_tells_the_steps_it_took_the_time_for(make_summary):
    assert "finished steps 91 to 100 in 1m 52s" in render_summary(make_summary(first_step=91))
    assert "finished no new step in" in render_summary(make_summary(first_step=101))


@pytest.mark.parametrize(
    ("share", "num", "low", "high"), [(0.0, 200, 0.0, 0.005), (1.0, 200, 0.995, 1.0), (0.5, 100, 0.45, 0.55)]
)
def test_errors_of_shares_are_wilsons(share, num, low, high):
    """Its interval at one standard error, written out: center (p + 1 / 2n) / (1 + 1 / n)."""
    center, half = (share + 0.5 / num) / (1 + 1 / num), share_error(share, num)
    assert (center - half, center + half) == (pytest.approx(low, abs=3e-4), pytest.approx(high, abs=3e-4))
    assert half > 0


def test_json_is_flat_and_strict(make_summary, tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, make_summary(samples_per_s=math.nan, extra={"peak_bytes": 1e9}))
    row = json.loads(path.read_text())
    assert (row["accuracy_before"], row["accuracy_after"], row["end"]) == (0.184, 0.781, "finished")
    assert (row["samples_per_s"], row["busy_share.trainer"], row["extra.peak_bytes"]) == (None, 0.58, 1e9)
    assert row["bound"] == "generator-bound"
    assert not any(isinstance(value, dict | list) for value in row.values())
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def refuse(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
