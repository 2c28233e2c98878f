"""A generator that samples recorded rollouts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamarl.executors.generator import GeneratorExecutor
from llamarl.generation.engine import Engine
from llamarl.parts.replay.replayed import Difference, Replayed
from llamarl.parts.replay.replayer import Replayer
from llamarl.types import GenerationRequest, Rollout


class ReplayingExecutor(GeneratorExecutor):
    """Adopts weights as a generator does. Its engine receives no other requests."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert isinstance(self._engine, Engine), "others are refused with the settings"
        self._replayer = Replayer(self._engine)

    def add(self, items: Sequence[tuple[GenerationRequest, Rollout]]) -> list[Difference]:
        """Adds rollouts to sample again, each with its request. Returns differences for rollouts with an incomplete
        record."""
        return self._replayer.add(items)

    def replay(self, version: int) -> Replayed:
        """Samples again all tokens that the adopted version sampled."""
        return self._replayer.advance(version)
