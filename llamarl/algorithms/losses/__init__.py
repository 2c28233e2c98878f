"""Policy-gradient losses. Each returns a sum; the trainer divides once by the global count."""

from llamarl.algorithms.losses._base import Loss, LossInputs, LossOutput, Positions, TokenLosses

__all__ = ["Loss", "LossInputs", "LossOutput", "Positions", "TokenLosses"]
