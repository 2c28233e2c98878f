"""Tools in the formats of the model families, as they are handed to their templates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamarl.data.tokenizer import Tokenizer, tool_format

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
