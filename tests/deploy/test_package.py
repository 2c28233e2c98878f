"""What the package index gets: its metadata, the files in it, and a run in an environment that has nothing else."""

from __future__ import annotations

import email
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import llamarl
from tests.architecture.repository import ROOT
from tests.nightly import nightly

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WHEEL_SUFFIXES = {".cpp", ".css", ".h", ".html", ".jinja", ".js", ".json", ".LICENSE", ".md", ".py", ".toml", ".typed"}
MAX_WHEEL_BYTES = 2_000_000


def test_urls_are_the_same_everywhere() -> None:
    source = PROJECT["urls"]["Source"]
    assert {"Documentation", "Source", "Issues", "Changelog", "Paper"} == PROJECT["urls"].keys()
    assert all(PROJECT["urls"][name].startswith(source) for name in ("Issues", "Changelog"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == source and citation["url"] == PROJECT["urls"]["Documentation"]
    assert citation["license"] in PROJECT["license"] and citation["abstract"].startswith(PROJECT["description"])


def test_every_python_that_is_allowed_is_named() -> None:
    first, end = (int(number) for number in re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert named == {f"3.{minor}" for minor in range(first, end)}


def test_the_version_is_that_of_the_installed_package() -> None:
    assert re.match(r"\d+\.\d+", llamarl.__version__)


def run(*command: object, cwd: Path = ROOT, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheel and source distribution, built from a clone whose folder has an awkward name."""
    if made := os.environ.get("LLAMARL_DIST"):
        return ROOT / made
    clone = tmp_path_factory.mktemp("clone") / "src"
    run("git", "clone", "--quiet", ROOT, clone)
    run("git", "-C", clone, "tag", "--force", "v7.8.9")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", clone / "dist", clone)
    assert (clone / "dist" / "llamarl-7.8.9-py3-none-any.whl").exists(), "the tag is the version"
    return clone / "dist"


@nightly("builds packages")
def test_the_index_would_take_them(dist: Path) -> None:
    files = sorted(dist.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files)


@nightly("builds packages")
def test_the_wheel_has_what_users_need_only(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(record))
    assert {name.split("/")[0] for name in names} == {"llamarl"} and wheel.stat().st_size < MAX_WHEEL_BYTES
    assert {Path(name).suffix or Path(name).name for name in names} <= WHEEL_SUFFIXES | {"py.typed"}
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert urls == PROJECT["urls"] and metadata["License-Expression"] == PROJECT["license"]
    targets = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert len(targets) > 10 and all(target.startswith("https://") for target in targets), (
        "the index has no other files"
    )


@nightly("installs into an empty environment")
@pytest.mark.timeout(1800)
def test_the_demo_runs_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "env")
    pip = [tmp_path / "env/bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run(*pip, *shlex.split(os.environ.get("PIP_ARGS", "")), wheel)
    here = tmp_path / "here"
    here.mkdir()
    command = tmp_path / "env/bin/llamarl"
    told = run(command, "train", "demo", "--steps", 2, "--eval.max_prompts", 16, cwd=here, OMP_NUM_THREADS="1")
    assert "finished 2 steps" in told and (here / "runs/demo/summary.json").exists()
    assert run(command, "--version").split()[1] == wheel.name.split("-")[1]
