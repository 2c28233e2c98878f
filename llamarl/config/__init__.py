"""Run configuration: TOML plus dotted overrides, validated before any process starts. Imports no torch."""

from llamarl.config.errors import ConfigError, did_you_mean
from llamarl.config.load import (
    dump_toml,
    load_config,
    load_sft,
    load_sft_config,
    open_file,
    read_json,
    read_rows,
    read_text,
    settled,
    tables,
    validated,
)
from llamarl.config.path import FilePath, from_home
from llamarl.config.ref import Ref, build, make_record
from llamarl.config.schema import RunConfig
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
    "load_sft",
    "load_sft_config",
    "make_record",
    "open_file",
    "read_json",
    "read_rows",
    "read_text",
    "settled",
    "tables",
    "validated",
]
