"""`Program`, the base class of agents with options. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

from llamarl.parts.episodes.environments._base import Task
from llamarl.types import RewardResult


class Program(ABC):
    """An agent with options. Members are dataclasses whose fields are their options."""

    @abstractmethod
    async def run(self, task: Task, base_url: str, api_key: str) -> RewardResult:
        """Runs one episode, as an agent function does (docs/episodes.md)."""

    def check(self) -> None:  # noqa: B027 - most agents need no package
        """Raises ConfigError if a package that it needs is missing."""
