"""GRPO's objective without its KL term (DeepSeekMath, arXiv 2402.03300, equation 3): every response has the same
weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llamarl.algorithms.losses.ppo_clip import PpoClip


@dataclass(frozen=True)
class Grpo(PpoClip):
    """PPO's clipped surrogate, averaged over the tokens of each response first and then over responses."""

    MEAN_OVER: ClassVar[Literal["tokens", "sequences"]] = "sequences"
