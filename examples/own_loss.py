"""Example of a loss: the policy gradient with a smooth limit of the importance weights.

    llamarl train configs/demo.toml --overwrite --trainer.loss "{name = 'examples.own_loss:Faded', scale = 4.0}"

`token_losses` returns the loss of each token. The base class masks, sums and reports metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses import Loss, Positions, TokenLosses


@dataclass(frozen=True)
class Faded(Loss):
    """gradient = sum_t w(r) * A * grad log pi with r = pi / mu and w(r) = scale * tanh(r / scale)."""

    scale: float = 4.0
    """Upper limit of the weights. A ratio far below `scale` is its own weight."""

    def token_losses(self, positions: Positions) -> TokenLosses:
        ratio_N = positions.log_ratio_N.exp().detach()
        weights_N = self.scale * (ratio_N / self.scale).tanh()
        loss_N = -weights_N * positions.advantages_N * positions.logprobs_N
        return TokenLosses(loss_N=loss_N, capped_N=ratio_N > self.scale)
