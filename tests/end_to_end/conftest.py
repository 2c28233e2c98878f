"""One tiny model for all runs, and one that has learnt to add."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.end_to_end.learning import Trained, write_task
from tests.end_to_end.tiny import llamarl, make_model, write_toml


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("end_to_end") / "model")


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    return write_toml(tmp_path, model)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The base model is made on first use, then trained; by the first process of the tests that asks, for all."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "additions"
    folder.mkdir(exist_ok=True)
    said = folder / "said.txt"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            done = llamarl("train", write_task(folder))
            assert done.returncode == 0, done.stderr
            assert done.stderr == ""
            assert f"base model: {folder / 'base'}" in done.stdout
            said.write_text(done.stdout)
    return Trained(folder / "run.toml", folder / "runs" / "additions", said.read_text())
