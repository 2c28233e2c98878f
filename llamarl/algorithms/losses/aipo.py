"""AIPO, asynchronous importance-weighted policy optimization (LlamaRL, arXiv 2505.24034, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, require_between


@dataclass(frozen=True)
class Aipo(Loss):
    """gradient = sum_t min(pi / mu, rho) * A * grad log pi.

    The cap is one-sided, and the capped ratio is a weight without gradient. Above the cap a token still has the
    gradient rho * A * grad log pi, unlike with PPO's clip.
    """

    rho: float = 4.0
    """Cap of the importance ratio. 2 to 10 worked in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("rho", self.rho, 0)

    def token_losses(self, positions: Positions) -> TokenLosses:
        ratio_N = positions.log_ratio_N.detach().exp()
        weights_N = ratio_N.clamp(max=self.rho)
        loss_N = -(weights_N * positions.advantages_N * positions.logprobs_N)
        return TokenLosses(loss_N=loss_N, capped_N=ratio_N > self.rho)
