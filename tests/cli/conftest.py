"""One tiny model, and the command line without a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from llamarl.cli.main import main
from tests.end_to_end.tiny import make_model, write_toml


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """`llamarl ...` in this process."""

    def call(*arguments: object) -> Done:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["llamarl", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        captured = capfd.readouterr()
        assert isinstance(code, int | None)
        return Done(code or 0, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    """A run of four steps, its output in the test's folder."""
    path = write_toml(tmp_path, model)
    path.write_text(path.read_text().replace("steps = 4", f"steps = 4\noutput = '{tmp_path / 'runs'}'"))
    return path
