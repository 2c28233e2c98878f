"""Python functions as tools: JSON schemas from signatures and docstrings, and calls with checked arguments. No
torch."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call

from llamarl.config import ConfigError
from llamarl.config.ref import find
from llamarl.parts.episodes.environments._base import Messages, ToolUnavailable
from llamarl.types import ToolCall

RETRY_S = 0.5
"""Seconds before the first repetition of a call; each further one waits twice as long."""
_SECTIONS = re.compile(r"^\s*(?:Args|Arguments|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^( +)(\w+)(?: \([^)]*\))?: (.*(?:\n\1 +.*)*)", re.MULTILINE)


def function_of(name: str) -> Callable[..., Any]:
    """Returns the function `package.module:function`. Raises ConfigError if it does not exist or cannot be a tool."""
    if ":" not in name:
        raise ConfigError(f"`rollout.tools` has {name!r}, which is not of the form `package.module:function`")
    found = find(name, "llamarl.parts.episodes.environments", "rollout.tools", "")
    if not inspect.isfunction(found) or inspect.isasyncgenfunction(found):
        raise ConfigError(f"`rollout.tools` has {name!r}, which is not a function: `def {name.partition(':')[2]}(...)`")
    schema(found)
    return found


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function as a tool. Raises ConfigError if JSON cannot name its arguments."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", function))
        parameters = adapter.json_schema()
    except Exception as error:  # user-defined annotations
        raise ConfigError(f"`rollout.tools`: {function.__name__} has no JSON schema: {error}") from None
    if parameters["type"] != "object":
        raise ConfigError(f"`rollout.tools`: {function.__name__} has arguments without a name; give each one a name")
    summary, *sections = _SECTIONS.split(inspect.getdoc(function) or "")
    described = {name: " ".join(text.split()) for _, name, text in _ARGUMENT.findall("\n".join(sections[:1]))}
    properties = {
        name: {key: value for key, value in one.items() if key != "title"}
        | ({"description": described[name]} if name in described else {})
        for name, one in parameters["properties"].items()
    }
    parameters = {"type": "object", "properties": properties} | {
        key: parameters[key] for key in ("required", "$defs") if key in parameters
    }
    described_as = {"name": function.__name__, "description": summary.strip(), "parameters": parameters}
    return {"type": "function", "function": described_as}


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """Limits of the calls of one coroutine function."""

    call_s: float = 8.0
    retries: int = 0
    at_once: int = 64
    per_s: float = 0.0


class LimitedTool:
    """A coroutine function with limits, for all episodes of a process."""

    def __init__(self, function: Callable[..., Any], limits: CallLimits) -> None:
        self._call, self._limits = validate_call(function), limits
        self._free = asyncio.Semaphore(limits.at_once)
        self._next_s = 0.0

    async def __call__(self, **arguments: Any) -> Any:
        """Raises ToolUnavailable if the last attempt had no answer, or what the function raises."""
        for attempt in range(self._limits.retries):
            try:
                return await self._once(arguments)
            except ToolUnavailable:
                await asyncio.sleep(RETRY_S * 2**attempt)
        return await self._once(arguments)

    async def _once(self, arguments: dict[str, Any]) -> Any:
        async with self._free:
            await self._turn()
            limit = asyncio.timeout(self._limits.call_s)
            try:
                async with limit:
                    return await self._call(**arguments)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise ToolUnavailable(f"no answer in {self._limits.call_s:g} s") from None

    async def _turn(self) -> None:
        """Waits until the rate allows another call."""
        if self._limits.per_s:
            now_s = asyncio.get_running_loop().time()
            self._next_s = max(self._next_s, now_s)
            wait_s, self._next_s = self._next_s - now_s, self._next_s + 1 / self._limits.per_s
            await asyncio.sleep(wait_s)


async def awaited_answers(calls: Sequence[ToolCall], functions: Mapping[str, Callable[..., Any]]) -> Messages:
    """Returns what `answers` returns, for functions of which some are `LimitedTool`. Calls of a turn run at the same
    time. Raises ToolUnavailable."""

    async def answer(call: ToolCall) -> dict[str, Any]:
        try:
            function = _found(call, functions)
            if isinstance(function, LimitedTool):
                result = await function(**call.arguments)
            else:
                result = validate_call(function)(**call.arguments)
        except ToolUnavailable as error:
            raise ToolUnavailable(f"the tool {call.name} is unavailable: {error}") from None
        except Exception as error:  # user-defined functions with the policy's arguments
            return _message(call, f"error: {_described(error)}", is_error=True)
        return _message(call, _text(result))

    return await asyncio.gather(*map(answer, calls))


def answers(calls: Sequence[ToolCall], functions: Mapping[str, Callable[..., Any]]) -> Messages:
    """Returns one message per call for the policy: the function's value, or the error of the call. Raises
    ToolUnavailable."""
    messages = Messages()
    for call in calls:
        try:
            messages.append(_message(call, _text(validate_call(_found(call, functions))(**call.arguments))))
        except ToolUnavailable:
            raise
        except Exception as error:  # user-defined functions with the policy's arguments
            messages.append(_message(call, f"error: {_described(error)}", is_error=True))
    return messages


def _message(call: ToolCall, content: str, *, is_error: bool = False) -> dict[str, Any]:
    return {"role": "tool", "name": call.name, "content": content, "is_error": is_error}


def _found(call: ToolCall, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if call.error:
        raise ToolError(call.error)
    if call.name not in functions:
        raise ToolError(f"there is no tool {call.name!r:.50}; there are {', '.join(functions)}")
    return functions[call.name]


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


class ToolError(Exception):
    """A tool's message to the policy, shown without the name of the exception."""


def _described(error: Exception) -> str:
    if isinstance(error, ToolError):
        return str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"argument {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"{type(error).__name__}: {error}"
