"""Random numbers of a simulation, which depend on seed and key alone, and the response lengths drawn with them."""

from __future__ import annotations

import numpy as np

from llamarl.forecast.costs import Costs


class ResponseLengths:
    """Length of each rollout, a function of (seed, group, index) alone: whoever generates it, and however often."""

    def __init__(self, costs: Costs, limit_tokens: int, seed: int) -> None:
        self._measured = np.array(costs.response_lengths)
        self._groups = costs.measured_groups
        self._sigma = costs.response_sigma
        self._mu = float(np.log(costs.response_tokens)) - self._sigma**2 / 2
        self.limit_tokens = limit_tokens
        self._seed = seed

    def draw(self, group_id: int, group_size: int) -> list[int]:
        """One length per rollout, in tokens, 1 to the limit."""
        if self._groups:
            return [min(max(tokens, 1), self.limit_tokens) for tokens, _ in self._chosen(group_id, group_size)]
        random = keyed(self._seed, LENGTHS, group_id)
        if len(self._measured):
            lengths = random.choice(self._measured, group_size)
        else:
            lengths = np.exp(self._mu + self._sigma * random.standard_normal(group_size))
        return np.clip(np.rint(lengths), 1, self.limit_tokens).astype(int).tolist()

    def rewards(self, group_id: int, group_size: int) -> list[float] | None:
        """The measured rewards of the same rollouts, 0 for those that the limit cuts; None when none were measured."""
        if not self._groups:
            return None
        chosen = self._chosen(group_id, group_size)
        return [reward if tokens <= self.limit_tokens else 0.0 for tokens, reward in chosen]

    def _chosen(self, group_id: int, group_size: int) -> list[tuple[int, float]]:
        """All of the measured group; a part of it, or some of it again, when the group has another size."""
        group = self._groups[group_id % len(self._groups)]
        if len(group) == group_size:
            return list(group)
        order = keyed(self._seed, LENGTHS, group_id).permutation(len(group))
        return [group[order[number % len(group)]] for number in range(group_size)]


LENGTHS, SCORES, FAULTS = 1, 2, 3
"""Purposes of random numbers."""


def keyed(seed: int, purpose: int, number: int) -> np.random.Generator:
    """Random numbers that depend on the key alone, not on the order of events."""
    return np.random.Generator(np.random.Philox(key=[(seed << 8) + purpose, number]))
