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
    """A_t = sum_l (gamma lam)^l d_{t+l}, d_t = r_t + gamma V_{t+1} - V_t; the value after the last token is 0.

    Tokens that an environment wrote are no choices: the token sampled before them is followed by the one after them,
    and their own advantage is 0.

    That holds for truncated responses, too: the limit of tokens is part of the task, and what was written by then has
    its reward, so nothing is bootstrapped there.
    """

    gamma: float = 1.0
    """Discount per token; below 1, long responses are worth less."""
    lam: float = 1.0
    """1 trusts the rewards alone (no bias), 0 the critic's next value (least variance)."""
    normalize: bool = True
    """Shift and scale the advantages of a batch to mean 0 and standard deviation 1 over its valid tokens."""

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} must lie between 0 and 1")

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        estimates = self.estimate(groups)
        valid = [
            one[mask] for group, parts in zip(groups, estimates, strict=True)
            for one, is_valid, mask in zip(parts, group.valid_G, _masks(group), strict=True) if is_valid
        ]  # fmt: skip
        shift, scale = 0.0, 1.0
        if self.normalize and sum(map(len, valid)) > 1:
            tokens = np.concatenate(valid)
            shift, scale = tokens.mean(), tokens.std(ddof=1) + 1e-8
        return [
            [(one - shift) / scale if ok else np.zeros(len(one)) for one, ok in zip(parts, group.valid_G, strict=True)]
            for group, parts in zip(groups, estimates, strict=True)
        ]

    def estimate(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        rewards = [one for group in groups for one in group.token_rewards]
        masks = [mask for group in groups for mask in _masks(group)]
        values = [one for group in groups for one in group.values]
        chosen = self._estimate(*([one[mask] for one, mask in zip(all_T, masks, strict=True)]
                                  for all_T in (rewards, values)))  # fmt: skip
        found = iter(zip(rewards, masks, chosen, strict=True))
        return [[_spread(*next(found)) for _ in group.token_rewards] for group in groups]

    def _estimate(self, rewards: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All rollouts side by side, from their ends: one pass over the longest."""
        rewards_T_Q, values_T_Q = _from_the_end(rewards), _from_the_end(values)
        deltas_T_Q = rewards_T_Q - values_T_Q
        deltas_T_Q[1:] += self.gamma * values_T_Q[:-1]
        for t in range(1, len(deltas_T_Q)):
            deltas_T_Q[t] += self.gamma * self.lam * deltas_T_Q[t - 1]
        return [deltas_T_Q[: len(one), q][::-1] for q, one in enumerate(rewards)]


def _masks(group: GroupRewards) -> Sequence[Any]:
    """Indices that select the sampled tokens, one per rollout: bool [T], or a slice of all."""
    return group.is_sampled or [slice(None)] * len(group.token_rewards)


def _spread(rewards_T: np.ndarray, mask_T: Any, estimates: np.ndarray) -> np.ndarray:
    """Estimates of the sampled tokens at their places."""
    whole_T = np.zeros(len(rewards_T))
    whole_T[mask_T] = estimates
    return whole_T


def _from_the_end(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """[T, Q] float64; what lies before a sequence's first token is 0."""
    reversed_T_Q = np.zeros((max(map(len, sequences), default=0), len(sequences)))
    for q, one in enumerate(sequences):
        reversed_T_Q[: len(one), q] = one[::-1]
    return reversed_T_Q
