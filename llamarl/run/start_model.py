"""The model that a run starts from where it has to be made first: of a LoRA adapter, or of another run's checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import xxhash

from llamarl.checkpoint.folder import MANIFEST, saved_steps, step_folder
from llamarl.config import ConfigError, RunConfig, from_home
from llamarl.config.hub import folder_of
from llamarl.models.folder import PEFT_CONFIG, fingerprints, is_adapter
from llamarl.run.asked import is_run, run_settings
from llamarl.run.export import base_of, export
from llamarl.run.names import resolved_path

MADE = ".models"
"""Folder below `output` in which made models lie, whichever run needs them."""


def with_start_model(config: RunConfig, *, command: str, writes: bool = True) -> RunConfig:
    """The settings with a made model as `model.path`, where `model.adapter` names an adapter or `model.path` a run. The
    model is made unless it is there.

    Args:
        command: begins lines on standard error.
        writes: False makes nothing, for a dry run, and gives the base model where nothing is made yet.

    Raises:
        ConfigError: the adapter or the checkpoint cannot be read, or belongs to another model.
    """
    if config.model.adapter:
        return _of_adapter(config, command, writes=writes)
    if is_adapter(config.model.path):
        raise ConfigError(
            f"model.path = {config.model.path!r} holds an adapter, not a model; set model.adapter to it, and "
            "model.path to its base model"
        )
    return _of_run(config, command, writes=writes) if is_run(config.model.path) else config


def _of_adapter(config: RunConfig, command: str, *, writes: bool) -> RunConfig:
    """The base model with the adapter merged in. Raises ConfigError."""
    from llamarl.models.peft import Adapter

    base = resolved_path(config.model.path, "model.path", weights=writes, command=command)
    try:
        adapter = Adapter.of(from_home(config.model.adapter), base)
        settings = (adapter.folder / PEFT_CONFIG).read_text(encoding="utf-8")
        to = _place(config, adapter.folder, [fingerprints(adapter.folder), fingerprints(folder_of(base)), settings])
        if writes and not (to / "config.json").is_file():
            sys.stderr.write(f"{command}: model.adapter: {adapter.folder} is merged into {base}, as {to}\n")
            adapter.merge(base, to)
    except ConfigError as error:
        raise ConfigError(f"model.adapter = {config.model.adapter!r}: {error}") from None
    return _with(config, to, base)


def _of_run(config: RunConfig, command: str, *, writes: bool) -> RunConfig:
    """The newest checkpoint of another run, adapters merged, in float32. Raises ConfigError."""
    run = Path(from_home(config.model.path))
    try:
        settings, steps = run_settings(run), saved_steps(run / "checkpoints")
        base = base_of(run, settings, weights=False, command=command)
        if not steps:
            raise ConfigError("the run has not saved a checkpoint yet")
        manifest = run / "checkpoints" / step_folder(steps[-1]) / MANIFEST
        to = _place(config, run, [manifest.read_text(encoding="utf-8")])
        if writes and not (to / "config.json").is_file():
            merge = settings.trainer.lora is not None
            made = export(run, settings, to, None, merge, command=command, dtype="float32")
            sys.stderr.write(f"{command}: model.path: step {made.step} of {run}, as {to}\n")
    except ConfigError as error:
        raise ConfigError(f"model.path = {config.model.path!r}: {error}") from None
    return _with(config, to, base)


def _place(config: RunConfig, source: Path, parts: list[object]) -> Path:
    """Folder of a made model, by what decides its weights."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())[:12]
    return Path(from_home(config.output), MADE, f"{source.resolve().name}-{digest}")


def _with(config: RunConfig, made: Path, base: str) -> RunConfig:
    path = str(made) if (made / "config.json").is_file() else base
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path, "adapter": ""})})
