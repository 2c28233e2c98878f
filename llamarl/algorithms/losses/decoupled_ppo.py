"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298, equation 5): corrects for the behavior policy, stays near
the proximal one."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, clipped_surrogate, require_between


@dataclass(frozen=True)
class DecoupledPpo(Loss):
    """-(proximal / mu) * min(u A, clip(u, 1 - clip, 1 + clip) A), u = pi / proximal.

    The weight corrects for the policy that sampled. The clip keeps near the policy at the beginning of the step.
    """

    clip: float = 0.2
    """Largest change of u in either direction."""
    max_weight: float = 5.0
    """Cap of proximal / mu without `truncate`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("clip", self.clip, 0, 1)
        require_between("max_weight", self.max_weight, 0)

    def token_losses(self, positions: Positions) -> TokenLosses:
        token = clipped_surrogate(positions.proximal_log_ratio_N, positions.advantages_N, self.clip, self.clip)
        if self.truncate is not None:  # the base class weighs, with `truncate` as its cap
            return token
        weights_N = positions.proximal_weights_N
        loss_N = token.loss_N * weights_N.clamp(max=self.max_weight)
        return TokenLosses(loss_N=loss_N, capped_N=token.capped_N | (weights_N > self.max_weight))
