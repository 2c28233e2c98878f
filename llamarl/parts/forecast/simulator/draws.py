"""Random numbers of a simulation, which depend on seed and key alone, and the response lengths drawn with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamarl.parts.forecast.costs import Costs, Group


class ResponseLengths:
    """Length of each rollout, a function of (seed, group, index) alone: whoever generates it, and however often."""

    def __init__(self, costs: Costs, limit_tokens: int, seed: int) -> None:
        self._measured = np.array(costs.response_lengths)
        self._groups = costs.measured_groups
        self._concentration = concentration(self._groups)
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
        """All of the measured group, or a part of it; beyond its size more responses to the same prompt.

        A further one is as long as one before it, and as right with probability n / (n + k), otherwise as one of the
        groups around (the urn of Blackwell and MacQueen 1973); with this k rewards are as alike as the measured ones.
        """
        place = group_id % len(self._groups)
        group = self._groups[place]
        if len(group) == group_size:
            return list(group)
        random = keyed(self._seed, LENGTHS, group_id)
        chosen = [group[number] for number in random.permutation(len(group))[:group_size]]
        around = [one for near in self._groups[max(0, place - NEAR) : place + NEAR + 1] for one in near]
        while len(chosen) < group_size:
            tokens, reward = chosen[int(random.integers(len(chosen)))]
            if random.random() * (len(chosen) + self._concentration) >= len(chosen):
                _, reward = around[int(random.integers(len(around)))]
            chosen.append((tokens, reward))
        return chosen


def concentration(groups: Sequence[Group]) -> float:
    """k = (1 - r) / r of the intraclass correlation r of rewards, by analysis of variance (Fisher 1925)."""
    rewards = [np.array([reward for _, reward in group]) for group in groups if len(group) > 1]
    if len(rewards) < 2:
        return 0.0
    size = float(np.mean([len(one) for one in rewards]))
    between = size * float(np.var([one.mean() for one in rewards], ddof=1))
    within = float(np.mean([one.var(ddof=1) for one in rewards]))
    return size * within / max(between - within, 1e-9)


NEAR = 16
"""Measured groups before and after one that are taken to be by about the same policy."""
LENGTHS, SCORES, FAULTS = 1, 2, 3
"""Purposes of random numbers."""


def keyed(seed: int, purpose: int, number: int) -> np.random.Generator:
    """Random numbers that depend on the key alone, not on the order of events."""
    return np.random.Generator(np.random.Philox(key=[(seed << 8) + purpose, number]))
