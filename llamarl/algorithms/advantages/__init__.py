"""Advantages: functions from the rewards of groups to numbers per token."""

from llamarl.algorithms.advantages._base import Advantage, GroupAdvantage, GroupRewards, ValueAdvantage

__all__ = ["Advantage", "GroupAdvantage", "GroupRewards", "ValueAdvantage"]
