"""`Environment`, the base class of environments, and its records. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import iscoroutinefunction
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from llamarl.types import RewardResult, ToolCall

Messages = list[dict[str, Any]]
"""Messages `{"role": ..., "content": ...}`, formatted by the model's chat template. `"is_error": True` marks messages
that count as tool errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The problem of an episode."""

    prompt: str
    answer: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn: the policy's response and the environment's reply."""

    response: str
    """Text of the policy, without special tokens."""
    observation: str | None = None
    """Text of the reply. None means no reply yet."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in the response, if the model's chat template supports tools."""


@dataclass(frozen=True, slots=True)
class RewardedReply:
    """A reply, and the reward of the turn that it answers. The reward of an episode is the sum of the rewards of its
    turns and of its end. `shaping.credit` decides which tokens learn from which rewards."""

    reply: str | Messages
    reward: float


class ToolUnavailable(Exception):
    """A tool raises it if a service that it needs does not answer. The policy is not told: the call is repeated, or the
    episode is INVALID."""


@dataclass
class Environment(ABC):
    """Replies turn by turn. The reply is a function of all turns so far, so that any worker can reply and the death of
    a worker loses nothing, unless the class overrides `open`. Members are dataclasses whose fields are their options.

    Example::

        @dataclass
        class Echo(Environment):
            def reply(self, task, turns):
                return turns[-1].response if len(turns) < 3 else None
    """

    max_turns: Annotated[int, Field(ge=1)] = field(default=16, kw_only=True)
    """Maximum turns. An episode that would need more ends by length. `ended` or `[reward]` scores it."""
    observation_tokens: Annotated[int, Field(ge=1)] = field(default=256, kw_only=True)
    """Maximum tokens of an observation. A longer one makes the episode INVALID."""
    step_s: Annotated[float, Field(gt=0)] = field(default=10.0, kw_only=True)
    """Maximum seconds for one reply. A slower one makes the episode INVALID."""
    episode_s: Annotated[float, Field(gt=0)] = field(default=120.0, kw_only=True)
    """Maximum seconds for all replies of an episode. A slower episode is INVALID."""
    workers: Annotated[int, Field(ge=1, le=256)] = field(default=1, kw_only=True)
    """Processes that reply in parallel."""
    memory_bytes: Annotated[int, Field(ge=1 << 26)] = field(default=1 << 30, kw_only=True)
    """Maximum bytes of memory of each worker process."""
    stop: list[str] = field(default_factory=list, kw_only=True)
    """Strings that end a turn, like a stop token. The token that completes one of them is kept."""

    @abstractmethod
    def reply(
        self, task: Task, turns: Sequence[Turn]
    ) -> str | Messages | RewardedReply | RewardResult | Awaitable[Any] | None:
        """Returns the reply to the last turn: text or messages from which the policy continues, perhaps with the turn's
        reward; or a reward, which ends the episode; or None, which ends it and leaves the reward to `[reward]`. An
        exception makes the episode INVALID.

        With `async def` each of `workers` processes waits for many episodes at once, which costs little while a service
        answers. Each reply may wait for `step_s`. A reply that computes without `await` holds up all episodes of its
        process."""

    def open(self, task: Task) -> None:  # noqa: B027 - most environments have no state
        """Prepares the state of an episode. If a class overrides this, every episode gets a copy of the environment in
        one worker process, which calls `open` before the first reply and makes all replies. If the worker dies, the
        episode is INVALID."""

    def ended(self, task: Task, turns: Sequence[Turn]) -> RewardResult | Awaitable[Any] | None:
        """Returns the reward of an episode that ended by length, or None to leave the reward to `[reward]`. An episode
        ends by length if the last turn of the policy was cut, or if no turns or tokens are left after a reply.

        `turns` are those of the last `reply`, or one more, which was cut. The rewards of earlier turns still count. It
        is `async def` if `reply` is. An exception makes the episode INVALID. An episode that `reply` ends has no such
        call."""
        return None

    def close(self) -> None:  # noqa: B027
        """Releases the state of an episode that has ended or was canceled."""

    def tools(self) -> list[dict[str, Any]]:
        """Returns the tools that the chat template offers to the policy, as JSON schemas."""
        return []

    def check(self) -> None:
        """Raises ConfigError before a run if a package or a setting that the class needs is missing."""
        self.tools()

    @property
    def waits(self) -> bool:
        """Whether `reply` is a coroutine, so that many episodes wait in one process."""
        return iscoroutinefunction(self.reply)

    @property
    def judges_ended(self) -> bool:
        """Whether episodes that end by length are judged here, because the class overrides `ended`."""
        return type(self).ended is not Environment.ended

    @property
    def is_stateful(self) -> bool:
        """Whether episodes have state, because the class overrides `open`."""
        return type(self).open is not Environment.open
