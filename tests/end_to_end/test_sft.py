"""`llamarl sft RUN.toml`: a checkpoint learns worked solutions, with the files, checkpoints and refusals of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from llamarl.config import load_config
from llamarl.run.prepare import begin
from tests.end_to_end.tiny import llamarl_here, make_model, rows, write_toml
from tests.nightly import nightly

TIMES = {"wall_s", "step_s", "train_s", "train_tokens_per_s", "mfu", "peak_tflops"}


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    return write_toml(folder, make_model(folder / "model"))


def options(toml: Path, name: str, steps: int) -> list[object]:
    return [
        toml, "--name", name, "--output", toml.parent / "runs", "--steps", steps, "--cluster.kind", "inline",
        "--checkpoint.every_steps", 3, "--trainer.learning_rate", 0.01,
    ]  # fmt: skip


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(toml: Path) -> None:
    """Weights and metrics; the model that is exported from it has learnt."""
    runs = toml.parent / "runs"
    for name, steps in (("whole", 7), ("parts", 4)):
        done = llamarl_here("sft", *options(toml, name, steps))
        assert done.returncode == 0, done.stderr
    assert [path.name for path in sorted((runs / "parts/checkpoints").glob("step-*"))] == [
        "step-00000003",
        "step-00000004",
    ]
    done = llamarl_here("sft", *options(toml, "parts", 7), "--resume")
    assert done.returncode == 0, done.stderr
    kept = [
        [{key: value for key, value in row.items() if key not in TIMES} for row in rows(runs / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    ]
    assert kept[0] == kept[1]
    assert [row["step"] for row in kept[0]] == list(range(1, 8))
    assert kept[0][-1]["loss"] < kept[0][0]["loss"] - 0.5
    summary = json.loads((runs / "parts/summary.json").read_text())
    assert (summary["end"], summary["steps"], summary["loss"]) == ("finished", 7, kept[0][-1]["loss"])
    events = [(row["kind"], row.get("end")) for row in rows(runs / "parts/events.jsonl") if row["kind"] != "warning"]
    assert events == [("start", None), ("end", "finished")] * 2
    assert "to measure, as runs of `llamarl sft`; give a run of" in llamarl_here("profile", runs / "whole").stderr
    weights = list[bytes]()
    for name in ("whole", "parts"):
        done = llamarl_here("export", runs / name)
        assert done.returncode == 0, done.stderr
        weights.append((runs / name / "export/model.safetensors").read_bytes())
    assert weights[0] == weights[1] != (toml.parent / "model/model.safetensors").read_bytes()


def test_an_end_saves_and_the_run_goes_on_from_there(toml: Path) -> None:
    folder, ended = toml.parent / "runs/ended", threading.Event()

    def end() -> None:
        """After some steps, of which none is saved by itself."""
        metrics = folder / "metrics.jsonl"
        while not ended.wait(0.01):
            if metrics.exists() and metrics.read_text().count("\n") >= 3:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    ending = threading.Thread(target=end)
    ending.start()
    try:
        done = llamarl_here("sft", *options(toml, "ended", 100_000), "--checkpoint.every_steps", 0)
    finally:
        ended.set()
        ending.join()
    assert (done.returncode, "ended by SIGTERM; continue with --resume" in done.stderr) == (130, True), done.stderr
    ends = [row for row in rows(folder / "events.jsonl") if row["kind"] == "end"]
    assert [(row["end"], "SIGTERM" in row["reason"]) for row in ends] == [("interrupted", True)]
    (saved,) = (folder / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert step >= 3
    done = llamarl_here("sft", *options(toml, "ended", step + 1), "--resume")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(1, step + 2))


@nightly("a run for each mistake; tests of the settings refuse by day")
def test_what_cannot_work_is_refused(toml: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "r7", "question": "1?", "answer": "1"}\n')
    source = f"{{name = 'jsonl', path = '{tmp_path}/rows.jsonl'}}"
    for more, said in (
        (["--data.train", source], "data.train: row 'r7' has no `solution` text to learn from"),
        (["--data.solution", "way"], "has no `way` text to learn from"),
        (["--trainer.microbatch_tokens", 9], "documents have more than 9 tokens; raise trainer.microbatch_tokens"),
        (["--trainer.parallelism.tp", 3], "trainer.parallelism"),
        (["--trainer.device", "cuda:77"], "GPU"),
        (["--resume"], "--resume: there is no run"),
    ):
        done = llamarl_here("sft", *options(toml, "refused", 1), *more)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not (toml.parent / "runs/refused").exists()


@nightly("a run of its own; parts/sft learns from recorded chats by day")
def test_the_run_of_an_agent_learns_chats_of_the_day(toml: Path, tmp_path: Path) -> None:
    """An agent writes chats itself and is told the question alone; documents are chats nevertheless."""
    model = shutil.copytree(toml.parent / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') }}{% for m in messages %}"
        "{{ m.content + (eos_token if m.role == 'assistant' else '\\n') }}{% endfor %}"
    )
    file, run = tmp_path / "run.toml", toml.read_text().replace(str(toml.parent / "model"), str(model))
    file.write_text(run + "[rollout.agent]\nname = 'tests.parts.episodes.agents:run'\n")
    done = llamarl_here("sft", *options(file, "agent", 1))
    assert (done.returncode, "data.template = 'chat'; the first prompt: '20" in done.stderr) == (0, True), done.stderr
    assert 'date = "20' in (tmp_path / "runs/agent/config.toml").read_text()
    config = load_config(file, ["--output", str(tmp_path / "runs"), "--name", "trained", "--cluster.kind", "inline"])
    begun = begin(config, resume=False, overwrite=False, command="", tell=str)
    with begun.folder:
        assert (begun.config.data.template, begun.config.data.date[:2]) == ("{question}\n", "20")


def test_one_command_does_not_resume_the_other_s_run(toml: Path) -> None:
    more = ("--data.solution", "answer", "--data.max_prompt_tokens", 61)
    done = llamarl_here("sft", *options(toml, "other", 1), *more)
    assert (done.returncode, "5 prompts are too long and were skipped" in done.stderr) == (0, True), done.stderr
    (row,) = rows(toml.parent / "runs/other/metrics.jsonl")
    assert row["num_loss_tokens"] < row["num_input_tokens"] / 3
    done = llamarl_here("train", *options(toml, "other", 2), "--resume")
    assert done.returncode == 2
    assert "belongs to another command" in done.stderr
