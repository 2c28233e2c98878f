"""A member without options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlainPart:
    """Nothing to set."""
