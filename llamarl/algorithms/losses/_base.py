"""Inputs and outputs of losses, and their base class. They only call methods of tensors, so this folder imports no
torch.

`token_losses` of a loss returns the loss of each token. The base class masks, corrects for off-policyness and sums.

Shape suffixes: N trainable positions of one microbatch, Q sequences of the microbatch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from llamarl.algorithms.kl import MAX_LOG_RATIO, KlPenalty, estimate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One microbatch, as a loss sees it. Sequences are whole: none continues in another microbatch."""

    logprobs_N: Tensor
    """Natural-log probability of each token under the policy in training, float32, with gradient."""
    behavior_logprobs_N: Tensor
    """The same under the distribution that the token was sampled from, float32."""
    advantages_N: Tensor
    """float32."""
    loss_mask_N: Tensor
    """bool. Masked positions may hold anything, including NaN, and affect neither loss nor gradient."""
    sequence_N: Tensor
    """Sequence of each position, int64, 0 to `num_sequences` - 1."""
    num_sequences: int
    proximal_logprobs_N: Tensor | None = None
    """The same under the policy at the beginning of the optimizer step. None means the policy in training itself, as
    with one update per batch."""
    reference_logprobs_N: Tensor | None = None
    """The same under the frozen reference, float32. None means that there is none."""
    columns_N: Mapping[str, Tensor] = field(default_factory=dict)
    """Every per-token column of the microbatch (`llamarl.types.COLUMNS`), including those above, by name."""
    kl: KlPenalty | None = None
    """Penalty in addition to the loss; needs `reference_logprobs_N`. None means that the divergence is only
    measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """`LossInputs` made safe: masked positions hold 0, and log-ratios are clamped."""

    logprobs_N: Tensor
    """Log-probabilities under the policy in training, with gradient."""
    log_ratio_N: Tensor
    """log(pi / mu), with gradient. With `truncate` it is relative to the proximal policy instead of mu."""
    behavior_logprobs_N: Tensor
    """Log-probabilities under the policy that `log_ratio_N` is relative to."""
    proximal_log_ratio_N: Tensor
    """log(pi / proximal), with gradient."""
    proximal_weights_N: Tensor
    """proximal / mu, without gradient."""
    advantages_N: Tensor
    mask_N: Tensor
    """bool."""
    sequence_N: Tensor
    num_sequences: int

    def sequence_means(self, values_N: Tensor) -> Tensor:
        """Returns the mean over each position's sequence, at every position, [N]. Masked positions do not count."""
        sums_Q = values_N.new_zeros(self.num_sequences).index_add(0, self.sequence_N, values_N * self.mask_N)
        counts_Q = values_N.new_zeros(self.num_sequences).index_add(0, self.sequence_N, self.mask_N.to(values_N.dtype))
        return (sums_Q / counts_Q.clamp(min=1))[self.sequence_N]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """Loss of each position, and which positions are capped."""

    loss_N: Tensor
    """Loss of each position, with gradient. Masked positions may hold any finite number."""
    capped_N: Tensor
    """bool: True if a cap, clip or mask acts here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """Sums over the unmasked positions of one microbatch."""

    loss: Tensor
    """Scalar sum, with gradient."""
    sums: dict[str, Tensor]
    """Scalar sums to log. The trainer divides them by the number of computed positions."""
    maxima: dict[str, Tensor]
    """Scalar maxima to log."""


@dataclass(frozen=True)
class Loss(ABC):
    """A policy-gradient loss. Its dataclass fields are its options.

    The two options here work with every loss. They do not affect the penalty for divergence from a reference.
    """

    truncate: float | None = None
    """Weighs each token by min(proximal / mu, truncate), and makes the loss's ratio relative to the proximal policy.

    This is truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings you off-policy RL
    training", 2025). None means neither.
    """
    sequence_mask: tuple[float, float] | None = None
    """Masks sequences whose geometric mean of proximal / mu is outside of (low, high). None masks none."""

    LEARNS_WITHOUT_ADVANTAGE: ClassVar[bool] = False
    """Whether a sample with advantage 0 has a gradient. If not, the trainer does not compute it."""
    MEAN_OVER: ClassVar[Literal["tokens", "sequences"]] = "tokens"
    """Count that the trainer divides by. With `sequences`, a token counts one over the length of its sequence."""

    def __post_init__(self) -> None:
        if self.truncate is not None and not self.truncate > 0:
            raise ValueError(f"truncate = {self.truncate} must be positive")
        if self.sequence_mask is not None and not 0 <= self.sequence_mask[0] < self.sequence_mask[1]:
            raise ValueError(f"sequence_mask = {self.sequence_mask} must be (low, high) with 0 <= low < high")

    @abstractmethod
    def token_losses(self, positions: Positions) -> TokenLosses:
        """Returns the loss of each position, before masking and sums."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        positions = self._positions(inputs)
        token = self.token_losses(positions)
        for name, values_N in (("loss_N", token.loss_N), ("capped_N", token.capped_N)):
            if values_N.shape != positions.logprobs_N.shape:  # broadcasting would change the training
                raise ValueError(
                    f"{type(self).__name__}.token_losses returned {name} of shape {tuple(values_N.shape)} for "
                    f"{len(positions.logprobs_N)} positions; return a value for each, the trainer adds them up"
                )
        # The logged ratio is always to the behavior policy, also with `truncate`.
        log_ratio_N = _clamped(positions.logprobs_N.detach() - _cleaned(inputs, inputs.behavior_logprobs_N))
        keep_N = positions.mask_N
        weights_N = share_N = 1.0
        if self.truncate is not None:
            weights_N = positions.proximal_weights_N.clamp(max=self.truncate)
        if self.sequence_mask is not None:
            mean_N = positions.sequence_means(positions.proximal_weights_N.log()).exp()
            keep_N = keep_N & (mean_N >= self.sequence_mask[0]) & (mean_N <= self.sequence_mask[1])
        if self.MEAN_OVER == "sequences":
            share_N = 1 / _sequence_lengths(positions)
        loss_N = (token.loss_N * weights_N * share_N).masked_fill(~keep_N, 0.0)
        # The ratio is near 1 almost everywhere: `exp() - 1` would lose the digits of the KL.
        excess_N = log_ratio_N.expm1()
        sums = {
            # Masked positions have ratio 1, so their excess over 1 does not count.
            "importance_ratio_excess": excess_N.sum(),
            # r - 1 - log r: unbiased for KL(mu || pi), never negative (Schulman, "Approximating KL divergence", 2020).
            "kl_to_behavior": (excess_N - log_ratio_N).sum(),
            "capped_share": ((token.capped_N | ~keep_N) & positions.mask_N).to(excess_N.dtype).sum(),
        }
        if inputs.reference_logprobs_N is not None:
            # Masked positions have log-ratio 0, which costs nothing.
            to_reference_N = positions.logprobs_N - _cleaned(inputs, inputs.reference_logprobs_N)
            sums["kl_to_reference"] = estimate(to_reference_N.detach(), "k3").sum()
            if inputs.kl is not None:
                loss_N = loss_N + inputs.kl(to_reference_N) * share_N
        return LossOutput(loss=loss_N.sum(), sums=sums, maxima={"importance_ratio_max": 1 + excess_N.max()})

    def _positions(self, inputs: LossInputs) -> Positions:
        """Masks before any arithmetic that could overflow: a product with 0 turns infinities into NaN."""
        logprobs_N = _cleaned(inputs, inputs.logprobs_N)
        behavior_N = _cleaned(inputs, inputs.behavior_logprobs_N)
        proximal_N = logprobs_N.detach()
        if inputs.proximal_logprobs_N is not None:
            proximal_N = _cleaned(inputs, inputs.proximal_logprobs_N)
        relative_to_N = behavior_N if self.truncate is None else proximal_N
        return Positions(
            logprobs_N=logprobs_N,
            log_ratio_N=_clamped(logprobs_N - relative_to_N),
            behavior_logprobs_N=relative_to_N,
            proximal_log_ratio_N=_clamped(logprobs_N - proximal_N),
            proximal_weights_N=_clamped(proximal_N - behavior_N).exp(),
            advantages_N=_cleaned(inputs, inputs.advantages_N),
            mask_N=inputs.loss_mask_N,
            sequence_N=inputs.sequence_N,
            num_sequences=inputs.num_sequences,
        )


def _cleaned(inputs: LossInputs, values_N: Tensor) -> Tensor:
    return values_N.masked_fill(~inputs.loss_mask_N, 0.0)


def _clamped(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sequence_lengths(positions: Positions) -> Tensor:
    """Returns the trainable positions of each position's sequence, [N], at least 1."""
    ones_N = positions.mask_N.to(positions.logprobs_N.dtype)
    counts_Q = ones_N.new_zeros(positions.num_sequences).index_add(0, positions.sequence_N, ones_N)
    return counts_Q.clamp(min=1)[positions.sequence_N]


def clipped_surrogate(log_ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> TokenLosses:
    """Returns -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, equation 7)."""
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - low, 1 + high)
    gain_N, clipped_gain_N = ratio_N * advantages_N, clipped_N * advantages_N
    return TokenLosses(loss_N=-gain_N.minimum(clipped_gain_N), capped_N=(clipped_gain_N < gain_N).detach())


def require_between(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raises ValueError unless low < value <= high."""
    if not low < value <= high:
        raise ValueError(
            f"{name} = {value} must be above {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
        )
