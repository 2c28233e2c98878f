"""CISPO (MiniMax-M1, arXiv 2506.13585, equation 4): clipped importance weights, with a gradient for every token."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, require_between


@dataclass(frozen=True)
class Cispo(Loss):
    """gradient = sum_t clip(r, 1 - clip_low, 1 + clip_high) * A * grad log pi, the weight without gradient."""

    clip_low: float = 1.0
    """1 leaves the weight without a lower bound, as in the paper."""
    clip_high: float = 4.0
    """Largest weight, less 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("clip_low", self.clip_low, 0, 1)
        require_between("clip_high", self.clip_high, 0)

    def token_losses(self, positions: Positions) -> TokenLosses:
        ratio_N = positions.log_ratio_N.detach().exp()
        weights_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss_N = -(weights_N * positions.advantages_N * positions.logprobs_N)
        return TokenLosses(loss_N=loss_N, capped_N=weights_N != ratio_N)
