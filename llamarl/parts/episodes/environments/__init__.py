"""Environments, which reply to the policy between turns: tools, games, simulated users. One file per environment."""

from llamarl.parts.episodes.environments._base import Environment, Messages, RewardedReply, Task, ToolUnavailable, Turn

__all__ = ["Environment", "Messages", "RewardedReply", "Task", "ToolUnavailable", "Turn"]
