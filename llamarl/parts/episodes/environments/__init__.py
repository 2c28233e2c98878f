"""Environments, which answer a policy between its turns: tools, games, users. One file per member."""

from llamarl.parts.episodes.environments._base import Environment, Messages, Task, Turn

__all__ = ["Environment", "Messages", "Task", "Turn"]
