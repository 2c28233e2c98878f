"""DAPO (arXiv 2503.14476, section 3): a wider clip upwards than downwards, mean over tokens."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, clipped_surrogate, require_between


@dataclass(frozen=True)
class Dapo(Loss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): the probability of unlikely tokens can grow."""

    clip_low: float = 0.2
    """Largest fall of the ratio."""
    clip_high: float = 0.28
    """Largest rise of the ratio."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("clip_low", self.clip_low, 0, 1)
        require_between("clip_high", self.clip_high, 0)

    def token_losses(self, positions: Positions) -> TokenLosses:
        return clipped_surrogate(positions.log_ratio_N, positions.advantages_N, self.clip_low, self.clip_high)
