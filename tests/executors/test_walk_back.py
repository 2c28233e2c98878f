"""A run with a critic that is resumed from damaged checkpoints, of the critic or of the trainer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llamarl.config import ConfigError, RunConfig
from llamarl.run.folder import RunFolder
from tests.end_to_end.tiny import rows
from tests.executors.runs import learnt, tiny_config, train
from tests.nightly import crossed, nightly


def step_folder(folder: RunFolder, of: str, step: int) -> Path:
    return folder.checkpoints / ("critic" if of == "critic" else "") / f"step-{step:08d}"


def damage(checkpoint: Path, how: str) -> None:
    if how == "missing":
        shutil.rmtree(checkpoint)
        return
    (path,) = checkpoint.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data if how == "bit" else data[:-100])


def copied(run: tuple[RunConfig, RunFolder], output: Path) -> tuple[RunConfig, RunFolder]:
    """A run of its own, which can be damaged and resumed."""
    config, folder = run
    shutil.copytree(folder.path.parent, output, dirs_exist_ok=True)
    return config.model_copy(update={"output": str(output)}), RunFolder(output / config.name)


@pytest.fixture(scope="module")
def saved_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunFolder]:
    """Four steps; saved are 3 and 4, and 2 of the critic alone."""
    config = tiny_config(model, tmp_path_factory.mktemp("saved"), steps=4, checkpoint={"every_steps": 1})
    return config, train(config)


@pytest.fixture(scope="module")
def from_step_3(saved_run: tuple[RunConfig, RunFolder], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Resumed as if step 4 had never been."""
    config, folder = copied(saved_run, tmp_path_factory.mktemp("resumed"))
    for of in ("trainer", "critic"):
        damage(step_folder(folder, of, 4), "missing")
    return train(config, resume=True)


@nightly("runs of their own; by day it does not go on without a step that both have")
@pytest.mark.parametrize(("of", "how"), crossed(["trainer", "critic"], ["bit", "truncated", "missing"]))
def test_it_goes_back_to_what_trainer_and_critic_both_have(
    saved_run: tuple[RunConfig, RunFolder], from_step_3: RunFolder, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], of: str, how: str,
) -> None:  # fmt: skip
    """Whichever of the two is damaged; it says so, and goes on as if that step had never been."""
    config, folder = copied(saved_run, tmp_path)
    damage(step_folder(folder, of, 4), how)
    train(config, resume=True)
    said, done = (line for line in capsys.readouterr().err.splitlines() if "CPU threads" not in line)
    assert "the run is finished, all 4 steps are done" in done
    assert said.startswith(f"warning: --resume continues from step 3, because {step_folder(folder, of, 4)}")
    assert ("cannot be read" in said) if how == "missing" else ("differs from its manifest" in said)
    assert learnt(folder) == learnt(from_step_3)
    assert rows(folder.rollouts) == rows(from_step_3.rollouts)
    for one in ("trainer", "critic"):
        assert step_folder(folder, one, 4).exists(), "saved again"


@pytest.mark.parametrize("has_journal", [True, False])
def test_a_critic_s_first_checkpoint_alone_is_none(
    saved_run: tuple[RunConfig, RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str], has_journal: bool
) -> None:
    """It is written first, so a run may have been killed right behind it: all steps are taken again, on what is on
    record, or else from the beginning."""
    config, folder = copied(saved_run, tmp_path)
    for step in (3, 4):
        damage(step_folder(folder, "trainer", step), "missing")
    if not has_journal:
        shutil.rmtree(folder.path / "journal")
    train(config, resume=True)
    said = capsys.readouterr().err
    assert ("no checkpoint was saved yet; the run starts from the beginning" in said) == (not has_journal)
    assert learnt(folder) == learnt(saved_run[1])


def test_without_a_step_that_both_have_it_does_not_go_on(
    saved_run: tuple[RunConfig, RunFolder], tmp_path: Path
) -> None:
    config, folder = copied(saved_run, tmp_path)
    damage(step_folder(folder, "trainer", 4), "bit")
    damage(step_folder(folder, "critic", 3), "truncated")
    with pytest.raises(ConfigError, match=r"no checkpoint is complete: .*00000004"):
        train(config, resume=True)
