"""One tiny model for all runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.tiny import make_model, write_toml


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("end_to_end") / "model")


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    return write_toml(tmp_path, model)
