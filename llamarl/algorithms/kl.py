"""Divergence from a frozen reference policy, estimated from the sampled tokens.

With x = log(pi / ref) of a token that pi sampled, the mean of each estimates KL(pi || ref) (Schulman, "Approximating
KL divergence", 2020): k1 = x, unbiased, of either sign; k2 = x^2 / 2, never negative, biased by O(KL^2);
k3 = e^-x - 1 + x, unbiased and never negative.

In the reward the estimate itself counts, and with k1 the gradient is that of KL(pi || ref). In the loss the estimate
is differentiated: there k2 has that gradient, k3 the one of KL(ref || pi), which is close while pi is near ref, and k1
none at all on average, so it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from llamarl.config.schema import ReferenceConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20: e^20 is far above any cap or useful penalty and still finite in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlPenalty:
    """Price per token of leaving the reference policy."""

    coefficient: float
    estimator: Literal["k1", "k2", "k3"]

    def __call__(self, log_ratio: Any) -> Any:
        """The penalty of tokens with these log(pi / ref), an array or a tensor of any shape."""
        return self.coefficient * estimate(log_ratio, self.estimator)


def estimate(log_ratio: Any, estimator: Literal["k1", "k2", "k3"]) -> Any:
    """Nats per token, of the type and shape of `log_ratio`."""
    x = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x * x / 2
    # `exp() - 1` would lose the digits that a small divergence is made of.
    return (np.expm1(-x) if isinstance(x, np.ndarray) else (-x).expm1()) + x


def penalty(config: ReferenceConfig, place: Literal["loss", "reward"]) -> KlPenalty | None:
    """The penalty that `config` charges in `place`; None: nothing."""
    if not config.kl_coefficient or config.kl_in != place:
        return None
    return KlPenalty(coefficient=config.kl_coefficient, estimator=config.kl_estimator)
