"""One tiny model for all runs, and one that has learnt to add."""

from __future__ import annotations

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
    """The base model is made on first use, then trained."""
    folder = tmp_path_factory.mktemp("additions")
    toml = write_task(folder)
    done = llamarl("train", toml)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"base model: {folder / 'base'}" in done.stdout
    return Trained(toml, folder / "runs" / "additions", done.stdout)
