"""Agents that come with llamarl. One file per agent; `rollout.agent` names it."""

from llamarl.parts.episodes.programs._base import Program

__all__ = ["Program"]
