"""AIPO, asynchronous importance-weighted policy optimization (LlamaRL, arXiv 2505.24034, section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.algorithms.losses._base import Loss, LossInputs, LossOutput, masked_log_ratio, ratio_statistics


@dataclass(frozen=True)
class Aipo(Loss):
    """gradient = sum_t min(pi / mu, rho) * A * grad log pi.

    The cap is one-sided and the capped ratio is a weight without gradient: above the cap a token still pulls with
    rho * A * grad log pi, unlike PPO's clip, which silences it.
    """

    rho: float = 4.0
    """Cap of the importance ratio; the paper found 2 to 10 to work."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        log_ratio_N = masked_log_ratio(inputs)
        weights_N = log_ratio_N.exp().clamp(max=self.rho)
        advantages_N = inputs.advantages_N.masked_fill(~inputs.loss_mask_N, 0.0)
        logprobs_N = inputs.logprobs_N.masked_fill(~inputs.loss_mask_N, 0.0)
        sums, maxima = ratio_statistics(log_ratio_N, self.rho)
        return LossOutput(loss=-(weights_N * advantages_N * logprobs_N).sum(), sums=sums, maxima=maxima)
