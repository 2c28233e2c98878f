"""One tiny model, and a made-up evaluation."""

from __future__ import annotations

from tests.cli.conftest import model
from tests.observability.conftest import make_eval

__all__ = ["make_eval", "model"]
