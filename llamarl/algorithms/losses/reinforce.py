"""REINFORCE (Williams 1992): the policy gradient as if every token had been sampled from the policy in training."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses


@dataclass(frozen=True)
class Reinforce(Loss):
    """gradient = sum_t A * grad log pi, without correction for staleness unless `truncate` is set."""

    def token_losses(self, positions: Positions) -> TokenLosses:
        loss_N = -(positions.advantages_N * positions.logprobs_N)
        return TokenLosses(loss_N=loss_N, capped_N=~positions.mask_N)  # there is no cap
