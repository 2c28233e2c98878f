"""`Lengths` of responses: a truncated lognormal, or the measured lengths of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamarl.config import ConfigError
from llamarl.run.rollouts import rollout_rows

NUM_CELLS = 128
MEAN_SHARE, SIGMA = 0.3, 0.7
"""Default mean response as a share of the limit, and default standard deviation of the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Distribution of response lengths, in tokens, as survival over cells of equal width."""

    limit_tokens: int
    """Longest response."""
    middles_C: np.ndarray
    """Middle of each cell, tokens, float64 [C]."""
    survival_C: np.ndarray
    """Share of responses longer than the middle of the cell, float64 [C]."""

    @property
    def cell_tokens(self) -> float:
        """Width of a cell."""
        return self.limit_tokens / len(self.middles_C)

    @property
    def mean_tokens(self) -> float:
        """E[L] = integral of the survival."""
        return float(self.survival_C.sum() * self.cell_tokens)

    @property
    def square_tokens(self) -> float:
        """E[L^2] = integral of 2 t S(t), in tokens squared."""
        return float((2 * self.middles_C * self.survival_C).sum() * self.cell_tokens)

    def longest_tokens(self, count: float) -> float:
        """E[max of `count` responses] = integral of 1 - (1 - S(t))^count, in tokens."""
        return float((1 - (1 - self.survival_C) ** count).sum() * self.cell_tokens)

    @property
    def held_tokens(self) -> float:
        """Mean response tokens of a busy slot, as an upper bound.

        Slots out of step hold E[L^2] / (2 E[L]) (renewal theory); slots that start together hold max of t S(t).
        """
        together = float((self.middles_C * self.survival_C).max()) + self.cell_tokens / 2
        return min(float(self.limit_tokens), max(self.square_tokens / (2 * self.mean_tokens), together))

    @classmethod
    def lognormal(cls, *, limit_tokens: int, mean_tokens: float | None = None, sigma: float = SIGMA) -> Lengths:
        """Returns min(X, limit) with X lognormal with log deviation `sigma`, and mean `mean_tokens` of the minimum.

        Raises:
            ConfigError: the mean cannot be reached below the limit.
        """
        if mean_tokens is None:
            mean_tokens = max(1.0, MEAN_SHARE * limit_tokens)
        if not 0 < mean_tokens <= limit_tokens:
            raise ConfigError(
                f"a mean response of {mean_tokens:g} tokens is not within 1 and the limit of {limit_tokens}; "
                f"use --mean-response-tokens {max(1, limit_tokens // 2)}"
            )
        middles_C = (np.arange(NUM_CELLS) + 0.5) * (limit_tokens / NUM_CELLS)
        low, high = math.log(1e-3), math.log(limit_tokens) + 12 * max(sigma, 0.1)
        survival_C = np.ones(NUM_CELLS)
        for _ in range(60):
            mu = (low + high) / 2
            survival_C = _lognormal_survival(middles_C, mu, sigma)
            too_long = survival_C.mean() * limit_tokens > mean_tokens
            low, high = (low, mu) if too_long else (mu, high)
        # A grid cannot represent every mean exactly; the remainder of a narrow distribution goes to one cell.
        if sigma == 0 or abs(survival_C.mean() * limit_tokens / mean_tokens - 1) > 1e-3:
            survival_C = np.clip(mean_tokens / limit_tokens * NUM_CELLS - np.arange(NUM_CELLS), 0, 1)
        return cls(limit_tokens=limit_tokens, middles_C=middles_C, survival_C=survival_C)

    @classmethod
    def from_rollouts(cls, path: str | Path) -> Lengths:
        """Reads the `token_ids` that a run was trained on, from its folder or from a file of `export --rollouts`.
        Raises ConfigError."""
        fix = "give the folder of a run, or a file of `llamarl export --rollouts`"
        try:
            lengths = np.array([len(row["token_ids"]) for row in rollout_rows(Path(path), fix)], dtype=np.float64)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"cannot read response lengths from {path}: {error!r}; {fix}") from None
        if lengths.max() < 1:
            raise ConfigError(f"{path} holds no response; {fix}, of at least one step")
        return cls.measured(lengths)

    @classmethod
    def measured(cls, lengths: np.ndarray) -> Lengths:
        """Returns the distribution of these response lengths, of which at least one is positive. The longest is the
        limit."""
        limit = int(lengths.max())
        middles_C = (np.arange(NUM_CELLS) + 0.5) * (limit / NUM_CELLS)
        survival_C = (lengths[None, :] > middles_C[:, None]).mean(axis=1)
        return cls(limit_tokens=limit, middles_C=middles_C, survival_C=survival_C)


def _lognormal_survival(t_C: np.ndarray, mu: float, sigma: float) -> np.ndarray:
    """P(X > t) = erfc((ln t - mu) / (sigma sqrt 2)) / 2."""
    if sigma == 0:
        return (np.log(t_C) < mu).astype(np.float64)
    return np.array([0.5 * math.erfc((math.log(t) - mu) / (sigma * math.sqrt(2))) for t in t_C])
