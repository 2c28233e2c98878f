"""Parses tool calls in the formats of the model families. No torch.

    qwen    text <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>...</tool_call>
    llama   {"name": "add", "parameters": {"a": 1}}; {...}        perhaps behind `<|python_tag|>`, as are
            search.call(query="x")                                calls of built-in tools, and
            print(1 + 1)                                          code for the tool `python`

Each family's key for the arguments is also accepted in the other format. A malformed call has its fault in
`ToolCall.error`.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any, NoReturn

from llamarl.data.tokenizer import PYTHON_TAG, ToolFormat
from llamarl.types import ToolCall

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_BARE = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_BUILT_IN = re.compile(r"\w+\.call\(")
_MOST_DIGITS = 300


def tool_calls(text: str, written_in: ToolFormat) -> tuple[str, list[ToolCall]]:
    """Splits an assistant's text into the text outside of calls, and the calls.

    Args:
        text: includes special tokens except the stop token. Calls inside of thinking are ignored.
    """
    end = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    thought, text = text[:end], text[end:]
    if written_in == "qwen":
        calls = [
            _call(body) if closing else ToolCall(error="<tool_call> is not closed by </tool_call>")
            for body, closing in _TAGGED.findall(text)
        ]
        return (thought + _TAGGED.sub("", text)).strip(), calls
    before, tag, body = text.partition(PYTHON_TAG)
    if not tag and not _BARE.match(text.lstrip()):
        return (thought + text).strip(), []
    return (thought + (before if tag else "")).strip(), _llama_calls(body if tag else text, tagged=bool(tag))


def _llama_calls(body: str, *, tagged: bool) -> list[ToolCall]:
    body = body.strip()
    if tagged and _BUILT_IN.match(body):
        return [_built_in(body)]
    if tagged and not body.startswith("{"):
        return [ToolCall(name="python", arguments={"code": body})]
    calls = list[ToolCall]()
    while body:
        try:
            value, end = _DECODER.raw_decode(body)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall(error=f"the call is no JSON: {error}")]
        calls.append(_checked(value))
        body = body[end:].lstrip("; \n\t")
    return calls or [ToolCall(error="the call is empty")]


def _call(body: str) -> ToolCall:
    try:
        return _checked(_DECODER.decode(body.strip()))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is no JSON: {error}")


def _checked(value: Any) -> ToolCall:
    """Returns a call from its JSON."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ToolCall(error='the call is no object with a "name"')
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error=f'the arguments of "{name}" are no JSON object')
    return ToolCall(name=name, arguments=arguments)


def _built_in(body: str) -> ToolCall:
    """Parses `name.call(argument=literal, ...)`."""
    name = body.partition(".")[0]
    try:
        call = ast.parse(body, mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            arguments = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
            return ToolCall(name=name, arguments=_DECODER.decode(json.dumps(arguments)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return ToolCall(name=name, error=f"write the call as {name}.call(argument=value)")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer)
