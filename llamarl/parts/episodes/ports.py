"""Interfaces of this part's executors, for the controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llamarl.executors.replies import OpenTurn, Replied
from llamarl.parts.episodes.gateway.news import AgentNews, AgentTask
from llamarl.types import Rollout


class EnvironmentPort(Protocol):
    """Answers turns."""

    async def submit(self, episodes: Sequence[OpenTurn]) -> None: ...
    async def leave(self, episodes: Sequence[tuple[int, int]]) -> None: ...
    async def collect(self) -> list[Replied]: ...


class GatewayPort(Protocol):
    """Runs agents, and hands on what they ask the policy."""

    async def submit(self, tasks: Sequence[AgentTask]) -> None: ...
    async def answer(self, rollouts: Sequence[Rollout]) -> None: ...
    async def collect(self) -> AgentNews: ...
