"""Runs on data by file and by name, with a model that has a chat template: what is recorded, and what goes on."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llamarl.config import load_config
from tests.end_to_end.tiny import llamarl_here, rows, write_toml
from tests.nightly import nightly
from tests.parts.hub.server import HubServer, only_hub

TEMPLATE = """{{ strftime_now("%d %b %Y") }}
{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
PROBLEMS = [{"problem": f"{n}+1?", "solution": f"one more\n#### {n + 1}", "level": str(n % 3)} for n in range(24)]
DATED = "06 Jul 2024"
COLUMNS = {"question": "problem", "answer": "solution"}


@pytest.fixture(scope="module")
def chatty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template that tells the date."""
    folder = Path(shutil.copytree(model, tmp_path_factory.mktemp("chatty") / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def options(folder: Path, source: dict[str, object], *, steps: int, name: str = "run") -> list[object]:
    train = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in source.items()) + "}"
    return [
        "--data.train", train, "--data.eval", train, "--output", folder / "runs", "--name", name, "--steps", steps,
        "--cluster.kind", "inline", "--reward.parts", "['gsm8k']", "--eval.max_prompts", 4,
        "--checkpoint.every_steps", 1,
    ]  # fmt: skip


@nightly("a run each; tests of the data and of the hub read the same files by day")
def test_a_file_of_csv_and_a_day_that_stays(chatty: Path, tmp_path: Path) -> None:
    """The run begins with a template of its own choice on a day; it goes on and is replayed with both, on another."""
    table = io.StringIO()
    writer = csv.DictWriter(table, list(PROBLEMS[0]))
    writer.writeheader()
    writer.writerows(PROBLEMS)
    (tmp_path / "problems.csv").write_text(table.getvalue())
    source = {"name": "file", "path": str(tmp_path / "problems.csv"), **COLUMNS}
    toml, system = write_toml(tmp_path, chatty), ["--data.system", "Add one."]
    done = llamarl_here("train", toml, *options(tmp_path, source, steps=2), *system, "--data.date", "2024-07-06")
    assert done.returncode == 0, done.stderr
    shown = f"{DATED}\\nsystem: Add one.<|endoftext|>user: 0+1?<|endoftext|>assistant: '"
    assert f"data.template = 'chat'; the first prompt: '{shown}" in done.stdout
    run = tmp_path / "runs/run"
    recorded = load_config(run / "config.toml").data
    assert (recorded.template, recorded.date, recorded.system) == ("chat", "2024-07-06", "Add one.")
    done = llamarl_here("train", toml, *options(tmp_path, source, steps=3), *system, "--resume")
    assert (done.returncode, "--resume" in done.stderr) == (0, False), done.stderr
    assert load_config(run / "config.toml").data == recorded
    texts = {row["text"] for row in rows(run / "rollouts.jsonl") if "text" in row} | {
        row["prompt"] for row in rows(run / "rollouts.jsonl") if "prompt" in row
    }
    assert texts and all(text.startswith(DATED) for text in texts)
    done = llamarl_here("replay", run)
    assert (done.returncode, "all equal" in done.stdout) == (0, True), done.stderr


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with only_hub(tmp_path / "hf", monkeypatch) as server:
        yield server


def parquet(problems: list[dict[str, str]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(problems), out)
    return out.getvalue()


@nightly("a run each; tests of the data and of the hub read the same files by day")
@pytest.mark.parametrize("branch", ["main", "refs/convert/parquet"])
def test_a_data_set_by_name_stays_at_its_commit(chatty: Path, tmp_path: Path, hub: HubServer, branch: str) -> None:
    """Though the branch moves: the run that goes on, and its replay, ask nobody and have the rows of the beginning."""
    if branch != "main":
        hub.add("me/sums", {"script.py": b""}, kind="dataset")
    commit = hub.add("me/sums", {"all/train/0000.parquet": parquet(PROBLEMS)}, kind="dataset", revision=branch)
    source = {"name": "hub", "path": "me/sums", **COLUMNS}
    toml = write_toml(tmp_path, chatty)
    done = llamarl_here("train", toml, *options(tmp_path, source, steps=2))
    assert done.returncode == 0, done.stderr
    assert f"llamarl train: data.train: me/sums at commit {commit}" in done.stderr
    run = tmp_path / "runs/run"
    assert load_config(run / "config.toml").data.train.options == {"path": "me/sums", **COLUMNS}
    hub.add("me/sums", {"all/train/0000.parquet": parquet(PROBLEMS[::-1])}, kind="dataset", revision=branch)
    asked = len(hub.requests)
    done = llamarl_here("train", toml, *options(tmp_path, source, steps=3), "--resume")
    assert done.returncode == 0, done.stderr
    done = llamarl_here("replay", run)
    assert (done.returncode, "all equal" in done.stdout) == (0, True), done.stderr
    answers = tmp_path / "answers.jsonl"
    given = ["--config", run / "config.toml", "--eval.max_prompts", 2, "--output", answers]
    done = llamarl_here("eval", chatty, *given, "--reward.parts", "['gsm8k']")
    assert done.returncode == 0, done.stderr
    assert [row["answer"] for row in rows(answers)] == [one["solution"] for one in PROBLEMS[:2]]
    assert len(hub.requests) == asked
    assert {row["prompt_id"].rpartition("-")[0] for row in rows(run / "rollouts.jsonl")} == {"me/sums/all/train"}


@nightly("a run of its own; tests/data and parts/sft read conversations by day")
def test_conversations_are_learnt_and_answered(chatty: Path, tmp_path: Path) -> None:
    roles = ("user", "assistant") * 2
    talks = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]}
        for said in (("1+1?", "2", "2+2?", "4"), ("3+3?", "6", "4+4?", "8"))
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    source = {"name": "file", "path": str(tmp_path / "talks.jsonl")}
    toml, learns = write_toml(tmp_path, chatty), ["--trainer.learning_rate", 0.02, "--data.system", "Add."]
    done = llamarl_here("sft", toml, *options(tmp_path, source, steps=60), *learns)
    assert done.returncode == 0, done.stderr
    assert "the first prompt: " in done.stderr and "assistant: 2<|endoftext|>user: 2+2?" in done.stderr
    steps = rows(tmp_path / "runs/run/metrics.jsonl")
    assert {row["num_loss_tokens"] for row in steps} == {8.0}  # two documents, two turns of one digit, and an end each
    assert steps[-1]["loss"] < 0.1 < steps[0]["loss"]
    assert llamarl_here("export", tmp_path / "runs/run").returncode == 0
    model = tmp_path / "runs/run/export"
    done = llamarl_here(
        "eval", model, tmp_path / "talks.jsonl", "--reward.parts", "['exact']", "--rollout.max_new_tokens", 4,
        "--data.system", "Add.", "--output", tmp_path / "answers.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [row["response"] for row in rows(tmp_path / "answers.jsonl")] == ["4", "8"]
    (tmp_path / "prompts.txt").write_text("1+1?\n")
    generate = ["generate", model, "--prompts", tmp_path / "prompts.txt", "--eval.temperature", 0]
    output = ["--output", tmp_path / "said.jsonl", "--rollout.max_new_tokens", 4]
    done = llamarl_here(*generate, "--chat", "--data.system", "Add.", *output)
    assert done.returncode == 0, done.stderr
    assert [row["text"] for row in rows(tmp_path / "said.jsonl")] == ["2"]
    done = llamarl_here(*generate, "--data.template", "{question}", "--data.system", "Add.")
    assert done.returncode == 2 and "data.system" in done.stderr
