"""Runs and commands over a model that is named, not brought: `tiny/model`, from a Hub on the loopback."""

from __future__ import annotations

import json
import signal
import time
import tomllib
from pathlib import Path

import pytest

from llamarl.config import RunConfig, dump_toml
from tests.end_to_end.tiny import Command, llamarl_here, make_model, rows, write_toml
from tests.nightly import nightly
from tests.parts.hub.server import HubServer

SHORT = ("--cluster.kind", "inline", "--steps", 2, "--checkpoint.every_steps", 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a model that takes milliseconds."""
    folder = make_model(tmp_path_factory.mktemp("hub") / "model")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def commit(hub: HubServer, files: dict[str, bytes]) -> str:
    return hub.add("tiny/model", files)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return write_toml(tmp_path, Path("tiny/model"))


@pytest.fixture
def told(tmp_path: Path, toml: Path) -> list[object]:
    """Words of `llamarl train` for a run of two steps."""
    return ["train", toml, "--output", tmp_path, *SHORT]


@nightly("a run and its resume; test_names.py and test_fetch.py keep a commit by day")
def test_a_run_its_resume_and_its_replay_take_one_commit(
    hub: HubServer, commit: str, files: dict[str, bytes], told: list[object], tmp_path: Path, monkeypatch
) -> None:
    first = llamarl_here(*told)
    assert first.returncode == 0, first.stderr
    assert f"llamarl train: model.path: tiny/model at commit {commit}\n" in first.stderr
    run = tmp_path / "tiny"
    assert tomllib.loads((run / "config.toml").read_text())["model"]["path"] == "tiny/model", "as it was written"
    assert json.loads((run / "weights.json").read_text()) == {"tiny/model": {"commit": commit}}
    hub.add("tiny/model", files | {"config.json": b"{}"})
    hub.requests.clear()
    again = llamarl_here(*told, "--steps", 4, "--resume")
    assert again.returncode == 0 and f"tiny/model at commit {commit}" in again.stderr, again.stderr
    assert not hub.requests, "what is whole in the cache is not asked for"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    last = llamarl_here(*told, "--steps", 5, "--resume")
    assert last.returncode == 0, last.stderr
    assert [row["step"] for row in rows(run / "metrics.jsonl") if row["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert tomllib.loads((run / "config.toml").read_text())["model"]["path"] == "tiny/model"
    replayed = llamarl_here("replay", run)
    assert replayed.returncode == 0 and "all equal" in replayed.stdout, replayed.stderr
    others = llamarl_here("replay", run, "--trainer.learning_rate", 1e-4, "--steps", "1:2")
    assert others.returncode == 0, others.stderr
    assert json.loads((tmp_path / "tiny-replay/weights.json").read_text()) == {"tiny/model": {"commit": commit}}
    exported = llamarl_here("export", run)
    assert exported.returncode == 0 and (run / "export/tokenizer.json").is_file(), exported.stderr
    report = llamarl_here("report", run)
    assert report.returncode == 0 and "shown by their numbers" not in report.stderr, report.stderr
    config = run / "config.toml"
    settings = tomllib.loads(config.read_text())
    settings["cluster"] |= {"kind": "hosts", "num_hosts": 2, "listen": "h:1"}
    config.write_text(dump_toml(RunConfig.model_validate(settings)))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    here = llamarl_here("replay", run)
    assert here.returncode == 0 and "all equal" in here.stdout, here.stderr
    assert hub.asked("/lfs/") > 0, "weights that only the hosts of the run had"


@nightly("runs of their own; by day names keep their commits in test_names.py")
def test_another_commit_is_refused_at_resume(
    hub: HubServer, commit: str, files: dict[str, bytes], told: list[object], tmp_path: Path
) -> None:
    assert llamarl_here(*told).returncode == 0
    other = hub.add("tiny/model", files)
    refused = llamarl_here(*told, "--model.path", f"tiny/model@{other}", "--resume")
    assert refused.returncode == 2
    assert f"model.path was 'tiny/model' when the run began and is 'tiny/model@{other}' now" in refused.stderr
    record = tmp_path / "tiny/weights.json"
    record.write_text(record.read_text().replace(commit, "1" * 40))
    assert "has no revision '1111" in llamarl_here(*told, "--resume").stderr, "the run's own commit is asked for"
    fresh = llamarl_here(*told, "--overwrite")
    assert fresh.returncode == 0 and f"tiny/model at commit {other}" in fresh.stderr, fresh.stderr


def test_a_dry_run_fetches_no_weights_and_explain_nothing(
    hub: HubServer, commit: str, toml: Path, tmp_path: Path
) -> None:
    explained = llamarl_here("explain", toml)
    assert explained.returncode == 0 and not hub.requests
    assert "memory and step time are not known: model.path = 'tiny/model'" in explained.stderr
    dry = llamarl_here("train", toml, "--dry-run", "--settings", "--output", tmp_path)
    assert dry.returncode == 0, dry.stderr
    assert f"tiny/model@{commit}: 0.1 MB of weights, which a run downloads" in dry.stdout and "# memory:" in dry.stdout
    assert 'path = "tiny/model"' in dry.stdout
    assert hub.asked("/lfs/") == 0 and hub.asked("config.json") > 0
    hub.requests.clear()
    again = llamarl_here("explain", toml)
    assert f"tiny/model@{commit}" in again.stdout and "memory:" in again.stdout and not hub.requests
    short = ("--data.max_prompt_tokens", 64, "--rollout.max_new_tokens", 64)
    plan = llamarl_here("plan", "--model", "tiny/model", "--gpus", 8, *short)
    assert plan.returncode == 0 and not hub.requests, plan.stderr
    assert "hf download tiny/other config.json" in llamarl_here("plan", "--model", "tiny/other", "--gpus", 8).stderr


def test_a_dry_run_says_what_a_run_could_not_read(hub: HubServer, files: dict[str, bytes], toml: Path) -> None:
    hub.add("tiny/model", {name: one for name, one in files.items() if name != "model.safetensors"} | {"a.bin": b""})
    dry = llamarl_here("train", toml, "--dry-run")
    assert dry.returncode == 2 and "model.path = 'tiny/model': its weights are pickles only (a.bin)" in dry.stderr
    hub.add("tiny/model", {name: one for name, one in files.items() if name != "model.safetensors"})
    dry = llamarl_here("train", toml, "--dry-run")
    assert dry.returncode == 2 and "has neither model.safetensors nor" in dry.stderr


@nightly("a run and its resume; test_names.py and test_fetch.py keep a commit by day")
def test_ctrl_c_ends_a_command_that_fetches(hub: HubServer, commit: str, told: list[object], tmp_path: Path) -> None:
    hub.fail("/lfs/", bytes_per_s=200)
    command = Command.start(tmp_path, *told)
    command.until(lambda: hub.asked("/lfs/") > 0)
    start_s = time.monotonic()
    code, said = command.end(signal.SIGINT)
    assert code == 130 and said.endswith("llamarl train: ended by SIGINT\n"), said
    assert time.monotonic() - start_s < 60.0 and not (tmp_path / "tiny").exists()


@nightly("runs of their own; by day names keep their commits in test_names.py")
def test_other_models_of_a_run_are_named_too(
    hub: HubServer, commit: str, files: dict[str, bytes], told: list[object], tmp_path: Path
) -> None:
    other = hub.add("tiny/reference", files, revision="v1")
    found = llamarl_here(
        *told, "--reference.kl_coefficient", 0.1, "--reference.path", "tiny/reference@v1",
        "--trainer.advantage", "gae", "--critic.path", "tiny/model",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert json.loads((tmp_path / "tiny/weights.json").read_text()) == {
        "tiny/model": {"commit": commit}, "tiny/reference@v1": {"commit": other},
    }  # fmt: skip
    assert hub.requests.count(("GET", "/api/models/tiny/model")) == 1, "one name is asked about once"


@pytest.mark.parametrize("command", ["train", "sft", "eval", "generate", "serve"])
def test_every_command_says_what_is_wrong_with_a_name(hub: HubServer, toml: Path, tmp_path: Path, command: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n")
    words = {
        "train": [toml, "--output", tmp_path, *SHORT], "sft": [toml, "--output", tmp_path, *SHORT],
        "eval": ["tiny/model", prompts], "generate": ["tiny/model", "--prompts", prompts], "serve": ["tiny/model"],
    }[command]  # fmt: skip
    found = llamarl_here(command, *words)
    option = "model.path" if command in ("train", "sft") else "MODEL"
    assert found.returncode == 2, found.stderr
    assert f"llamarl {command}: {option} = 'tiny/model': there is no such folder, and the Hub shows" in found.stderr
    assert not (tmp_path / "tiny").exists(), "nothing was begun"


def test_generate_answers_with_a_model_that_is_named(hub: HubServer, commit: str, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("1 2 3\n")
    found = llamarl_here("generate", f"tiny/model@{commit}", "--prompts", prompts, "--output", output)
    assert found.returncode == 0 and len(rows(output)) == 1, found.stderr


def test_fine_tuning_of_a_model_that_is_named(hub: HubServer, commit: str, toml: Path, tmp_path: Path) -> None:
    words = ["sft", toml, "--output", tmp_path, *SHORT]
    found = llamarl_here(*words)
    assert found.returncode == 0 and f"llamarl sft: model.path: tiny/model at commit {commit}" in found.stderr
    assert llamarl_here(*words, "--steps", 3, "--resume").returncode == 0
