"""Rewards that cannot be made, or not be closed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards import Reward
from llamarl.types import RewardItem, RewardResult


@dataclass
class PostInit(Reward):
    def __post_init__(self) -> None:
        raise RuntimeError("boom")

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return []


@dataclass
class PostExit(PostInit):
    def __post_init__(self) -> None:
        raise SystemExit(4)


@dataclass
class Close(PostInit):
    def __post_init__(self) -> None:
        pass

    def close(self) -> None:
        raise RuntimeError("it cannot")


@dataclass
class NoType(Close):
    option: "Unknown" = 3  # type: ignore[name-defined]  # noqa: F821, UP037
