"""A dry run without the Hub: by the built-in shape of the model, or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamarl.cli.main import USER_ERROR
from tests.end_to_end.tiny import llamarl_here


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)


def test_a_known_shape_is_enough_for_memory_and_time(tmp_path: Path) -> None:
    done = llamarl_here("train", "card80_1.7b", "--dry-run", "--gpus", "1x80")
    assert done.returncode == 0, done.stderr
    assert "built-in shape" in done.stdout and "cuda:0: " in done.stdout and "step time:" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert "model.path = 'Qwen/Qwen3-1.7B'" in last and "ready" not in last
    found = json.loads(llamarl_here("train", "card80_1.7b", "--dry-run", "--gpus", "1x80", "--json").stdout)
    assert {"memory", "step time", "first prompt", "start"} <= found["consequences"].keys()
    assert not (tmp_path / "runs").exists()


def test_what_does_not_fit_is_refused_by_that_shape() -> None:
    done = llamarl_here("train", "card80_1.7b", "--dry-run", "--gpus", "1x24")
    assert done.returncode == USER_ERROR and "cuda:0" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("options", [["--model.path", "nobody/nothing"], ["--reference.path", "nobody/nothing"]])
def test_another_model_needs_the_hub_or_a_folder(options: list[str]) -> None:
    words = ["--trainer.device", "cuda", "--reference.kl_coefficient", "0.1"]
    done = llamarl_here("train", "card80_1.7b", "--dry-run", "--gpus", "8x80", *words, *options)
    assert done.returncode == USER_ERROR and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "needs the Hub, or a folder" in line, line
