"""Builds the base model of a run that has none, by a supervised warm start in a separate process."""

from __future__ import annotations

import subprocess

from llamarl.cluster.start_up import dependent
from llamarl.config import ConfigError, RunConfig, load_sft_config
from llamarl.training.base_model import is_made


def ensure_base_model(config: RunConfig) -> None:
    """Builds `model.path` with `model.warm_start` unless it exists. The command shows its own progress.

    Raises:
        ConfigError: the warm start cannot work, or the folder contains a model made with other settings.
    """
    if not config.model.warm_start or is_made(config.model.path, load_sft_config(config.model.warm_start)):
        return
    command = dependent("from llamarl.cli.main import script; script()")
    command += ["sft", config.model.warm_start, "--output", config.model.path]
    if subprocess.run(command, check=False).returncode:
        raise ConfigError(f"model.warm_start = {config.model.warm_start!r} did not make {config.model.path}, see above")
