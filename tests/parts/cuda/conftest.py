"""Tiny models, a run of one, and trainer ranks in the process of the test."""

from tests.end_to_end.conftest import model, toml
from tests.generation.conftest import _one_thread, make_model
from tests.weight_sync.conftest import receive  # its folder, where `in_process` lies, is on the path from here on

__all__ = ["_one_thread", "make_model", "model", "receive", "toml"]
