"""Calls of tools, in what the models of the families write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.data.tokenizer import ToolFormat
from llamarl.parts.episodes.tool_calls import tool_calls
from llamarl.types import ToolCall

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {
    "a": {"type": "integer"}, "b": {"type": "string"}}}}}]  # fmt: skip


def ok(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
    ("family", "text", "beside", "calls"),
    [
        ("qwen", "plain", "plain", []),
        ("qwen", 'So\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}\n</tool_call>', "So",
         [ok("add", a=1, b=[2.5, None])]),
        ("qwen",'<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"g","parameters":{}}</tool_call>',
         "", [ok("f"), ok("g")]),
        ("qwen", '<think>a <tool_call>{"name": "f", "arguments": {}}</tool_call></think>no', None, []),
        ("qwen", '{"name": "add", "arguments": {}}', None, []),
        ("llama", "plain", "plain", []),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [ok("add", a=1)]),
        ("llama", ' {"type": "function", "name": "add", "parameters": {"a": 1}}', "", [ok("add", a=1)]),
        ("llama", '<|python_tag|>{"name": "add", "arguments": {"a": 1}}; {"name": "f", "parameters": {}}', "",
         [ok("add", a=1), ok("f")]),
        ("llama", 'Look:<|python_tag|>brave_search.call(query="x (y)", n=3)', "Look:",
         [ok("brave_search", query="x (y)", n=3)]),
        ("llama", "<|python_tag|>print(1 + 1)", "", [ok("python", code="print(1 + 1)")]),
        ("llama", '{"a": 1} is an object', '{"a": 1} is an object', []),
        ("llama", r"{x : x > 0}", r"{x : x > 0}", []),
        ("qwen_coder", "plain", "plain", []),
        ("qwen_coder", ("So\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n1\n"
         "</parameter>\n</function>\n</tool_call>"), "So", [ok("add", a=1, b="1")]),
        ("qwen_coder", ("<tool_call><function=f></function></tool_call><tool_call><function=run>"
         "<parameter=code>\nif a < b:\n    print('x')\n\n</parameter></function></tool_call>"), "",
         [ok("f"), ok("run", code="if a < b:\n    print('x')\n")]),
        ("qwen_coder", "<think><tool_call><function=f></function></tool_call></think>no", None, []),
        ("gpt_oss", "<|channel|>final<|message|>plain<|return|>", "plain", []),
        ("gpt_oss", ("<|channel|>analysis<|message|>to=functions.f<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'), "", [ok("add", a=1)]),
        ("gpt_oss", " to=functions.add<|channel|>commentary json<|message|>{}", "", [ok("add")]),
        ("gpt_oss", ("<|channel|>commentary<|message|>Look:<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.f <|constrain|>json<|message|>{"x": [2]}'), "Look:", [ok("f", x=[2])]),
    ],
)  # fmt: skip
def test_calls(family: ToolFormat, text: str, beside: str | None, calls: list[ToolCall]) -> None:
    assert tool_calls(text, family, TOOLS) == (text if beside is None else beside, calls)


@pytest.mark.parametrize(
    ("family", "body", "error"),
    [
        ("qwen", "<tool_call>", "is not closed"),
        ("qwen", '<tool_call>{"name": "f", "arguments": {}}', "is not closed"),
        ("qwen", "<tool_call>f(1)</tool_call>", "is no JSON"),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ("qwen", '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>' % ("9" * 5000), "5000 digits"),
        ("qwen", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "are no JSON object"),
        ("qwen", '<tool_call>{"name": "f"}</tool_call>', "are no JSON object"),
        ("qwen", '<tool_call>{"arguments": {}}</tool_call>', "no object with a"),
        ("qwen", "<tool_call>[]</tool_call>", "no object with a"),
        ("qwen", "<tool_call>" + "[" * 100_000 + "</tool_call>", "is no JSON"),
        ("qwen_coder", "<tool_call>add(1)</tool_call>", "is not <function=name>"),
        ("qwen_coder", "<tool_call><function=f>1</function></tool_call>", "write each argument"),
        ("qwen_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "write each argument"),
        ("qwen_coder", "<tool_call><function=add><parameter=a>x</parameter></function></tool_call>", "'a' is no JSON"),
        ("qwen_coder", "<tool_call><function=f></function>", "is not closed"),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{", "is no JSON"),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>1", "are no JSON object"),
        ("gpt_oss", "<|channel|>commentary to=functions.f", "has no <|message|>"),
        ("llama", '{"name": "f", "parameters": {"a": 1}', "is no JSON"),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}} and more', "is no JSON"),
        ("llama", "<|python_tag|>{}", "no object with a"),
        ("llama", "<|python_tag|>search.call(query=", "write the call as search.call"),
        ("llama", "<|python_tag|>search.call(open('x'))", "write the call as search.call"),
        ("llama", "<|python_tag|>search.call(x=open('x'))", "write the call as search.call"),
        ("llama", "<|python_tag|>search.call(x={1})", "write the call as search.call"),
        ("llama", "<|python_tag|>search.call(x=1e999)", "write the call as search.call"),
        ("llama", "<|python_tag|>search.call(x=" + "(" * 5000, "write the call as search.call"),
    ],
)  # fmt: skip
def test_a_malformed_call_says_so(family: ToolFormat, body: str, error: str) -> None:
    _, calls = tool_calls(body, family, TOOLS)
    assert error in calls[-1].error
    assert not calls[-1].arguments


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
)  # fmt: skip


@given(st.sampled_from(["qwen", "llama"]), st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=4))
def test_what_was_written_is_read(family: ToolFormat, name: str, arguments: dict[str, object]) -> None:
    key = "arguments" if family == "qwen" else "parameters"
    body = json.dumps({"name": name, key: arguments}).replace("<", "\\u003c")
    text = f"<tool_call>\n{body}\n</tool_call>" if family == "qwen" else body
    assert tool_calls(text, family) == ("", [ToolCall(name=name, arguments=arguments)])


@given(
    st.sampled_from(["qwen", "qwen_coder", "llama", "gpt_oss"]),
    st.text(alphabet='<tool_call>/{}[]":,name argumets|python_tag.1;\n()='),
)
def test_whatever_is_written_is_no_error_of_ours(family: ToolFormat, text: str) -> None:
    begins = ("<tool_call>", "<tool_call><function=f><parameter=a>", "<|python_tag|>", "to=functions.f<|message|>")
    for prefix in ("", *begins, '{"name": "f", "arguments": {'):
        _, calls = tool_calls(prefix + text, family)
        assert all(call.error or call.name for call in calls)
