"""RAFT (arXiv 2304.06767, section 3): maximum likelihood on the responses that are better than their group."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses


@dataclass(frozen=True)
class Raft(Loss):
    """gradient = sum_t [A > 0] * grad log pi: imitates the good responses, each with equal weight."""

    def token_losses(self, positions: Positions) -> TokenLosses:
        good_N = positions.advantages_N > 0
        return TokenLosses(loss_N=-(positions.logprobs_N * good_N), capped_N=~good_N)
