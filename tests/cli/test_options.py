"""What commands share."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.data.tokenizer import Tokenizer
from llamarl.observability import spans
from llamarl.parts.page.cli.report import decoder
from llamarl.run.hub_pins import base_model
from tests.end_to_end.tiny import llamarl_here, make_model, write_toml


@pytest.mark.parametrize("command", ["train", "sft", "eval", "generate"])
def test_every_command_that_takes_long_says_where_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(*_: object) -> None:
        time.sleep(0.3)
        raise ConfigError("that is all")

    model, prompts = make_model(tmp_path / "model"), tmp_path / "prompts.txt"
    prompts.write_text("1 2 3\n")
    toml = write_toml(tmp_path, model)
    monkeypatch.setattr(spans, "DELAY_S", 0.05)
    monkeypatch.setattr(Tokenizer, "__init__", read_slowly)
    arguments: dict[str, tuple[object, ...]] = {
        "train": (toml, "--output", tmp_path),
        "sft": (toml, "--output", tmp_path),
        "eval": (model, "--config", toml),
        "generate": (model, "--prompts", prompts),
    }
    said = llamarl_here(command, *arguments[command]).stderr.splitlines()
    assert said[-1].endswith("that is all")
    assert f"llamarl {command}: still reading the tokenizer; Ctrl-C ends it" in said


def test_a_runs_model_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative one, first, where the run was started; else where the command is."""
    run, here = tmp_path / "there/out/runs/one", tmp_path / "here"
    for folder in (run, tmp_path / "there/models/base", here / "models/base", here / "models/other"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert base_model(run, "models/base", "out/runs") == str(tmp_path / "there/models/base")
    assert base_model(run, "models/other", "out/runs") == "models/other"
    assert base_model(run, "models/base", str(run.parent)) == "models/base"
    assert base_model(run, str(here / "models/base"), "out/runs") == str(here / "models/base")
    monkeypatch.chdir(run)
    assert base_model(Path(), "models/base", "out/runs") == str(tmp_path / "there/models/base")


def test_a_report_says_why_tokens_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decoder(tmp_path) is None
    assert "tokens are shown as numbers because the tokenizer cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("train ~/x.toml", "x.toml"),
        ("train --resume demo --output=~/none", "none/demo"),
        ("sft ~/x.toml", "x.toml"),
        ("explain ~/x.toml", "x.toml"),
        ("simulate ~/x.toml", "x.toml"),
        ("simulate demo --costs=~/costs", "costs"),
        ("launch slurm ~/x.toml", "x.toml"),
        ("doctor --hosts=~/x.toml", "x.toml"),
        ("report ~/run", "run"),
        ("watch ~/run", "run"),
        ("replay ~/run", "run"),
        ("profile ~/run", "run"),
        ("profile --flame ~/run", "run"),
        ("export ~/run", "run"),
        ("generate ~/m --prompts=~/x.txt", "x.txt"),
        ("generate ~/m --prompts=x --output=~/none/x", "none"),
        ("eval ~/m x.jsonl --output=~/none/x", "none"),
        ("eval ~/m ~/x.jsonl", "m"),
        ("serve ~/m", "m"),
        ("plan --gpus 8 --model ~/m", "m"),
        ("plan --gpus 8 --model llama3-8b --profile=~/x.json", "x.json"),
        ("host 10.0.0.1:1 --address 127.0.0.1 --pki=~/pki", "pki"),
        ("certs ~/pki --hosts b=127.0.0.1", "pki"),
    ],
)
def test_paths_that_a_command_is_given_begin_at_home(
    command: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a shell has not seen to it, as in quotes and behind `=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name, *arguments = command.split()
    done = llamarl_here(name, *arguments)
    assert str(tmp_path / names) in done.stdout + done.stderr
    assert not Path("~").exists()
