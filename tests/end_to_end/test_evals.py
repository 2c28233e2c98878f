"""Several sets of held-out problems in one run: what each finds, a run that is killed and goes on, a replay, `eval`."""

from __future__ import annotations

import json
import math
import signal
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import llamarl
from tests.end_to_end.test_resume import SYNCHRONOUS
from tests.end_to_end.tiny import Command, llamarl_here, rows
from tests.nightly import nightly

EVEN, THIRDS = "tests.executors.rewards:EvenLength", "tests.executors.rewards:Thirds"
TOML = f"""
name = "tiny"
steps = 5
model = {{{{path = "{{model}}"}}}}
reward = {{{{parts = ["{EVEN}"]}}}}

[data]
train = {{{{name = "running_total", count = 300, first = 100}}}}

[[data.eval]]
label = "greedy"
name = "running_total"
count = 12

[[data.eval]]
label = "sampled"
name = "running_total"
count = 8
samples = 4
every_steps = 2
max_new_tokens = 9

[[data.eval]]
label = "thirds"
name = "list_functions"
count = 6
template = "write {{{{question}}}}: "
samples = 3
reward = "{THIRDS}"
every_steps = 1

[rollout]
prompts_per_step = 2
group_size = 3
max_new_tokens = 12

[screen]
kind = "lines"
"""
NAMES = ["greedy", "sampled", "thirds"]
STEADY = [word for name, value in zip(SYNCHRONOUS[::2], SYNCHRONOUS[1::2], strict=True)
          if name != "--reward.parts" for word in (name, value)]  # fmt: skip
TIMES = {"wall_s", "policy_version_max"}


@pytest.fixture
def several(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "several.toml"
    path.write_text(TOML.format(model=model))
    return path


def evals(folder: Path) -> list[dict[str, Any]]:
    """Evaluations on record, without what the machine's speed decides."""
    found = (row for row in rows(folder / "tiny/metrics.jsonl") if row["kind"] == "eval")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in found]


def test_each_set_has_its_schedule_its_samples_and_its_reward(tmp_path: Path, several: Path) -> None:
    done = llamarl_here("train", several, "--output", tmp_path, *STEADY)
    assert done.returncode == 0, done.stderr
    found = evals(tmp_path)
    steps = {name: [row["step"] for row in found if row["name"] == name] for name in NAMES}
    assert steps == {"greedy": [0, 5], "sampled": [0, 2, 4, 5], "thirds": [0, 1, 2, 3, 4, 5]}
    by_name = {row["name"]: row for row in found}
    assert {name: (row["num_prompts"], row["k"]) for name, row in by_name.items()} == {
        "greedy": (12, 1), "sampled": (8, 4), "thirds": (6, 3),
    }  # fmt: skip
    assert by_name["sampled"]["mean_response_tokens"] <= 9 < by_name["greedy"]["mean_response_tokens"]
    assert {name for row in found if row["num_invalid"] for name in (row["name"], row["invalid_reason"])} == {
        "thirds", "three divides its length",
    }  # fmt: skip
    for row in found:
        if row["accuracy"] is not None:
            assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
    assert {key for key in by_name["thirds"] if key.startswith("pass_at.")} == {"pass_at.1", "pass_at.2", "pass_at.3"}
    assert "held-out sampled at step 2: accuracy" in done.stdout
    heads = [line.split("  ")[0] for line in done.stdout.splitlines() if line.endswith("before       after    change")]
    assert heads == ["held-out greedy (12)", "held-out sampled (8)", "held-out thirds (6)"]
    summary = json.loads((tmp_path / "tiny/summary.json").read_text())
    assert summary["accuracy_after.greedy"] == by_name["greedy"]["accuracy"]
    assert "accuracy_after" not in summary
    page = llamarl_here("report", tmp_path / "tiny", "--output", tmp_path / "page.html")
    assert page.returncode == 0, page.stderr
    assert llamarl.open_run(tmp_path / "tiny").evals()[0]["name"] == "greedy"


@nightly("test_keeping.py kills runs and resumes them")
def test_a_run_that_is_killed_goes_on_to_the_same_evaluations(tmp_path: Path, several: Path) -> None:
    """And `replay` has nothing to say of them: they are no part of what is learnt."""
    steps = 24
    whole = llamarl_here("train", several, "--output", tmp_path / "whole", "--steps", steps, *STEADY)
    assert whole.returncode == 0, whole.stderr
    command = ("train", several, "--output", tmp_path / "cut", "--steps", steps, *STEADY)
    killed = Command.start(tmp_path, *command)
    metrics = tmp_path / "cut/tiny/metrics.jsonl"
    killed.until(lambda: metrics.exists() and b'"step": 3,' in metrics.read_bytes())
    assert killed.end(signal.SIGKILL)[0] == -signal.SIGKILL
    resumed = llamarl_here(*command, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    first, second = evals(tmp_path / "whole"), evals(tmp_path / "cut")
    assert first[:3] == second[:3] and [row["name"] for row in first[:3]] == NAMES, "before training"
    assert first[-3:] == second[-3:] and {row["step"] for row in first[-3:]} == {steps}
    assert first[-3:] != first[:3], "nothing was learnt, so nothing was compared"
    summaries = [json.loads((tmp_path / one / "tiny/summary.json").read_text()) for one in ("whole", "cut")]
    same = [{name: value for name, value in one.items() if name.startswith("accuracy")} for one in summaries]
    assert same[0] == same[1] and len(same[0]) > 6, "before is before the run, not before this life"
    replayed = llamarl_here("replay", tmp_path / "cut/tiny", "--steps", "1:3")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@nightly("a run of its own; parts/answers/test_eval.py evaluates by day")
def test_eval_repeats_the_end_of_the_run(tmp_path: Path, several: Path) -> None:
    """All sets with their own settings, some of them, other numbers of samples, and two models."""
    assert llamarl_here("train", several, "--output", tmp_path, *STEADY).returncode == 0
    run, export = tmp_path / "tiny", tmp_path / "export"
    assert llamarl_here("export", run, export).returncode == 0
    command = ("eval", export, "--config", run / "config.toml")
    done = llamarl_here(*command, "--json", "--output", tmp_path / "said.jsonl")
    assert done.returncode == 0, done.stderr
    last = {row["name"]: row for row in evals(tmp_path)}
    for row in map(json.loads, done.stdout.splitlines()):
        other = last.pop(row["name"])
        assert {name: value for name, value in row.items() if name in other} | {"step": 5} == other | {
            "policy_version_min": 0
        }
    assert not last
    said = rows(tmp_path / "said.jsonl")
    assert {name: len(list(of)) for name, of in groupby(row["set"] for row in said)} == {
        "greedy": 12, "sampled": 32, "thirds": 18,
    }  # fmt: skip

    done = llamarl_here(*command, "--only", "thirds", "--eval.samples", 2, "--eval.max_prompts", 5)
    assert done.returncode == 0, done.stderr
    *_, head, row, invalid = done.stdout.splitlines()
    assert head.split()[:2] == ["set", "accuracy"] and row.startswith("thirds ") and "5 x 2" in row
    assert invalid.startswith("thirds: ") and invalid.endswith("three divides its length")

    done = llamarl_here(*command, "--only", "sampled", "--against", export)
    assert f"{export} minus {export}: sampled: +0.0 points (95%: -" in done.stdout
    assert "on 8 problems, so they may be equal" in done.stdout
    for wrong, text in (
        (("--only", "nobody"), "--only nobody: data.eval has no such set; it has greedy, sampled, thirds"),
        (("--only", "greedy", "--rates", tmp_path / "rates"), "leave --only out"),
        (("--against", tmp_path / "nowhere"), "nowhere"),
    ):
        done = llamarl_here(*command, *wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr


@nightly("a run of its own; tests of the environments judge the same sets by day")
def test_a_set_has_an_environment_of_its_own(tmp_path: Path, several: Path) -> None:
    """Nobody else has one, so responses of the other sets, and of training, have one turn."""
    world = "tests.parts.episodes.environments.worlds:Chatty"
    options = ("--data.eval.1.environment", world, "--data.eval.1.max_new_tokens", 60)
    stops = ("--rollout.stop_strings", "['a', 'e', 'o', ' ', '1']", "--rollout.max_new_tokens", 30)
    command = ("train", several, "--output", tmp_path, "--steps", 2, *options, *stops, *STEADY)
    done = llamarl_here(*command)
    assert done.returncode == 0, done.stderr
    assert {row["name"] for row in evals(tmp_path) if row["step"] == 2} == set(NAMES)
    run, export, said = tmp_path / "tiny", tmp_path / "export", tmp_path / "said.jsonl"
    assert llamarl_here("export", run, export).returncode == 0
    done = llamarl_here("eval", export, "--config", run / "config.toml", "--output", said)
    assert done.returncode == 0, done.stderr
    replayed = llamarl_here("replay", run)
    assert replayed.returncode == 0 and " 12 rewards: all equal" in replayed.stdout, replayed.stdout + replayed.stderr
    talks = {row["set"] for row in rows(said) if "1+2" in row["response"]}
    assert talks == {"sampled"}


def test_from_python(tmp_path: Path, model: Path) -> None:
    """A set by name is a record by name, with what it has of its own; one without a name is a record."""
    problems = [{"question": f"{n}+1?", "answer": "2"} for n in range(4)]
    found = llamarl.evaluate(
        model, {"a": problems, "b": {"data": problems[:2], "samples": 3}}, reward=THIRDS, output=str(tmp_path),
        rollout={"max_new_tokens": 6},
    )  # fmt: skip
    assert isinstance(found, dict)
    assert {name: (one.metrics.num_prompts, one.metrics.k) for name, one in found.items()} == {"a": (4, 1), "b": (2, 3)}
    assert {row["set"] for row in found["b"].responses} == {"b"} and len(found["b"].responses) == 6
    alone = llamarl.evaluate(model, problems, reward=THIRDS, output=str(tmp_path), rollout={"max_new_tokens": 6})
    assert isinstance(alone, llamarl.EvalRecord)
    assert alone.metrics.name is None
    assert all("set" not in row for row in alone.responses)
    same = alone.metrics.accuracy, found["a"].metrics.accuracy
    assert same[0] == same[1] or all(map(math.isnan, same)), "greedy, of the same problems"


def test_sets_that_are_trained_on_are_said_by_name(tmp_path: Path, several: Path) -> None:
    train = "--data.train={name = 'running_total', count = 40}"
    done = llamarl_here("train", several, "--output", tmp_path, train, "--steps", 1, *STEADY)
    warnings = {line for line in done.stderr.splitlines() if "all of its prompts are in data.train" in line}
    assert [line.split(":")[1] for line in sorted(warnings)] == [" data.eval (greedy)", " data.eval (sampled)"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("--data.eval.0.label=sampled", "data.eval: 2 sources have the label 'sampled'"),
        ("--data.eval.1.temperature=0", "data.eval.1.temperature = 0 with samples = 4: greedy responses are"),
        (
            "--data.eval.2.sample=3",
            "`data.eval.2.sample` is not a setting, and `list_functions` has none; did you mean `samples`?",
        ),
        ("--data.eval.0.count=0", "data.eval (greedy)"),
        ("--data.eval.1.max_prompt_tokens=2", "data.eval (sampled)"),
        ("--data.eval.2.template={nothing}", "data.eval (thirds)"),
        ("--data.eval.2.reward=gsm9k", "data.eval (thirds)"),
    ],
)
def test_a_wrong_set_is_named(tmp_path: Path, several: Path, change: str, text: str) -> None:
    done = llamarl_here("train", several, "--output", tmp_path, "--dry-run", change)
    assert done.returncode == 2, done.stdout
    assert text in done.stderr
