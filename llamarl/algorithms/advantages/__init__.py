"""Advantages: rewards of one group in, one number per rollout out."""

from llamarl.algorithms.advantages._base import Advantage, GroupAdvantage, GroupRewards, ValueAdvantage

__all__ = ["Advantage", "GroupAdvantage", "GroupRewards", "ValueAdvantage"]
