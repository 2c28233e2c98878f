"""One tiny model, and a run of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.tiny import make_model, write_toml


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    """A run of four steps, its output in the test's folder."""
    path = write_toml(tmp_path, model)
    path.write_text(path.read_text().replace("steps = 4", f"steps = 4\noutput = '{tmp_path / 'runs'}'"))
    return path
