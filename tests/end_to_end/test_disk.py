"""A disk that fills up during a run: it goes on or stops with a clear message, and what was saved stays good."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamarl.checkpoint.store import CheckpointStore
from llamarl.run.folder import RunFolder
from tests.end_to_end.tiny import Command, llamarl_here, rows

DISK_BYTES = 3 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:  # a smaller piece may still fit
                continue
    return filler


def test_the_disk_fills_up(disk: Path, toml: Path, tmp_path: Path) -> None:
    """Rows that do not fit are lost and periodic checkpoints are left out, once with a warning; the end is an error."""
    run = disk / "tiny"
    overrides = ("--output", disk, "--steps", 100, "--checkpoint.every_steps", 5, "--cluster.kind", "inline")
    command = Command.start(tmp_path, "train", toml, *overrides)
    command.until((run / "checkpoints" / "step-00000010").exists)
    filler = fill(disk)
    code, said = command.wait()
    lines = said.strip().splitlines()
    assert sum(f"lost at {run / 'metrics.jsonl'} (No space left on device)" in line for line in lines) == 1, said
    assert sum(f"{run}/journal keeps nothing until it can be written" in line for line in lines) == 1, said
    assert sum(f"{run}/journal ends without steps " in line for line in lines) <= 1, said
    assert any(line.startswith("warning: no checkpoint at step ") for line in lines), said
    assert code == 1
    *_, last, files = lines
    assert last.startswith("llamarl train: NotSaved: no checkpoint at step 100: [Errno 28] No space left on device"), (
        said
    )
    assert files.startswith("Files: "), "one sentence, not a traceback"
    assert "Traceback" not in said
    assert sum("was not saved" in line for line in lines) == 1 and "--resume continues from step" in last
    summary = command.out.read_text().partition("stopping executors\n")[2]
    assert summary.startswith("tiny: FAILED: no checkpoint at step 100")
    assert "step 100/100" in command.out.read_text(), "the run did not go on"
    recorded = rows(run / "metrics.jsonl"), rows(run / "rollouts.jsonl")
    assert all(recorded)
    checkpoint, damaged = CheckpointStore(run / "checkpoints", keep=2).load_newest()
    assert checkpoint is not None and not damaged and checkpoint.step >= 10

    filler.unlink()
    last = RunFolder(run).done_steps()  # a fast machine trains past the checkpoint before the disk is full
    done = llamarl_here("train", toml, "--output", disk, "--steps", last + 3, "--cluster.kind", "inline", "--resume")
    assert done.returncode == 0, done.stderr
    steps = [row["step"] for row in rows(run / "metrics.jsonl") if row["kind"] == "step"]
    assert steps[-3:] == [last + 1, last + 2, last + 3]


def test_a_disk_that_is_full_from_the_start(disk: Path, toml: Path) -> None:
    fill(disk)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - (16 << 10))
    done = llamarl_here("train", toml, "--output", disk, "--cluster.kind", "inline")
    assert done.returncode in (1, 2)
    said = done.stderr.strip().splitlines()
    assert any("llamarl train: " in line for line in said), done.stderr
    assert "No space left on device" in done.stderr or "cannot be written" in done.stderr
    (disk / "tiny" / "checkpoints").mkdir(exist_ok=True)
    checkpoint, damaged = CheckpointStore(disk / "tiny" / "checkpoints", keep=2).load_newest()
    assert checkpoint is None and not damaged
