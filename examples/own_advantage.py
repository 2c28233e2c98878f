"""Example of an advantage: how many responses of its group a response beats.

llamarl train configs/demo.toml --overwrite --trainer.advantage examples.own_advantage:Rank
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llamarl.algorithms.advantages import GroupAdvantage


@dataclass(frozen=True)
class Rank(GroupAdvantage):
    """A_i = (responses with a lower reward - responses with a higher reward) / (valid responses - 1)."""

    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        both_G_G = valid_G[:, None] & valid_G[None, :]
        wins_G = (np.sign(rewards_G[:, None] - rewards_G[None, :]) * both_G_G).sum(1)
        return wins_G / max(int(valid_G.sum()) - 1, 1)
