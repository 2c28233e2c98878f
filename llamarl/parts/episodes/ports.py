"""Interfaces of this part's executors for the controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from llamarl.executors.replies import Replied
from llamarl.parts.episodes.gateway.news import AgentNews, AgentTask
from llamarl.types import Prompt, Rollout


class OpenTurn(NamedTuple):
    """An episode whose last turn needs a reply or a last judgment."""

    group_id: int
    index: int
    prompt: Prompt
    turns: list[tuple[bool, np.ndarray]]
    """`Rollout.turns`. The last one was sampled, except if an observation filled the context."""
    spent_s: float = 0.0
    """Seconds of its replies so far."""
    is_over: bool = False
    """The episode has ended by length, and the environment only judges it."""


class EnvironmentPort(Protocol):
    """Replies to turns."""

    async def submit(self, episodes: Sequence[OpenTurn]) -> None: ...
    async def leave(self, episodes: Sequence[tuple[int, int]]) -> None: ...
    async def collect(self) -> list[Replied]: ...


class GatewayPort(Protocol):
    """Runs agents and forwards their calls to the policy."""

    async def submit(self, tasks: Sequence[AgentTask]) -> None: ...
    async def answer(self, rollouts: Sequence[Rollout]) -> None: ...
    async def collect(self) -> AgentNews: ...
