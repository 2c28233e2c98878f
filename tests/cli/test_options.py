"""What commands share."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from llamarl.cli import options
from llamarl.config import ConfigError
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.page.cli.report import decoder
from llamarl.run.names import base_model
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
    monkeypatch.setattr(options, "DELAY_S", 0.05)
    monkeypatch.setattr(Tokenizer, "__init__", read_slowly)
    arguments: dict[str, tuple[object, ...]] = {
        "train": (toml, "--output", tmp_path),
        "sft": (toml, "--output", tmp_path),
        "eval": (model, "--config", toml),
        "generate": (model, "--prompts", prompts),
    }
    said = llamarl_here(command, *arguments[command]).stderr.splitlines()
    assert said[-1].endswith("that is all")
    place = r"llamarl."
    assert f"llamarl {command}: still preparing, in {place}" in said[0] and said[0].endswith("; Ctrl-C ends it")


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
    assert "tokens are shown by their numbers, as no tokenizer was read: " in capsys.readouterr().err
