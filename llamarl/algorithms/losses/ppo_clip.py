"""PPO's clipped surrogate (arXiv 1707.06347, equation 7), ratio to the behavior policy, mean over tokens."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, clipped_surrogate, require_between


@dataclass(frozen=True)
class PpoClip(Loss):
    """-min(r A, clip(r, 1 - clip, 1 + clip) A): a token that has moved far enough in its direction has no gradient."""

    clip: float = 0.2
    """Largest change of the ratio in either direction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("clip", self.clip, 0, 1)

    def token_losses(self, positions: Positions) -> TokenLosses:
        return clipped_surrogate(positions.log_ratio_N, positions.advantages_N, self.clip, self.clip)
