"""Parses tool calls in the formats of the model families. No torch.

    qwen        text <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>...</tool_call>
    qwen_coder  text <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    llama       {"name": "add", "parameters": {"a": 1}}; {...}        perhaps behind `<|python_tag|>`, as are
                search.call(query="x")                                calls of built-in tools, and
                print(1 + 1)                                          code for the tool `python`
    gpt_oss     <|channel|>analysis<|message|>thought<|end|><|start|>assistant
                <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

Qwen's and Llama's key for the arguments is also accepted in the other's format. A value of `qwen_coder` is text, unless
the tool's schema has another type. A malformed call has its fault in `ToolCall.error`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from llamarl.data.tokenizer import PYTHON_TAG, ToolFormat
from llamarl.types import ToolCall

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_BARE = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_BUILT_IN = re.compile(r"\w+\.call\(")
_MOST_DIGITS = 300


def tool_calls(
    text: str, written_in: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[ToolCall]]:
    """Splits an assistant's text into the text outside of calls, and the calls.

    Args:
        text: includes special tokens except the stop token. Calls inside of thinking are ignored.
        tools: JSON schemas of the tools, which say the types of values in `qwen_coder`.
    """
    if written_in == "gpt_oss":
        return _by_channel(text)
    end = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    thought, text = text[:end], text[end:]
    if written_in in ("qwen", "qwen_coder"):
        read = _call if written_in == "qwen" else partial(_marked_up, types=_types(tools))
        calls = [
            read(body) if closing else ToolCall(error="<tool_call> is not closed by </tool_call>")
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


def _call(body: str, name: str = "") -> ToolCall:
    """Parses a call, or the arguments of a call with a given name, from JSON."""
    try:
        value = _DECODER.decode(body.strip())
        return _checked({"name": name, "arguments": value} if name else value)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is no JSON: {error}")


def _types(tools: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    """Returns the type of each parameter by the names of function and parameter."""
    functions = [one.get("function", one) for one in tools]
    return {
        (function["name"], name): schema.get("type", "string")
        for function in functions
        for name, schema in function.get("parameters", {}).get("properties", {}).items()
    }


def _marked_up(body: str, types: Mapping[tuple[str, str], Any]) -> ToolCall:
    """Parses `<function=name><parameter=key>value</parameter>...</function>`."""
    found = _FUNCTION.fullmatch(body.strip())
    if found is None:
        return ToolCall(error="the call is not <function=name>...</function>")
    name, inner = found[1].strip(), found[2]
    if _PARAMETER.sub("", inner).strip():
        return ToolCall(name=name, error="write each argument as <parameter=name>value</parameter>")
    arguments = dict[str, Any]()
    for key, value in _PARAMETER.findall(inner):
        # The template writes a line break on either side of a value.
        text = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = text
        if types.get((name, key.strip()), "string") != "string":
            try:
                arguments[key.strip()] = _DECODER.decode(text.strip())
            except (ValueError, RecursionError) as error:
                return ToolCall(name=name, error=f"the value of {key.strip()!r} is no JSON: {error}")
    return ToolCall(name=name, arguments=arguments)


def _by_channel(text: str) -> tuple[str, list[ToolCall]]:
    """Parses messages with channels. `analysis` is thinking. A message to a function is a call."""
    said, calls = list[str](), list[ToolCall]()
    for message in re.split(r"<\|start\|>assistant", text):
        header, there, body = message.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body)[0]
        if to := re.search(r"to=functions\.([\w.-]+)", header):
            no_body = ToolCall(name=to[1], error="the call has no <|message|>")
            calls.append(_call(body, to[1]) if there else no_body)
        elif "analysis" not in header:
            said.append(body if there else header)
    return "".join(said).strip(), calls


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
