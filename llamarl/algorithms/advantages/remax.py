"""Reward minus that of the greedy response to the same prompt (ReMax, arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llamarl.algorithms.advantages._base import Advantage, GroupRewards


@dataclass(frozen=True)
class Remax(Advantage):
    """A_i = r_i - r(greedy); all 0 if the greedy response could not be judged. A group of one learns too.

    The baseline does not depend on the sampled responses, so the gradient is unbiased. It costs one more response per
    group.
    """

    NEEDS_GREEDY: ClassVar[bool] = True

    def of_batch(self, groups: Sequence[GroupRewards]) -> list[list[np.ndarray]]:
        return [
            group.spread(
                np.where(group.valid_G, group.rewards_G, group.baseline) - group.baseline
                if np.isfinite(group.baseline)
                else np.zeros(len(group.valid_G))
            )
            for group in groups
        ]
