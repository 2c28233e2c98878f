"""The key numbers at the top of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamarl.parts.page.findings import findings
from llamarl.parts.page.headline import fall, key_numbers
from tests.parts.page.runs import BEGAN_S, CONFIG, eval_row, make_run, read, step_row, write_rows


def keys(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in key_numbers(read(folder))}


def evaluated(folder: Path, *accuracies: float) -> Path:
    """A run with these accuracies of 199 held-out problems, 25 steps apart."""
    make_run(folder, steps=0, end=None)
    for place, accuracy in enumerate(accuracies):
        rows = [step_row(step) for step in range(25 * place + 1, 25 * place + 26)]
        write_rows(folder / "metrics.jsonl", [eval_row(25 * place, accuracy, 199), *rows])
    return folder


def test_a_run_that_learned(tmp_path: Path) -> None:
    found = keys(make_run(tmp_path / "made"))
    assert list(found) == ["accuracy", "reward", "steps", "time", "staleness"]
    accuracy = found["accuracy"]
    assert (accuracy["value"], accuracy["level"], accuracy["chart"]) == ("60.0%", "good", "solve")
    assert "from 20.0%" in accuracy["detail"] and "+40.0 ±" in accuracy["detail"]
    assert "mean of last 4 steps, from " in found["reward"]["detail"], "the legend of the chart shows the last step"
    assert (found["steps"]["value"], found["time"]["value"]) == ("20 of 20", "40s")
    assert (found["staleness"]["value"], found["staleness"]["level"]) == ("1 of 2", "")


def test_a_fall_from_the_best_accuracy_is_in_the_key_numbers_and_an_advice(tmp_path: Path) -> None:
    """13.1 % at step 75 and 7.0 % at step 100, of 199 problems."""
    folder = evaluated(tmp_path / "made", 0.04, 0.09, 0.126, 26 / 199, 14 / 199)
    accuracy = keys(folder)["accuracy"]
    assert accuracy["level"] == "advice"
    assert accuracy["detail"] == "best 13.1% at step 75, now 7.0%"
    (claim,) = (one for one in findings(read(folder)) if one["chart"] == "solve")
    assert claim["level"] == "advice" and "13.1% (step 75)" in claim["text"] and "7.0%" in claim["text"]
    for option in ("trainer.learning_rate", "reference.kl_coefficient", "rollout.group_size", "step 75"):
        assert option in claim["advice"]


@pytest.mark.parametrize("accuracies", [(0.04, 0.131, 0.12), (0.131, 0.131), (0.2,), (0.0, 0.5, 0.9)])
def test_what_lies_within_its_error_is_no_fall(tmp_path: Path, accuracies: tuple[float, ...]) -> None:
    assert fall(read(evaluated(tmp_path / "made", *accuracies)).evals) is None


def test_more_evaluations_need_a_deeper_fall(tmp_path: Path) -> None:
    """The best of many is high by chance."""
    few = evaluated(tmp_path / "few", 0.10, 26 / 199, 14 / 199)
    many = evaluated(tmp_path / "many", *[0.10] * 28, 26 / 199, 14 / 199)
    assert fall(read(few).evals) and not fall(read(many).evals)


def test_what_a_run_cannot_have_is_left_out(tmp_path: Path) -> None:
    """A supervised run has a loss, and neither rewards nor staleness; a run that has just begun has its steps."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(steps=40, rate=1e-4))
    start = {"kind": "start", "at_s": BEGAN_S, "work": "sft"}
    write_rows(folder / "events.jsonl", [start])
    assert list(keys(folder)) == ["steps"]
    rows = [{"kind": "step", "step": step, "loss": 3.0 / step, "wall_s": step, "step_s": 1.0} for step in range(1, 41)]
    write_rows(folder / "metrics.jsonl", rows)
    write_rows(folder / "events.jsonl", [{"kind": "end", "at_s": BEGAN_S + 40, "end": "finished", "reason": ""}])
    data = read(folder)
    assert (data.work, data.state()[0]) == ("sft", "finished")
    assert list(keys(folder)) == ["loss", "steps", "time"]
    assert [claim["chart"] for claim in findings(data)] == ["loss"]


def test_a_supervised_run_of_an_older_version_is_finished_when_its_steps_are_done(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(steps=3, rate=1e-4))
    for step, state in ((1, "running"), (2, "running"), (3, "finished")):
        write_rows(folder / "metrics.jsonl", [{"kind": "step", "step": step, "loss": 1.0}])
        assert (read(folder).work, read(folder).state()[0]) == ("sft", state)
