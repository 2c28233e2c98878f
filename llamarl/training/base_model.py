"""Checks whether a base model exists and was made by the current settings. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from llamarl.config import ConfigError, SftConfig

RECORD_FILE = "llamarl_sft.json"
"""File in the folder of a model made by a warm start, with a digest of its settings."""


def settings_hash(config: SftConfig) -> str:
    """Returns a short digest of the settings that decide the weights. The output folder and the number of threads do
    not."""
    settings = config.model_dump(mode="json", exclude={"output", "threads"})
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def made_by(folder: Path) -> str:
    """Returns the hash of the settings that made a folder, or "something else" if none is recorded."""
    record = folder / RECORD_FILE
    return json.loads(record.read_text(encoding="utf-8"))["settings_hash"] if record.exists() else "something else"


def is_made(model_path: str | Path, config: SftConfig) -> bool:
    """Returns whether `model_path` holds the model that `config` makes; False if nothing is there yet.

    Raises:
        ConfigError: the folder holds a model that other settings, or something else, made.
    """
    folder = Path(model_path)
    if not (folder / "config.json").exists():
        return False
    if (found := made_by(folder)) != settings_hash(config):
        raise ConfigError(
            f"model.path = {str(folder)!r} holds a model made by other settings than those of model.warm_start "
            f"({found} there, {settings_hash(config)} here); delete the folder, or set another model.path"
        )
    return True
