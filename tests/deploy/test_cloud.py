"""The recipe for a rented machine: its file is SkyPilot's, and its commands are ours."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarl.config import load_config
from tests.architecture.repository import ROOT

SKYPILOT = os.environ.get("LLAMARL_SKYPILOT_PYTHON", "")
RECIPE = ROOT / "deploy" / "skypilot.yaml"


@pytest.fixture
def recipe() -> dict[str, Any]:
    return yaml.safe_load(RECIPE.read_text(encoding="utf-8"))


def commands(block: str, home: Path, **env: str) -> list[list[str]]:
    """What a block of the recipe runs: words of each of its commands, of which only the shell is real."""
    folder = home / "llamarl" / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    (home / "given").unlink(missing_ok=True)
    for program in (folder / "llamarl", folder / "python", home / "python3"):
        program.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >> {home}/given; echo >> {home}/given\n')
        program.chmod(0o755)
    env = {"HOME": str(home), "PATH": f"{home}:{os.environ['PATH']}", **env}
    subprocess.run(["bash", "-euc", block], env=env, cwd=ROOT, check=True, timeout=60)
    return [line.split("\0")[:-1] for line in (home / "given").read_text().splitlines()]


def test_it_installs_this_package(recipe: dict[str, Any], tmp_path: Path) -> None:
    assert recipe["workdir"] == "."
    made, install, doctor = commands(recipe["setup"], tmp_path)
    assert made == ["-m", "venv", f"{tmp_path}/llamarl"] and doctor == ["doctor"]
    assert (ROOT / install[install.index("-c") + 1]).is_file()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = install[-1].removeprefix(".[").removesuffix("]").split(",")
    assert {*named} <= extras.keys()


def test_it_trains_and_goes_on(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The second time the run is there, as after a machine was taken away."""
    run = recipe["run"].replace("/runs", str(tmp_path / "runs"))
    assert recipe["file_mounts"].keys() == {"/runs"}
    (words,) = commands(run, tmp_path, **recipe["envs"])
    assert words[0] == "train" and (ROOT / words[1]).is_file()
    config = load_config(ROOT / words[1], words[2:])
    assert config.model.path == recipe["envs"]["MODEL"] and config.output == str(tmp_path / "runs")
    record = tmp_path / "runs" / config.name / "config.toml"
    record.parent.mkdir(parents=True)
    record.touch()
    (again,) = commands(run, tmp_path, **recipe["envs"])
    assert again == [*words, "--resume"]


@pytest.mark.skipif(not SKYPILOT, reason="name a Python with the package skypilot (420 MB) in LLAMARL_SKYPILOT_PYTHON")
def test_skypilot_reads_it(tmp_path: Path) -> None:
    code = "import sys, yaml; from sky import Task; Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])))"
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [SKYPILOT, "-c", code, str(RECIPE)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
