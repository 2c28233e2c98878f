"""A tiny model, and a Hub."""

from tests.parts.hub.conftest import hub
from tests.training.conftest import make_model, one_thread

__all__ = ["hub", "make_model", "one_thread"]
