"""The folder of one run and the files in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from llamarl.config import ConfigError, RunConfig, dump_toml


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


def prepare_run_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> RunFolder:
    """Creates the run's folder, or takes it over, and writes the resolved config into it.

    Raises:
        ConfigError: it exists and neither `resume` nor `overwrite` was asked for, or it cannot be written.
    """
    path = Path(config.output) / config.name
    if overwrite and resume:
        raise ConfigError("--resume and --overwrite contradict each other; give one")
    if path.exists() and not (resume or overwrite):
        raise ConfigError(f"{path} exists; go on with it (--resume), replace it (--overwrite) or choose another --name")
    if resume and not path.exists():
        raise ConfigError(f"--resume: there is no run in {path}; start it without --resume")
    folder = RunFolder(path)
    try:
        if overwrite and path.exists():
            _remove_run(path)
        folder.logs.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(dump_toml(config))
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}; choose another --output") from error
    return folder


def _remove_run(path: Path) -> None:
    """Deletes a run folder; refuses to delete what is not one."""
    if any(path.iterdir()) and not (path / "config.toml").exists():
        raise ConfigError(f"--overwrite: {path} is not a run folder (no config.toml in it), so it is not deleted")
    shutil.rmtree(path)
