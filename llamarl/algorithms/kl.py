"""Divergence from a frozen reference policy, estimated from the sampled tokens.

With x = log(pi / ref) of a token that pi sampled, the mean of each estimator estimates KL(pi || ref) (Schulman,
"Approximating KL divergence", 2020). k1 = x is unbiased, of either sign. k2 = x^2 / 2 is never negative, and biased by
O(KL^2). k3 = e^-x - 1 + x is unbiased and never negative.

In the reward the estimate itself counts, and with k1 the gradient is that of KL(pi || ref). In the loss the estimate is
differentiated. There k2 has that gradient, and k3 that of KL(ref || pi), which is close while pi is near ref. k1 has
none on average, so it is refused.
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
    """Penalty per token for leaving the reference policy."""

    coefficient: float
    estimator: Literal["k1", "k2", "k3"]

    def __call__(self, log_ratio: Any) -> Any:
        """Returns the penalty of tokens with these log(pi / ref), an array or a tensor of any shape."""
        return self.coefficient * estimate(log_ratio, self.estimator)


def estimate(log_ratio: Any, estimator: Literal["k1", "k2", "k3"]) -> Any:
    """Returns nats per token, in the type and shape of `log_ratio`."""
    x = log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x * x / 2
    # `exp() - 1` would lose the digits of a small divergence.
    return (np.expm1(-x) if isinstance(x, np.ndarray) else (-x).expm1()) + x


def penalty(config: ReferenceConfig, place: Literal["loss", "reward"]) -> KlPenalty | None:
    """Returns the penalty that `config` sets in `place`, or None."""
    if not config.kl_coefficient or config.kl_in != place:
        return None
    return KlPenalty(coefficient=config.kl_coefficient, estimator=config.kl_estimator)
