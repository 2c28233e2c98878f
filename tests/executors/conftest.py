"""One tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.tiny import make_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("executors") / "model", std=0.25)
