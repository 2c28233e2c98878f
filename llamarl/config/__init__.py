"""Run configuration: TOML plus dotted overrides, validated before any process starts. Imports no torch."""

from llamarl.config.errors import ConfigError
from llamarl.config.load import dump_toml, load_config, load_sft_config
from llamarl.config.ref import Ref, build
from llamarl.config.schema import RunConfig
from llamarl.config.sft import SftConfig

__all__ = ["ConfigError", "Ref", "RunConfig", "SftConfig", "build", "dump_toml", "load_config", "load_sft_config"]
