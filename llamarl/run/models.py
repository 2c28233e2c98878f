"""Models of a run and of commands: which folder a run starts from, and which model a command opens."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from llamarl.checkpoint.folder import MANIFEST, saved_steps, step_folder
from llamarl.config import ConfigError, RunConfig, from_home, load_recorded
from llamarl.config.hub import folder_of
from llamarl.data.chat_format import of_run
from llamarl.models.folder import PEFT_CONFIG, fingerprints, is_adapter
from llamarl.run.export import base_of, export
from llamarl.run.hub_pins import resolved_path

OF_GENERATOR = {"device", "dtype", "kv_dtype", "threads", "max_running", "prefill_tokens", "cuda_graphs"}
"""Settings of a run's generators that decide how its model computes, and with which it is served."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedModel:
    """A model that a command can open."""

    path: str
    """Folder, or `owner/name@commit` on the Hub."""
    run: RunConfig | None = None
    """Settings of the run whose newest checkpoint this is. None means that the model does not come from a run."""
    place: Path | None = None
    """File with these settings."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for prompts, ends of responses and serving, as in the run. Empty without a run."""
        if self.run is None:
            return {}
        run = self.run
        return {
            "data": of_run(run.data, for_agent=run.rollout.agent is not None),
            "rollout": run.rollout.model_dump(mode="json", include={"max_new_tokens", "stop_strings"}),
            "generator": run.generator.model_dump(mode="json", exclude_none=True, include=OF_GENERATOR),
        }


def is_run(path: str | Path) -> bool:
    """Returns whether a path is the folder of a run, whose checkpoints may still be missing."""
    folder = Path(from_home(path))
    return (folder / "config.toml").is_file() and not (folder / "config.json").is_file()


def run_settings(path: str | Path) -> RunConfig:
    """Returns the settings of the run in a folder. Raises ConfigError."""
    return load_recorded(Path(from_home(path)) / "config.toml")


@contextmanager
def asked_model(given: str | Path, option: str, *, command: str) -> Iterator[AskedModel]:
    """Opens the model that a command names. Checkpoints of runs and adapters become a folder that exists inside of the
    context.

    Args:
        option: names the argument in messages.
        command: prefix of lines on standard error about the files that are read.

    Raises:
        ConfigError: there is no such model, no valid checkpoint, or no base model of an adapter.
    """
    path = Path(from_home(given))
    if not is_run(path) and not is_adapter(path):
        yield AskedModel(path=resolved_path(str(from_home(given)), option, command=command))
        return
    with tempfile.TemporaryDirectory(prefix="llamarl-", ignore_cleanup_errors=True) as folder:
        to = Path(folder, "model")
        if is_run(path):
            from llamarl.run.export import export_values

            config = run_settings(path)
            step = export_values(path, config, to, command=command)
            sys.stderr.write(f"{command}: step {step} of {given}\n")
            yield AskedModel(path=str(to), run=config, place=path / "config.toml")
            return
        from llamarl.models.peft import Adapter

        adapter = Adapter.of(path)
        base = resolved_path(adapter.base, f"base_model_name_or_path of {given}", command=command)
        sys.stderr.write(f"{command}: adapters in {given}, merged into {base}\n")
        adapter.merge(base, to)
        yield AskedModel(path=str(to))


MADE = ".models"
"""Folder below `output` with models made for any run."""


def with_start_model(config: RunConfig, *, command: str, writes: bool = True) -> RunConfig:
    """Returns the settings with a made model as `model.path`, if `model.adapter` names an adapter or `model.path` a
    run. Makes the model unless it exists.

    Args:
        command: prefix of lines on standard error.
        writes: False makes nothing, for a dry run, and returns the base model if nothing was made before.

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
    """Merges an adapter into the base model. Raises ConfigError."""
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
    """Exports the newest checkpoint of another run, with adapters merged, in float32. Raises ConfigError."""
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
    """Returns the folder of a made model, named by a digest of everything that decides its weights."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())[:12]
    return Path(from_home(config.output), MADE, f"{source.resolve().name}-{digest}")


def _with(config: RunConfig, made: Path, base: str) -> RunConfig:
    path = str(made) if (made / "config.json").is_file() else base
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path, "adapter": ""})})
