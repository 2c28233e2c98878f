"""Generalized advantage estimation (arXiv 1506.02438, equation 16), token by token, with a critic's values.

Shape suffixes: T tokens of one rollout (in [T, Q] the longest, last token first), Q rollouts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarl.algorithms.advantages._base import GroupRewards, ValueAdvantage


@dataclass(frozen=True)
class Gae(ValueAdvantage):
    """A_t = sum_l (gamma lam)^l d_{t+l}, d_t = r_t + gamma V_{t+1} - V_t. The value after the last token is 0.

    Tokens that an environment wrote are not actions: the sampled token before them is followed by the sampled token
    after them, and their advantage is 0. The sequences of an agent's episode follow each other in the same way.

    The value after a truncated response is also 0: the limit of tokens is part of the task, and the response has its
    reward, so nothing is bootstrapped.
    """

    gamma: float = 1.0
    """Discount per token. Below 1, long responses are worth less."""
    lam: float = 1.0
    """1 uses only the rewards (no bias), 0 only the critic's next value (least variance)."""
    normalize: bool = True
    """Whether to shift and scale the advantages of a batch to mean 0 and standard deviation 1 over its valid tokens."""

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be between 0 and 1")

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        estimates = self.estimate(groups)
        valid = [
            estimates_T[mask] for group, parts in zip(groups, estimates, strict=True)
            for estimates_T, is_valid, mask in zip(parts, group.valid_G, _masks(group), strict=True) if is_valid
        ]  # fmt: skip
        shift, scale = 0.0, 1.0
        if self.normalize and sum(map(len, valid)) > 1:
            tokens = np.concatenate(valid)
            shift, scale = tokens.mean(), tokens.std(ddof=1) + 1e-8
        return [
            [
                (estimates_T - shift) / scale if is_valid else np.zeros(len(estimates_T))
                for estimates_T, is_valid in zip(parts, group.valid_G, strict=True)
            ]
            for group, parts in zip(groups, estimates, strict=True)
        ]

    def estimate(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        rewards = [rewards_T for group in groups for rewards_T in group.token_rewards]
        masks = [mask for group in groups for mask in _masks(group)]
        values = [values_T for group in groups for values_T in group.values]
        sampled = ([array_T[mask] for array_T, mask in zip(arrays, masks, strict=True)] for arrays in (rewards, values))
        estimates = iter(zip(rewards, masks, self._estimate(*sampled), strict=True))
        return [[_spread(*next(estimates)) for _ in group.token_rewards] for group in groups]

    def _estimate(self, rewards: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Estimates all rollouts side by side, from their ends, in one pass over the longest."""
        rewards_T_Q, values_T_Q = _from_the_end(rewards), _from_the_end(values)
        deltas_T_Q = rewards_T_Q - values_T_Q
        deltas_T_Q[1:] += self.gamma * values_T_Q[:-1]
        for t in range(1, len(deltas_T_Q)):
            deltas_T_Q[t] += self.gamma * self.lam * deltas_T_Q[t - 1]
        return [deltas_T_Q[: len(rewards_T), q][::-1] for q, rewards_T in enumerate(rewards)]


def _masks(group: GroupRewards) -> Sequence[Any]:
    """Returns indices of the sampled tokens, one per rollout: bool [T], or a slice of all."""
    return group.is_sampled or [slice(None)] * len(group.token_rewards)


def _spread(rewards_T: np.ndarray, mask_T: Any, estimates: np.ndarray) -> np.ndarray:
    """Returns estimates of the sampled tokens at their places, [T]."""
    whole_T = np.zeros(len(rewards_T))
    whole_T[mask_T] = estimates
    return whole_T


def _from_the_end(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Returns [T, Q] float64. Entries before a sequence's first token are 0."""
    reversed_T_Q = np.zeros((max(map(len, sequences), default=0), len(sequences)))
    for q, sequence_T in enumerate(sequences):
        reversed_T_Q[: len(sequence_T), q] = sequence_T[::-1]
    return reversed_T_Q
