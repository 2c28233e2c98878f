"""Python functions as tools."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from llamarl.config import ConfigError, Ref
from llamarl.config.load import validated
from llamarl.config.schema import RolloutConfig
from llamarl.parts.episodes.environments._base import Task, Turn
from llamarl.parts.episodes.environments._worker import build_environment, tools_of
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


async def later(text: str) -> str:
    return text


def test_schemas_are_those_of_signature_and_docstring() -> None:
    found, plain = tools_of(
        Ref.model_validate({"name": "tools", "functions": [f"{__name__}:search", f"{__name__}:shout"]})
    )
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
        (f"{__name__}:TASK", "not a plain function"),
        (f"{__name__}:later", "not a plain function"),
        (f"{__name__}:nameless", "has arguments without a name"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(tools: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tools_of(Ref.model_validate({"name": "tools", "functions": [tools]}))
    with pytest.raises(ConfigError, match="two functions have the same name"):
        build_environment(Ref.model_validate({"name": "tools", "functions": [f"{__name__}:shout"] * 2}))


def test_tools_in_a_run_file_are_an_environment() -> None:
    def rollout(**values: Any) -> RolloutConfig:
        return validated(values, RolloutConfig)

    config = rollout(tools=["a:b"], environment={"name": "tools", "max_turns": 3})
    assert config.environment is not None and config.environment.options == {"max_turns": 3, "functions": ["a:b"]}
    assert rollout(**config.model_dump()) == config == rollout(**config.model_dump(exclude_unset=True))
    assert rollout(tools=["a:b"]).environment == Ref.model_validate({"name": "tools", "functions": ["a:b"]})
    with pytest.raises(ConfigError, match=r"rollout.tools with rollout.environment = 'calculator'"):
        rollout(tools=["a:b"], environment="calculator")
