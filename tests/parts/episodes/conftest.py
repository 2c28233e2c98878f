"""A tiny model, and a run of it."""

from tests.cli.conftest import toml
from tests.executors.conftest import _one_thread, model

__all__ = ["_one_thread", "model", "toml"]
