"""A run that starts from a LoRA adapter in PEFT's format: the base model with the adapter merged in, made once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import xxhash

from llamarl.config import ConfigError, RunConfig, from_home
from llamarl.config.hub import folder_of
from llamarl.models.folder import fingerprints
from llamarl.run.names import resolved_path

MERGED = ".merged"
"""Folder below `output` in which merged models lie, whichever run needs them."""


def with_adapter_merged(config: RunConfig, *, command: str, writes: bool = True) -> RunConfig:
    """The settings with the merged model as `model.path`, which is made unless it is there.

    Args:
        command: begins lines on standard error.
        writes: False makes nothing, for a dry run, and leaves `model.path` as it is where nothing is made yet.

    Raises:
        ConfigError: the adapter cannot be read, or belongs to another model.
    """
    from llamarl.models.peft import Adapter, is_adapter

    if not config.model.adapter:
        if is_adapter(config.model.path):
            raise ConfigError(
                f"model.path = {config.model.path!r} holds an adapter and no model; set model.adapter to it, and "
                "model.path to its base model"
            )
        return config
    try:
        adapter = Adapter.of(from_home(config.model.adapter), config.model.path)
    except ConfigError as error:
        raise ConfigError(f"model.adapter = {config.model.adapter!r}: {error}") from None
    plain = config.model.model_copy(update={"adapter": ""})
    base = resolved_path(config.model.path, "model.path", weights=writes, command=command)
    to = Path(config.output, MERGED, f"{adapter.folder.resolve().name}-{_digest(adapter.folder, base)}")
    if not (to / "config.json").is_file():
        if not writes:
            return config.model_copy(update={"model": plain})
        sys.stderr.write(f"{command}: model.adapter: {adapter.folder} is merged into {base}, as {to}\n")
        try:
            adapter.merge(base, to)
        except ConfigError as error:
            raise ConfigError(f"model.adapter = {config.model.adapter!r}: {error}") from None
    return config.model_copy(update={"model": plain.model_copy(update={"path": str(to)})})


def _digest(adapter: Path, base: str) -> str:
    """Short digest of the weights and settings that decide the merged weights."""
    settings = (adapter / "adapter_config.json").read_text(encoding="utf-8")
    parts = [fingerprints(adapter), fingerprints(folder_of(base)), settings]
    return xxhash.xxh3_64_hexdigest(json.dumps(parts, sort_keys=True).encode())[:12]
