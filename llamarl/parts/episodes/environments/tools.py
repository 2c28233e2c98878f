"""Python functions that the policy may call as tools."""

from __future__ import annotations

from asyncio import iscoroutinefunction
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from llamarl.parts.episodes.environments._base import Environment, Messages, Task, Turn
from llamarl.parts.episodes.environments._functions import (
    CallLimits,
    LimitedTool,
    answers,
    awaited_answers,
    function_of,
    schema,
)

DEFAULT = CallLimits()


@dataclass
class Tools(Environment):
    """Replies to tool calls, in the format of the model's chat template, with the values of the functions, or with
    errors. A turn without calls ends the episode.

    If a function is `async def`, each process waits for many episodes at once, and the calls of such functions have the
    limits below. A function raises `ToolUnavailable` if its service does not answer: after `retries` the episode is
    INVALID. All other errors become replies to the policy.
    """

    functions: list[str] = field(default_factory=list)
    """Functions `package.module:function` with annotations and a docstring. Set by `rollout.tools`."""
    call_s: Annotated[float, Field(gt=0)] = DEFAULT.call_s
    """Maximum seconds of one call of an `async def` function. A slower one counts as unavailable."""
    retries: Annotated[int, Field(ge=0, le=10)] = DEFAULT.retries
    """Repetitions of a call of an `async def` function that is unavailable, within `step_s`."""
    at_once: Annotated[int, Field(ge=1)] = DEFAULT.at_once
    """Maximum calls of one `async def` function at the same time, in each process."""
    per_s: Annotated[float, Field(ge=0)] = DEFAULT.per_s
    """Maximum calls of one `async def` function per second, in each process. 0 means no limit."""

    def __post_init__(self) -> None:
        found = [function_of(name) for name in self.functions]
        self._functions = {function.__name__: function for function in found}
        if len(self._functions) < len(found):
            raise ValueError("two functions have the same name; the policy could not tell them apart")
        limits = CallLimits(call_s=self.call_s, retries=self.retries, at_once=self.at_once, per_s=self.per_s)
        if limits != DEFAULT and not self.waits:
            raise ValueError(
                "call_s, retries, at_once and per_s are limits of `async def` functions, and there is none; write one, "
                "or leave them out"
            )
        self._limited = {
            name: LimitedTool(function, limits) if iscoroutinefunction(function) else function
            for name, function in self._functions.items()
        }

    @property
    def waits(self) -> bool:
        return any(map(iscoroutinefunction, self._functions.values()))

    def tools(self) -> list[dict[str, Any]]:
        return [schema(function) for function in self._functions.values()]

    def reply(self, task: Task, turns: Sequence[Turn]) -> Messages | Awaitable[Messages | None] | None:  # type: ignore[override]
        return self._awaited(turns) if self.waits else answers(turns[-1].calls, self._functions) or None

    async def _awaited(self, turns: Sequence[Turn]) -> Messages | None:
        return await awaited_answers(turns[-1].calls, self._limited) or None
