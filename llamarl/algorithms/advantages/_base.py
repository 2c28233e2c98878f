"""What every advantage takes and returns. Plain numpy. Shape suffix: G rollouts of one group."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class Advantage(ABC):
    """How much better each rollout is than its group. Dataclass fields are options."""

    @abstractmethod
    def __call__(self, rewards_G: np.ndarray, valid_G: np.ndarray) -> np.ndarray:
        """Advantages, float64 [G]; 0 where `valid_G` is False.

        Args:
            rewards_G: float64; entries where `valid_G` is False are meaningless.
            valid_G: bool; False for rollouts that failed or whose reward is invalid.
        """
