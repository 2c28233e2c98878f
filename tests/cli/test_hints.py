"""Misspelled commands, options and settings: what was meant is named, also where it is in another section."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llamarl.config import ConfigError, load_config
from llamarl.config.load import load_recorded
from tests.end_to_end.tiny import llamarl_here


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("trian demo", ("`train`",)),
        ("reprot runs/demo", ("`report`",)),
        ("train demo --learning_rate 1e-5", ("--trainer.learning_rate",)),
        ("train demo --learning-rate=1e-5", ("--trainer.learning_rate",)),
        ("train demo --lr 1e-5", ("--trainer.learning_rate",)),
        ("train demo --threads 2", ("--trainer.threads", "--generator.threads")),
        ("train demo --overwrit", ("--overwrite",)),
        ("train demo --wach", ("--watch",)),
        ("train demo --rollout.learning_rate 1e-5", ("`trainer.learning_rate`",)),
        ("train demo --trainer.learning_rat 1e-5", ("`learning_rate`",)),
        ("sft demo --dry-runs", ("--dry-run",)),
        ("explain demo --jsn", ("--json",)),
        ("generate m --prompts x --max_new_tokens 3", ("--rollout.max_new_tokens",)),
        ("plan --model llama3-8b --gpus 8 --group_size 3", ("--rollout.group_size",)),
        ("report runs/demo --ouput x", ("--output",)),
    ],
)
def test_what_was_meant_is_named(words: str, named: tuple[str, ...]) -> None:
    done = llamarl_here(*words.split())
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    for name in named:
        assert name in line.partition("; ")[2], line


def test_a_name_in_a_file_too(tmp_path: Path, toml: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("temperature = 1.0\n" + toml.read_text())
    with pytest.raises(ConfigError, match=r"`temperature`.*`rollout\.temperature` or `eval\.temperature`"):
        load_config(wrong)


def test_an_old_runs_file_is_named(tmp_path: Path, toml: Path) -> None:
    record = tmp_path / "config.toml"
    record.write_text("of_before = 1\n" + toml.read_text())
    with pytest.raises(ConfigError, match=rf"{record}.*`of_before`"):
        load_recorded(record)
    record.write_text(toml.read_text())
    with pytest.raises(ConfigError) as raised:
        load_recorded(record, ["--steps", "many"])
    assert str(record) not in str(raised.value), "the command line is wrong, and not the file"


def test_a_plan_names_what_was_given() -> None:
    """The demo's model is not made yet: its warm start says its shape."""
    done = llamarl_here("plan", "--config", "demo", "--gpus", "2", "--gpu", "cpu-core")
    assert done.returncode == 0 and "--model" not in done.stderr, done.stderr
    done = llamarl_here("plan", "--config", "demo", "--gpus", "2")
    assert done.returncode == 0, done.stderr


def test_a_plan_of_a_file_names_the_file(tmp_path: Path, toml: Path) -> None:
    toml.write_text(toml.read_text().replace("model = {path = ", "model = {path = 'nowhere/at/all'}#"))
    done = llamarl_here("plan", "--config", toml, "--gpus", "2")
    assert done.returncode == 2 and f"--config {toml}" in done.stderr and "model.path" in done.stderr
    assert "--model" not in done.stderr


def test_a_dry_run_of_supervised_training(toml: Path) -> None:
    """Also where the folder is there."""
    done = llamarl_here("sft", toml, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "300 documents" in done.stdout and not (toml.parent / "runs").exists()
    (toml.parent / "runs/tiny").mkdir(parents=True)
    (toml.parent / "runs/tiny/mine").touch()
    done = llamarl_here("sft", toml, "--dry-run")
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0 and "--resume" in last and "--overwrite" in last, done.stderr
    assert llamarl_here("sft", "demo_sft", "--dry-run").returncode == 0


def test_the_end_of_a_run_names_commands_that_work(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = llamarl_here("train", toml, "--cluster.kind", "inline", "--steps", "1")
    assert done.returncode == 0, done.stderr
    named = re.findall(r"`llamarl ([^`]+)`", "\n".join(done.stdout.splitlines()[-2:]))
    assert [words.split()[0] for words in named] == ["report", "eval", "generate", "serve", "export"]
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("Liv has 26 coins: a+5. How many coins now?\n")
    for words in named:
        if not words.startswith("serve "):  # until somebody ends it
            done = llamarl_here(*shlex.split(words))
            assert done.returncode == 0, (words, done.stderr)
