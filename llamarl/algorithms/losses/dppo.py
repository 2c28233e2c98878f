"""DPPO: a trust region in probabilities instead of ratios (divergence PPO with the binary total variation, arXiv
2602.04879)."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, require_between


@dataclass(frozen=True)
class Dppo(Loss):
    """-r A, without a gradient if the token's probability has already moved by more than `max_difference` in its
    direction.

    A ratio says little about an unlikely token: 1e-5 -> 1e-4 is a ratio of 10 and hardly a change of the policy.
    """

    max_difference: float = 0.2
    """Largest |pi - mu| of a sampled token that is still pushed away from mu."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("max_difference", self.max_difference, 0, 1)

    def token_losses(self, positions: Positions) -> TokenLosses:
        ratio_N, advantages_N = positions.log_ratio_N.exp(), positions.advantages_N
        difference_N = positions.logprobs_N.detach().exp() - positions.behavior_logprobs_N.exp()
        silent_N = (difference_N * advantages_N.sign()) > self.max_difference
        return TokenLosses(loss_N=-(ratio_N * advantages_N).masked_fill(silent_N, 0.0), capped_N=silent_N)
