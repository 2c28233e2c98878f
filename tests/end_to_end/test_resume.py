"""Without staleness, a run that goes on from any checkpoint is the one that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.tiny import llamarl_here, rows
from tests.nightly import nightly, some

SYNCHRONOUS = (
    "--cluster.kind", "inline", "--rollout.max_staleness", 0, "--rollout.window", 1, "--trainer.learning_rate", 3e-3,
    "--reward.parts", "[{name = 'tests.executors.rewards:EvenLength'}]", "--checkpoint.every_steps", 2,
    "--checkpoint.keep", 9, "--eval.every_steps", 0,
)  # fmt: skip
KINDS = {"all_weights": (), "adapters": ("--trainer.lora.rank", 4), "critic_and_reference": ("--recipe", "ppo")}


@pytest.mark.parametrize("kind", some(KINDS, 1))
def test_from_a_periodic_checkpoint(tmp_path: Path, toml: Path, kind: str) -> None:
    """Groups that were in flight when it was written keep their numbers, and with them their noise."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = llamarl_here("train", toml, "--output", whole, "--steps", 6, *SYNCHRONOUS, *KINDS[kind])
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "tiny/journal")
    for folder in cut.rglob("step-*"):
        if folder.name > "step-00000002":
            shutil.rmtree(folder)
    done = llamarl_here("train", toml, "--output", cut, "--steps", 6, "--resume", *SYNCHRONOUS, *KINDS[kind])
    assert done.returncode == 0, done.stderr
    recorded = [
        [(row["step"], row["group_id"], row["token_ids"], row["behavior_logprobs"], row["advantage"]) for row in found]
        for found in (rows(folder / "tiny/rollouts.jsonl") for folder in (whole, cut))
    ]
    assert len({tuple(tokens) for _, _, tokens, _, _ in recorded[0]}) > 10
    assert len({advantage for *_, advantage in recorded[0]}) > 2, "nothing was learnt, so nothing was compared"
    assert [row for row in recorded[0] if row[0] > 2] == recorded[1], "the journal of the steps before is gone"
    files = [path.relative_to(cut) for path in cut.rglob("*.safetensors")]
    assert len(files) >= 3
    assert all((whole / file).read_bytes() == (cut / file).read_bytes() for file in files)
    first, second = (json.loads((folder / "tiny/summary.json").read_text()) for folder in (whole, cut))
    assert (second["step_before"], second["accuracy_before"]) == (0, first["accuracy_before"]), (
        "of the run, not the life"
    )
    assert second["first_step"] == 3 and " over steps 3 to 6, " in second["verdict"]
    assert "finished steps 3 to 6 in" in done.stdout


@nightly("runs each; tests/run and checkpoint refuse and copy by day")
@pytest.mark.parametrize("command", ["train", "sft"])
def test_from_a_copy_when_the_machine_is_gone(tmp_path: Path, toml: Path, command: str) -> None:
    """The run folder with everything in it; another one of the same name does not take over the copies."""
    there = tmp_path / "there"
    there.mkdir()
    run = (command, toml, "--output", tmp_path / "here", *SYNCHRONOUS, "--checkpoint.copy_to", f"file://{there}")
    run += ("--checkpoint.keep", 1, "--checkpoint.keep_every", 4)
    assert llamarl_here(*run, "--steps", 5).returncode == 0
    assert sorted(path.name for path in there.glob("tiny/step-*")) == ["step-00000004", "step-00000005"]
    shutil.rmtree(tmp_path / "here")
    done = llamarl_here(*run, "--steps", 6)
    assert done.returncode == 2 and "there/tiny holds checkpoints of a run; resume it (--resume)" in done.stderr
    done = llamarl_here(*run, "--steps", 6, "--resume")
    assert done.returncode == 0, done.stderr
    assert "--resume: the checkpoint of step 5 was restored from" in done.stderr
    assert re.search(r"--resume: \S+/here/tiny/metrics.jsonl has no rows of steps 1-5", done.stderr)
    assert [row["step"] for row in rows(tmp_path / "here/tiny/metrics.jsonl") if row["kind"] == "step"] == [6]
    assert sorted(path.name for path in there.glob("tiny/step-*")) == ["step-00000004", "step-00000006"]


def test_checkpoints_that_would_mean_something_else_are_refused(tmp_path: Path, toml: Path, model: Path) -> None:
    """Before anything of the run is touched."""
    run = ("train", toml, "--output", tmp_path, *SYNCHRONOUS)
    done = llamarl_here(*run, "--steps", 2, *KINDS["adapters"])
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "tiny/config.toml").read_text()
    other = shutil.copytree(model, tmp_path / "other")
    for more, name in (
        (("--trainer.lora.rank", 4, "--trainer.lora.alpha", 64.0), "trainer.lora"),
        ((), "trainer.lora"),
        ((*KINDS["adapters"], "--model.path", other), "model.path"),
    ):
        done = llamarl_here(*run, "--steps", 4, "--resume", *more)
        assert done.returncode == 2
        assert f"--resume: {name} was " in done.stderr and done.stderr.count("\n") == 1
        assert (tmp_path / "tiny/config.toml").read_text() == settings


@nightly("runs each; tests/run and checkpoint refuse and copy by day")
def test_other_data_and_damaged_records_are_refused(tmp_path: Path, toml: Path) -> None:
    """Of as many rows: the order of prompts would go on, over others. The run stays as it was."""
    data = tmp_path / "data.jsonl"
    answers = [{"question": f"{i}+1", "answer": i + 1} for i in range(5)]
    lines = [json.dumps(row) + "\n" for row in answers]
    data.write_text("".join(lines))
    run = ("train", toml, "--output", tmp_path, "--data.train", f"{{name = 'jsonl', path = '{data}'}}", *SYNCHRONOUS)
    assert llamarl_here(*run, "--steps", 2).returncode == 0
    files = {path: path.read_bytes() for path in (tmp_path / "tiny").glob("*.*")}
    for changed in (['{"question": "0+1", "answer": 7}\n', *lines[1:]], [lines[1], lines[0], *lines[2:]]):
        data.write_text("".join(changed))
        done = llamarl_here(*run, "--steps", 3, "--resume", "--trainer.learning_rate", 1e-4)
        assert done.returncode == 2
        assert "drew from 5 other prompts, or answers, than data.train has now" in done.stderr.splitlines()[-1]
        assert all(path.read_bytes() == files[path] for path in files if path.name in ("config.toml", "metrics.jsonl"))
    data.write_text("".join(lines))
    metrics = tmp_path / "tiny/metrics.jsonl"
    metrics.write_bytes(b"no row\n" + files[metrics])
    done = llamarl_here(*run, "--steps", 3, "--resume")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(
        "metrics.jsonl:1 is not a row of a run; remove this line"
    )
    metrics.write_bytes(files[metrics])
    done = llamarl_here(*run, "--steps", 3, "--resume")
    assert done.returncode == 0, done.stderr
