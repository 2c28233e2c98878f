"""Disk that a run needs, against what is free."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from llamarl.checkpoint.folder import step_folder
from llamarl.config import load_config
from llamarl.models.folder import load_shape
from llamarl.run.disk import disk_need
from tests.end_to_end.tiny import llamarl_here, make_model, write_toml

Usage = namedtuple("Usage", ("total", "used", "free"))


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = write_toml(tmp_path, make_model(tmp_path / "model"))
    path.write_text(path.read_text().replace("steps = 4", f"steps = 4\noutput = '{tmp_path / 'runs'}'"))
    return path


@pytest.mark.parametrize("options", [(), ("--trainer.lora.rank", "4"), ("--trainer.moments", "8bit")])
def test_a_checkpoint_is_as_large_as_expected(toml: Path, options: tuple[str, ...]) -> None:
    words = ("--cluster.kind", "inline", "--steps", "1", *options)
    assert llamarl_here("train", toml, *words).returncode == 0
    config = load_config(toml, words)
    need = disk_need(config, load_shape(config.model.path))
    folder = Path(config.output, config.name, "checkpoints", step_folder(1))
    (file,) = folder.glob("*.safetensors")
    assert file.stat().st_size == pytest.approx(need.checkpoint, abs=20 << 10), "but for the header"
    assert need.num_checkpoints == 1


def test_how_many_lie_there_at_once(toml: Path) -> None:
    def num(*options: str) -> int:
        config = load_config(toml, ["--steps", "100", *options])
        return disk_need(config, load_shape(config.model.path)).num_checkpoints

    assert num() == 2, "of steps 50 and 100"
    assert num("--checkpoint.every_steps", "10") == 3, "two that are kept, and one that is written"
    assert num("--checkpoint.every_steps", "0") == 1
    assert num("--checkpoint.every_steps", "10", "--checkpoint.keep_every", "20") == 8


def test_a_full_disk_is_said_before_the_run(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llamarl_here("train", toml, "--dry-run").stdout.splitlines()[-1].strip().startswith("ready")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 1000))
    done = llamarl_here("train", toml, "--dry-run")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert "ready" not in last and "checkpoint.keep" in last
