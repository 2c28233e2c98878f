"""Misspelled commands, options and settings: what was meant is named, also where it is in another section."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llamarl.config import ConfigError, RunConfig, load_config
from llamarl.config.elsewhere import ELSEWHERE
from llamarl.config.load import last_names, load_recorded
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
        ("train demo --num_generations 8", ("--rollout.group_size",)),
        ("train demo --num-generations=8", ("--rollout.group_size",)),
        ("train demo --actor_rollout_ref.rollout.n 8", ("--rollout.group_size",)),
        ("train demo --rollout.n 8", ("`rollout.group_size`",)),
        ("train demo --trainer.optim.lr 1e-6", ("`trainer.learning_rate`",)),
        ("train demo --orchestrator.batch_size 8", ("--rollout.prompts_per_step",)),
        ("train demo --beta 0.1", ("--reference.kl_coefficient",)),
        ("train demo --temperature 0.7", ("--rollout.temperature", "--eval.temperature")),
        ("train demo --epsilon 0.2", ("`trainer.loss.clip`", "`trainer.loss.clip_low`")),
        ("train demo --trainer.loss grpo --trainer.loss.epsilon 0.2", ("`trainer.loss.clip`",)),
        ("train demo --num_train_epochs 3", ("`steps`",)),
        ("train demo --trainer.advantage rloo", ("`leave_one_out`",)),
        ("train demo --trainer.loss dpo", ("no DPO",)),
        ("generate m --prompts x --max_tokens 3", ("--rollout.max_new_tokens",)),
        ("eval m x --n 3", ("--eval.samples",)),
        ("serve m --tensor-parallel-size 2", ("--generator.tensor_parallel",)),
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


def test_names_of_other_frameworks_in_python() -> None:
    for name, value, meant in (("num_generations", 8, "rollout.group_size"), ("lr", 1e-6, "trainer.learning_rate")):
        with pytest.raises(ConfigError, match=rf"`{name}`; did you mean `{meant}`"):
            load_config("demo", settings={name: value})


def test_the_table_names_settings_that_are_here() -> None:
    """And no name of its own hides one of ours."""
    known = {name for names in last_names(RunConfig).values() for name in names}
    for other, meant in ELSEWHERE.items():
        named = re.findall("`([a-z_]+[.][a-z_.]+)`", meant) if isinstance(meant, str) else meant
        assert all(one in known or one.startswith("trainer.loss.") for one in named), other
        assert other not in known


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
