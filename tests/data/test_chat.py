"""Tools in the formats of the model families: what is handed to their templates, and what their models write."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.data.chat import ToolFormat, tool_calls, tool_format
from llamarl.data.tokenizer import Tokenizer
from llamarl.types import ToolCall

QWEN = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
{{- "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content.split("</think>")[-1].lstrip() if not loop.last else message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """<|begin_of_text|><|start_header_id|>system<|end_header_id|>

{% if tools %}Environment: ipython
{% endif %}Today Date: 26 Jul 2024<|eot_id|>
{%- for message in messages %}
{%- if loop.first and tools %}<|start_header_id|>user<|end_header_id|>

Respond as {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ message.content }}<|eot_id|>
{%- elif message.role == "tool" %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson if message.content is mapping else message.content }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "plain": "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TWO = [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "Žluť 5"}]


@pytest.mark.parametrize("family", TEMPLATES)
def test_tools_reach_the_template_as_in_transformers(make_tokenizer: Callable[..., Tokenizer], family: str) -> None:
    from transformers import AutoTokenizer

    ours = make_tokenizer(chat_template=TEMPLATES[family])
    theirs = AutoTokenizer.from_pretrained(str(ours.folder))
    messages = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "I ask."}, *TWO]
    for tools in ([], [ADD]):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=tools or None)
        assert ours.apply_chat_template(messages, tools=tools) == text
    assert ('"name": "add"' in text) == (family != "plain")
    assert ours.tool_format == tool_format(TEMPLATES[family]) == (None if family == "plain" else family)


QWEN_TOOLS = "<tool_response>\n3\n</tool_response>\n<tool_response>\nŽluť 5\n</tool_response>"
USER = [{"role": "user", "content": "and now?"}]


@pytest.mark.parametrize(
    ("family", "replies", "after"),
    [
        ("qwen", USER, "\n<|im_start|>user\nand now?@\n<|im_start|>assistant\n"),
        ("qwen", TWO, f"\n<|im_start|>user\n{QWEN_TOOLS}@\n<|im_start|>assistant\n"),
        ("llama", USER, "#user$\n\nand now?@#assistant$\n\n"),
        ("llama", TWO[:1], "#ipython$\n\n3@#assistant$\n\n"),
        ("plain", USER, "\nuser:and now?\n"),
    ],
)
def test_what_follows_a_turn(
    make_tokenizer: Callable[..., Tokenizer], family: str, replies: list[dict[str, str]], after: str
) -> None:
    """From the stop token that was sampled on, or with it where none was."""
    stop, template = "<|endoftext|>", TEMPLATES[family]
    for name in ("<|im_end|>", "<|eot_id|>"):
        template = template.replace(name, stop)
    tokenizer = make_tokenizer(chat_template=template)
    for short, name in (("@", stop), ("#", "<|start_header_id|>"), ("$", "<|end_header_id|>")):
        after = after.replace(short, name)
    for tools in ([], [ADD]):
        assert tokenizer.after_turn(replies, without_stop=True, tools=tools) == after
        with_stop = tokenizer.after_turn(replies, without_stop=False, tools=tools)
        assert with_stop == (after if family == "plain" else stop + after)


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
    ],
)  # fmt: skip
def test_calls(family: ToolFormat, text: str, beside: str | None, calls: list[ToolCall]) -> None:
    assert tool_calls(text, family) == (text if beside is None else beside, calls)


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
    _, calls = tool_calls(body, family)
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


@given(st.sampled_from(["qwen", "llama"]), st.text(alphabet='<tool_call>/{}[]":,name argumets|python_tag.1;\n()='))
def test_whatever_is_written_is_no_error_of_ours(family: ToolFormat, text: str) -> None:
    for prefix in ("", "<tool_call>", "<|python_tag|>", '{"name": "f", "arguments": {'):
        _, calls = tool_calls(prefix + text, family)
        assert all(call.error or call.name for call in calls)
