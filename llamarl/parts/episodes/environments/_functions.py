"""Python functions as tools: JSON schemas from signatures and docstrings, and calls with checked arguments. No
torch."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call

from llamarl.config import ConfigError
from llamarl.config.ref import find
from llamarl.parts.episodes.environments._base import Messages
from llamarl.types import ToolCall

_SECTIONS = re.compile(r"^\s*(?:Args|Arguments|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^( +)(\w+)(?: \([^)]*\))?: (.*(?:\n\1 +.*)*)", re.MULTILINE)


def function_of(name: str) -> Callable[..., Any]:
    """Returns the function `package.module:function`. Raises ConfigError if it does not exist or cannot be a tool."""
    if ":" not in name:
        raise ConfigError(f"`rollout.tools` has {name!r}, which is not of the form `package.module:function`")
    found = find(name, "llamarl.parts.episodes.environments", "rollout.tools", "")
    if not inspect.isfunction(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"`rollout.tools` has {name!r}, which is not a plain function: `def {name.partition(':')[2]}(...)`"
        )
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


def answers(calls: Sequence[ToolCall], functions: dict[str, Callable[..., Any]]) -> Messages:
    """Returns one message per call for the policy: the function's value, or the error of the call."""
    messages = Messages()
    for call in calls:
        try:
            content, is_error = _called(call, functions), False
        except Exception as error:  # user-defined functions with the policy's arguments
            content, is_error = f"error: {_described(error)}", True
        messages.append({"role": "tool", "name": call.name, "content": content, "is_error": is_error})
    return messages


def _called(call: ToolCall, functions: dict[str, Callable[..., Any]]) -> str:
    if call.error:
        raise ToolError(call.error)
    if call.name not in functions:
        raise ToolError(f"there is no tool {call.name!r:.50}; there are {', '.join(functions)}")
    result = validate_call(functions[call.name])(**call.arguments)
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
