"""GRPO's objective without its KL term (DeepSeekMath, arXiv 2402.03300, equation 3): every response weighs the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llamarl.algorithms.losses._base import Loss, Positions, TokenLosses, clipped_surrogate, require_between


@dataclass(frozen=True)
class Grpo(Loss):
    """PPO's clipped surrogate, averaged over the tokens of each response first and then over responses."""

    MEAN_OVER: ClassVar[Literal["tokens", "sequences"]] = "sequences"

    clip: float = 0.2
    """Largest change of the ratio in either direction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_between("clip", self.clip, 0, 1)

    def token_losses(self, positions: Positions) -> TokenLosses:
        return clipped_surrogate(positions.log_ratio_N, positions.advantages_N, self.clip, self.clip)
