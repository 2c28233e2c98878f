"""Python functions as tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Literal, cast

import numpy as np
import pytest

from llamarl.config import ConfigError, Ref
from llamarl.config.load import validated
from llamarl.config.schema import RolloutConfig
from llamarl.parts.episodes.environments import _functions
from llamarl.parts.episodes.environments._base import Messages, Task, ToolUnavailable, Turn
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.types import ToolCall

TASK = Task(prompt="p", answer="a", metadata={})


def search(query: str, limit: int = 5, *, kind: Literal["page", "image"] = "page") -> list[str]:
    """Finds pages
    and images.

    Args:
        query: what to look for,
            in words
        limit (int): how many

    Returns:
        kind: of nothing
    """
    if query == "fail":
        raise LookupError("no such page")
    return [f"{kind} {query} {n}" for n in range(limit)]


def shout(text: str) -> str:
    return text.upper() + "Ž"


def nameless(text: str, *more: str) -> str:
    return text


async def later_ones(text: str) -> AsyncIterator[str]:
    yield text


BEGAN = list[float]()
AT_WORK = [0, 0]
"""Calls of `service` at work now, and most at a time."""


async def service(text: str) -> str:
    """Answers after a while, or does what the text says."""
    BEGAN.append(asyncio.get_running_loop().time())
    AT_WORK[0] += 1
    AT_WORK[1] = max(AT_WORK)
    try:
        await asyncio.sleep(100 if text == "hang" else 0.05)
    finally:
        AT_WORK[0] -= 1
    if text == "down" or (text == "once" and len(BEGAN) == 1):
        raise ToolUnavailable("503")
    if text == "fail":
        raise LookupError("no such page")
    return text.upper()


def test_schemas_are_those_of_signature_and_docstring() -> None:
    ref = Ref.model_validate({"name": "tools", "functions": [f"{__name__}:search", f"{__name__}:shout"]})
    found, plain = build_environment(ref).tools()
    assert found == {"type": "function", "function": {
        "name": "search", "description": "Finds pages\nand images.",
        "parameters": {
            "type": "object", "required": ["query"],
            "properties": {
                "query": {"type": "string", "description": "what to look for, in words"},
                "limit": {"type": "integer", "default": 5, "description": "how many"},
                "kind": {"type": "string", "default": "page", "enum": ["page", "image"]},
            },
        },
    }}  # fmt: skip
    assert plain["function"] == {"name": "shout", "description": "", "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "content", "is_error"),
    [
        (ToolCall(name="search", arguments={"query": "x", "limit": 2}), '["page x 0", "page x 1"]', False),
        (ToolCall(name="shout", arguments={"text": "x"}), "XŽ", False),
        (ToolCall(name="search", arguments={"query": "x", "limit": "1", "kind": "image"}), '["image x 0"]', False),
        (ToolCall(name="search", arguments={"limit": 2}), "error: argument query: Missing required argument", True),
        (
            ToolCall(name="search", arguments={"query": 3}),
            "error: argument query: Input should be a valid string",
            True,
        ),
        (
            ToolCall(name="shout", arguments={"text": "x", "n": 1}),
            "error: argument n: Unexpected keyword argument",
            True,
        ),
        (ToolCall(name="search", arguments={"query": "fail"}), "error: LookupError: no such page", True),
        (ToolCall(name="rm", arguments={}), "error: there is no tool 'rm'; there are search, shout", True),
        (ToolCall(error="the call is no JSON: x"), "error: the call is no JSON: x", True),
    ],
)
def test_every_call_is_answered(call: ToolCall, content: str, is_error: bool) -> None:
    tools = build_environment(
        Ref.model_validate({"name": "tools", "functions": [f"{__name__}:search", f"{__name__}:shout"]})
    )
    good = ToolCall(name="shout", arguments={"text": "a"})
    first, second = tools.reply(TASK, [Turn(response="r", calls=(call, good))])
    assert first == {"role": "tool", "name": call.name, "content": content, "is_error": is_error}
    assert second["content"] == "AŽ"
    assert tools.reply(TASK, [Turn(response="r", calls=(call,), observation="o"), Turn(response="done")]) is None


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ("shout", "not of the form `package.module:function`"),
        (f"{__name__}:nothing", "cannot be imported"),
        (f"{__name__}:TASK", "not a function"),
        (f"{__name__}:later_ones", "not a function"),
        (f"{__name__}:nameless", "has arguments without a name"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(tools: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_environment(Ref.model_validate({"name": "tools", "functions": [tools]})).tools()
    with pytest.raises(ConfigError, match="two functions have the same name"):
        build_environment(Ref.model_validate({"name": "tools", "functions": [f"{__name__}:shout"] * 2}))


def asked(*texts: str, **options: Any) -> Messages:
    """The answers to calls of `service` in one turn."""
    BEGAN.clear()
    AT_WORK[:] = 0, 0
    functions = [f"{__name__}:service", f"{__name__}:shout"]
    tools = build_environment(Ref.model_validate({"name": "tools", "functions": functions} | options))
    assert tools.waits

    async def run() -> Any:
        calls = tuple(ToolCall(name="service", arguments={"text": text}) for text in texts)
        calls += (ToolCall(name="shout", arguments={"text": "a"}),)
        return await cast("Awaitable[Any]", tools.reply(TASK, [Turn(response="r", calls=calls)]))

    *found, other = asyncio.run(run())
    assert other["content"] == "AŽ"
    return found


def test_calls_of_coroutine_functions_wait_together() -> None:
    found = asked(*"abcd", "fail", *"efgh")
    assert [one["content"] for one in found] == [*"ABCD", "error: LookupError: no such page", *"EFGH"]
    assert [one["is_error"] for one in found] == [False] * 4 + [True] + [False] * 4
    assert AT_WORK == [0, 9]


def test_a_service_gets_no_more_calls_than_its_limits() -> None:
    asked(*"abcdef", at_once=2)
    assert AT_WORK[1] == 2
    asked(*"abc", per_s=10.0)
    assert np.diff(BEGAN).min() > 0.09


@pytest.mark.parametrize(("text", "attempts"), [("down", 3), ("hang", 3), ("once", 2)])
def test_a_service_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, text: str, attempts: int
) -> None:
    """And is no fault of the policy: the episode is INVALID then."""
    monkeypatch.setattr(_functions, "RETRY_S", 0.01)
    if text == "once":
        assert [one["content"] for one in asked(text, retries=2)] == ["ONCE"]
    else:
        with pytest.raises(ToolUnavailable, match=r"the tool service is unavailable: (503|no answer in 0.2 s)"):
            asked(text, retries=2, call_s=0.2)
    assert len(BEGAN) == attempts


def test_limits_of_plain_functions_are_refused() -> None:
    with pytest.raises(ConfigError, match="limits of `async def` functions"):
        build_environment(Ref.model_validate({"name": "tools", "functions": [f"{__name__}:shout"], "retries": 1}))


def test_tools_in_a_run_file_are_an_environment() -> None:
    def rollout(**values: Any) -> RolloutConfig:
        return validated(values, RolloutConfig)

    config = rollout(tools=["a:b"], environment={"name": "tools", "max_turns": 3})
    assert config.environment is not None and config.environment.options == {"max_turns": 3, "functions": ["a:b"]}
    assert rollout(**config.model_dump()) == config == rollout(**config.model_dump(exclude_unset=True))
    assert rollout(tools=["a:b"]).environment == Ref.model_validate({"name": "tools", "functions": ["a:b"]})
    with pytest.raises(ConfigError, match=r"rollout.tools with rollout.environment = 'calculator'"):
        rollout(tools=["a:b"], environment="calculator")
