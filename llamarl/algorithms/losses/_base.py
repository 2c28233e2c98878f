"""What every loss takes and returns. Losses only call methods of tensors, so this folder needs no torch to import.

Shape suffix: N trainable positions of one microbatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One microbatch, seen by a loss."""

    logprobs_N: Tensor
    """Natural-log probability of each token under the policy in training, float32, with gradient."""
    behavior_logprobs_N: Tensor
    """The same under the distribution that the token was sampled from, float32."""
    advantages_N: Tensor
    """float32."""
    loss_mask_N: Tensor
    """bool; what is False may hold anything, NaN included, and reaches neither loss nor gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """Sums over the unmasked positions of one microbatch."""

    loss: Tensor
    """Scalar sum, with gradient."""
    sums: dict[str, Tensor]
    """Scalar sums to log; the trainer divides them by the count of positions that it computed."""
    maxima: dict[str, Tensor]
    """Scalar maxima to log."""


class Loss(ABC):
    """A policy-gradient loss. Its dataclass fields are its options."""

    LEARNS_WITHOUT_ADVANTAGE: ClassVar[bool] = False
    """Whether a sample whose advantage is 0 still has a gradient. If not, the trainer does not compute it at all."""

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> LossOutput: ...


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 is far above any cap and still finite in float32."""


def masked_log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / mu) without gradient, clamped, 0 at masked positions.

    The mask comes before any arithmetic that could overflow: a product with 0 would turn masked infinities into NaN.
    """
    behavior_N = inputs.behavior_logprobs_N.masked_fill(~inputs.loss_mask_N, 0.0)
    logprobs_N = inputs.logprobs_N.detach().masked_fill(~inputs.loss_mask_N, 0.0)
    return (logprobs_N - behavior_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_statistics(log_ratio_N: Tensor, cap: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima that every importance-weighted loss logs.

    `kl_to_behavior` is the estimator r - 1 - log r of KL(mu || pi) under samples of mu: unbiased and never negative
    (Schulman, "Approximating KL divergence", 2020).
    """
    # The ratio is near 1 almost everywhere; `exp() - 1` would lose the digits that the KL is made of.
    excess_N = log_ratio_N.expm1()
    sums = {
        # Masked positions have ratio 1; the excess over 1 keeps them out of the sum.
        "importance_ratio_excess": excess_N.sum(),
        "capped_share": (excess_N > cap - 1).float().sum(),
        "kl_to_behavior": (excess_N - log_ratio_N).sum(),
    }
    return sums, {"importance_ratio_max": 1 + excess_N.max()}
