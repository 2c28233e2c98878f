"""A wheel and a source distribution hold all that the repository has for them, and run away from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.tiny import ROOT, make_model, write_toml
from tests.nightly import nightly

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
CONFIGS = ("demo.toml", "run.schema.json", "sft.schema.json")
"""Configurations, and the schemas that their first lines name."""
OF_VERSION_CONTROL = (".gitignore",)


def built(kind: str, source: Path, folder: Path) -> Path:
    done = subprocess.run([sys.executable, "-c", BUILD, kind, folder], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Files of the repository; links are what they lead to."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    found = set[str]()
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        found |= {f"{name}/{one.name}" for one in path.iterdir()} if path.is_dir() else {name}
    return found


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory, tracked: set[str]) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("packages")
    for name in tracked:
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "clone" / name)
    source = built("build_sdist", folder / "clone", folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    return source, built("build_wheel", folder / source.name.removesuffix(".tar.gz"), folder)


@nightly("architecture/test_imports.py finds by day what is imported and not installed")
def test_nothing_is_missing(packages: tuple[Path, Path], tracked: set[str]) -> None:
    source, wheel = packages
    with tarfile.open(source) as archive:
        of_source = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - {*OF_VERSION_CONTROL} - of_source == set()
    with zipfile.ZipFile(wheel) as archive:
        of_wheel = set(archive.namelist())
        metadata = archive.read(next(name for name in of_wheel if name.endswith("METADATA"))).decode()
    wanted = {name for name in tracked if name.startswith("llamarl/")}
    assert {"llamarl/py.typed", *(f"llamarl/configs/{name}" for name in CONFIGS)} < wanted
    assert wanted - of_wheel == set()
    assert {name.split("/")[0] for name in of_wheel if "dist-info" not in name} == {"llamarl"}
    for line in ("Requires-Dist: huggingface-hub", "License-Expression: Apache-2.0", "# llamarl", "Typing :: Typed"):
        assert line in metadata


@nightly("architecture/test_imports.py finds by day what is imported and not installed")
def test_it_runs_from_another_folder(packages: tuple[Path, Path], tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    with zipfile.ZipFile(packages[1]) as archive:
        archive.extractall(site)
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))

    def llamarl(*words: object) -> str:
        env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "llamarl", *map(str, words)]
        done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import llamarl, sys; sys.exit(not llamarl.__file__.startswith(sys.argv[1]))"
    ran = subprocess.run([sys.executable, "-c", code, site], cwd=here, env=os.environ | {"PYTHONPATH": str(site)})
    assert ran.returncode == 0, "another installation would be tested"
    assert 'path = "runs/base/demo"' in llamarl("train", "demo", "--dry-run", "--settings")
    assert "finished 1 steps" in llamarl("train", toml, "--steps=1", "--cluster.kind=inline")
    assert (here / "runs/tiny/report.html").name in llamarl("report", "runs/tiny")
