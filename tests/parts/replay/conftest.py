"""A tiny model, and a run of it."""

from tests.end_to_end.conftest import model, toml

__all__ = ["model", "toml"]
