"""A member with options of every kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Tuned:
    """Options of every kind, one of them without a default."""

    size: int
    """Required."""
    rho: float = 4.0
    """A number."""
    kind: Literal["low", "high"] = "low"
    """A choice."""
    words: tuple[str, ...] = ()
    """A list."""
    doubled: int = field(init=False, default=0)
    """Derived, so nobody sets it."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size = {self.size} must not be negative")
        object.__setattr__(self, "doubled", 2 * self.size)


class NoDataclass:
    """Not a part."""
