"""`Turns`: rollouts of several turns, which a part answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from llamarl.config import RunConfig
from llamarl.config.ref import part
from llamarl.types import GenerationRequest, Rollout


class Turns(Protocol):
    """Between generators and what is scored; `open_turns` of `parts/episodes` makes it."""

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Episodes begin."""

    def take(self, finished: Sequence[Rollout]) -> None:
        """Answers turns that have ended."""

    async def loop(self) -> None:
        """Consumes replies for as long as the run goes on."""

    def describe(self) -> str:
        """Text for a stall report on rollouts that wait; empty: none does."""
        ...


def open_turns(config: RunConfig, *wiring: Any) -> Turns | None:
    """None: a response is one turn. `wiring` is what the part's `open_turns` asks for. Raises ConfigError."""
    return part("episodes", "open_turns")(config, *wiring) if config.has_episodes else None
