"""`Environment`, the base of all members of this family, and its records. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from llamarl.types import RewardResult, ToolCall

Messages = list[dict[str, Any]]
"""`{"role": ..., "content": ...}` each, which the model's own chat template writes; `"is_error": True` marks those that
count as errors of a tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The problem of an episode."""

    prompt: str
    answer: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn: what the policy wrote, and what it was answered."""

    response: str
    """Text that the policy wrote, without special tokens."""
    observation: str | None = None
    """Text of the reply; None: it has not been answered yet."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools in the response, where the model's chat template knows tools."""


@dataclass
class Environment(ABC):
    """Answers turn by turn; a function of the turns so far, so that any worker can answer, and one that dies costs
    nothing, unless it overrides `open`. Members are dataclasses whose fields are their options."""

    max_turns: Annotated[int, Field(ge=1)] = field(default=16, kw_only=True)
    """A response that would need more ends as one that is too long, and is scored as it stands."""
    observation_tokens: Annotated[int, Field(ge=1)] = field(default=256, kw_only=True)
    """A longer observation is a flood: it makes the episode INVALID."""
    step_s: Annotated[float, Field(gt=0)] = field(default=10.0, kw_only=True)
    """Seconds for one reply; a slower one makes the episode INVALID."""
    episode_s: Annotated[float, Field(gt=0)] = field(default=120.0, kw_only=True)
    """Seconds for all replies of an episode together, likewise."""
    workers: Annotated[int, Field(ge=1, le=256)] = field(default=1, kw_only=True)
    """Processes that reply side by side."""
    memory_bytes: Annotated[int, Field(ge=1 << 26)] = field(default=1 << 30, kw_only=True)
    """Bytes of memory that each worker process may take."""
    stop: list[str] = field(default_factory=list, kw_only=True)
    """A turn also ends with the token that completes one of these, as with a stop token."""

    @abstractmethod
    def reply(self, task: Task, turns: Sequence[Turn]) -> str | Messages | RewardResult | None:
        """Answers the last turn: with text or messages for the policy to go on from; with the episode's reward, which
        ends it; or with None, which ends it and leaves the judgement to `[reward]`. An exception makes the episode
        INVALID."""

    def open(self, task: Task) -> None:  # noqa: B027 - most have no state
        """One that overrides this has a state: every episode gets a copy of the environment in one worker process, on
        which this is called before the first reply, and which makes all of them. An episode whose worker dies is
        INVALID."""

    def close(self) -> None:  # noqa: B027
        """The episode of this copy has ended, or nobody goes on with it."""

    def tools(self) -> list[dict[str, Any]]:
        """Tools that the chat template tells the policy it may call, as JSON schemas."""
        return []

    @property
    def is_stateful(self) -> bool:
        """Whether episodes have a state of their own: the class overrides `open`."""
        return type(self).open is not Environment.open
