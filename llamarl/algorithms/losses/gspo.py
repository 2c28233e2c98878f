"""GSPO (arXiv 2507.18071, equations 5 to 7): importance ratio, clip and mean of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, clipped_surrogate, require_between


@dataclass(frozen=True)
class Gspo(Loss):
    """The clipped surrogate with s = (pi(y) / mu(y)) ** (1 / |y|) instead of a token's ratio."""

    MEAN_OVER: ClassVar[Literal["tokens", "sequences"]] = "sequences"

    clip_low: float = 3e-4
    """Largest fall of a sequence's ratio. Geometric means move far less than single tokens."""
    clip_high: float = 4e-4
    """Largest rise of a sequence's ratio."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("clip_low", self.clip_low, 0, 1)
        require_between("clip_high", self.clip_high, 0)

    def token_losses(self, positions: Positions) -> TokenLosses:
        log_ratio_N = positions.sequence_means(positions.log_ratio_N)
        # Each position has its sequence's loss, and the mean over the sequence's positions restores it.
        return clipped_surrogate(log_ratio_N, positions.advantages_N, self.clip_low, self.clip_high)
