"""A small valid run, written where a test can change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """
[model]
path = "model"

[data]
train = {name = "jsonl", path = "train.jsonl"}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a TOML file and gives its path."""

    def write_toml(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_toml


@pytest.fixture
def minimal(write: Write) -> Path:
    """A file with the two settings that have no default."""
    return write(MINIMAL)
