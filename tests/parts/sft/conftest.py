"""A tiny model."""

from tests.training.conftest import make_model, one_thread

__all__ = ["make_model", "one_thread"]
