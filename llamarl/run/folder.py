"""The folder of one run and the files in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from llamarl.config import ConfigError, RunConfig, dump_toml, load_config


class RunFolder:
    """`<output>/<name>`: config, metrics, rollouts, logs, checkpoints, summary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.summary = path / "summary.json"
        self.trace = path / "trace.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.kernels = path / "kernels"
        """Which code multiplies weights here, as it was measured."""

    def way_on(self) -> str:
        """How a run goes on that an executor has left."""
        if saved := sorted(self.checkpoints.glob("step-*")):
            return f"--resume goes on from step {int(saved[-1].name.removeprefix('step-'))}"
        return "no checkpoint was saved yet, so --overwrite starts it again"


def check_run_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> Path:
    """The path of the run's folder, which nothing has touched yet.

    Raises:
        ConfigError: it exists and neither `resume` nor `overwrite` was asked for, or what was asked for cannot be.
    """
    path = Path(config.output) / config.name
    if overwrite and resume:
        raise ConfigError("--resume and --overwrite contradict each other; give one")
    if path.exists() and not (resume or overwrite):
        raise ConfigError(f"{path} exists; go on with it (--resume), replace it (--overwrite) or choose another --name")
    if resume and not path.exists():
        raise ConfigError(f"--resume: there is no run in {path}; start it without --resume")
    if resume and (path / "config.toml").exists():
        _check_same_weights(load_config(path / "config.toml"), config)
    is_empty = path.is_dir() and not any(path.iterdir())
    if overwrite and path.exists() and not is_empty and not (path / "config.toml").exists():
        raise ConfigError(f"--overwrite: {path} is not a run folder (no config.toml in it), so it is not deleted")
    return path


def _check_same_weights(before: RunConfig, now: RunConfig) -> None:
    """Raises ConfigError when what checkpoints hold would mean something else."""
    for name, old, new in (
        ("model.path", before.model.path, now.model.path),
        ("trainer.lora", before.trainer.lora, now.trainer.lora),
    ):
        if old != new:
            raise ConfigError(
                f"--resume: {name} was {old!r} when the run began and is {new!r} now, which its checkpoints do "
                "not fit; use what it was, or start another run with another --name"
            )


def prepare_run_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> RunFolder:
    """Creates the run's folder, or takes it over, and writes the resolved config into it.

    Raises:
        ConfigError: as `check_run_folder`, or it cannot be written.
    """
    folder = RunFolder(check_run_folder(config, resume=resume, overwrite=overwrite))
    try:
        if overwrite and folder.path.exists():
            shutil.rmtree(folder.path)
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(dump_toml(config))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder.path}: {error.strerror}; choose another --output") from error
    return folder
