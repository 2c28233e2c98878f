"""Run configuration: TOML plus dotted overrides, validated before any process starts. Imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamarl.config.errors import ConfigError, did_you_mean
    from llamarl.config.files import open_file, open_own
    from llamarl.config.load import (
        dump_toml,
        load_config,
        load_recorded,
        load_sft,
        load_sft_config,
        read_json,
        read_rows,
        read_text,
        resolved,
        tables,
        validated,
    )
    from llamarl.config.ref import Ref, build, make_record
    from llamarl.config.schema import RunConfig
    from llamarl.config.section import FilePath, from_home
    from llamarl.config.sft import SftConfig

__all__ = [
    "ConfigError",
    "FilePath",
    "Ref",
    "RunConfig",
    "SftConfig",
    "build",
    "did_you_mean",
    "dump_toml",
    "from_home",
    "load_config",
    "load_recorded",
    "load_sft",
    "load_sft_config",
    "make_record",
    "open_file",
    "open_own",
    "read_json",
    "read_rows",
    "read_text",
    "resolved",
    "tables",
    "validated",
]
_HOMES = {
    "errors": ("ConfigError", "did_you_mean"),
    "files": ("open_file", "open_own"),
    "section": ("FilePath", "from_home"),
    "ref": ("Ref", "build", "make_record"),
    "schema": ("RunConfig",),
    "sft": ("SftConfig",),
}
"""Names by module; all others are in `load`."""


def __getattr__(name: str) -> Any:
    """Names are imported where one is used: a process that only raises a `ConfigError` builds no schema."""
    if name not in __all__:
        raise AttributeError(f"module 'llamarl.config' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "load")
    return getattr(importlib.import_module(f"llamarl.config.{home}"), name)
