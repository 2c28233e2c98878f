"""Thinking models: thoughts are split from answers, and dropped between turns as the chat template drops them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.gateway.endpoint import Endpoint
from llamarl.parts.episodes.gateway.session import Session
from llamarl.parts.episodes.thoughts import split_thoughts, thought_format
from llamarl.types import OBSERVED
from tests.parts.episodes.gateway.conftest import Scripted, tool_schema

QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == "assistant" %}
{%- set content = m.content or "" %}{% set thoughts = m.reasoning_content or "" %}
{%- if not thoughts and "</think>" in content %}
{%- set thoughts = content.split("</think>")[0].rstrip("\\n").split("<think>")[-1].lstrip("\\n") %}
{%- set content = content.split("</think>")[-1].lstrip("\\n") %}
{%- endif %}
{{- "[assistant]\\n" }}
{%- if loop.index0 > ns.last and (loop.last or thoughts) %}
{{- "<think>\\n" + thoughts.strip("\\n") + "\\n</think>\\n\\n" + content.lstrip("\\n") }}
{%- else %}{{ content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- "\\n<tool_call>\\n" + c.function | tojson + "\\n</tool_call>" }}
{%- endfor %}
{%- else %}{{ "[" + m.role + "]\\n" + m.content }}{% endif %}
{{- "<|endoftext|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "[assistant]\\n" }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ "<think>\\n\\n</think>\\n\\n" }}{% endif %}
{%- if opens is defined %}{{ "<think>\\n" }}{% endif %}
{%- endif %}"""
"""As Qwen 3's: thoughts of turns before the last message of the user are left out, those after it are kept."""
FIRST, SECOND = "<think>\n17 and 5\n</think>\n\nIt is 22.", "<think>\nless 2\n</think>\n\nIt is 20."


@pytest.fixture
def thinking(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Tokenizer]:
    def make(template: str = QWEN3, **arguments: Any) -> Tokenizer:
        folder = Path(shutil.copytree(tokenizer.folder, tmp_path / "thinking", dirs_exist_ok=True))
        (folder / "chat_template.jinja").write_text(template)
        return Tokenizer(folder, arguments)

    return make


Made = tuple[Scripted, Endpoint, Session]


def chat(made: Made, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    answer = asyncio.run(made[1].chat(made[2], {"messages": messages, **more}))
    return answer["choices"][0]["message"]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        (FIRST, False, ("17 and 5", "It is 22.")),
        ("plain", False, (None, "plain")),
        ("17\n</think>\n\n22", True, ("17", "22")),
        ("17 and", True, ("17 and", "")),
        ("<think>\n17 and", False, ("17 and", "")),
        ("<think>\n\n</think>\n\n22", False, ("", "22")),
        ("a </think> b", False, (None, "a </think> b")),
    ],
)
def test_thoughts_in_tags(text: str, is_open: bool, expected: tuple[str | None, str]) -> None:
    assert split_thoughts(text, "think", is_open=is_open) == expected
    assert split_thoughts(text, None) == (None, text)


def test_thoughts_in_channels() -> None:
    text = "<|channel|>analysis<|message|>17 and 5<|end|><|start|>assistant<|channel|>final<|message|>It is 22."
    assert split_thoughts(text, "gpt_oss") == ("17 and 5", "It is 22.")
    assert split_thoughts("<|channel|>analysis<|message|>17 a", "gpt_oss") == ("17 a", "")
    assert split_thoughts("<|channel|>final<|message|>22", "gpt_oss") == (None, "22")
    assert (
        thought_format("{{ '<|channel|>' }}") == "gpt_oss" and thought_format("plain") is thought_format(None) is None
    )


@pytest.mark.parametrize("sends_thoughts", [True, False])
def test_thoughts_are_dropped_before_a_new_question(
    scripted: Callable[..., Made], thinking: Callable[..., Tokenizer], sends_thoughts: bool
) -> None:
    """The second prompt is the template's, and a sequence of its own. Each is trained after what the policy saw."""
    tokenizer = thinking()
    policy, _, session = made = scripted(FIRST, SECOND, of=tokenizer, limit=500)
    asked = [{"role": "user", "content": "17 + 5?"}]
    said = chat(made, asked)
    assert said == {"role": "assistant", "content": "It is 22.", "reasoning_content": "17 and 5"}
    answered = [*asked, said if sends_thoughts else {"role": "assistant", "content": said["content"]}]
    again = [*answered, {"role": "user", "content": "less 2?"}]
    assert chat(made, again)["reasoning_content"] == "less 2"
    prompt = tokenizer.apply_chat_template(again)
    assert "17 and 5" not in prompt and "It is 22." in prompt
    assert tokenizer.decode(policy.prompts[1], skip_special=False) == prompt
    columns = session.columns()
    for number, text in enumerate((FIRST, SECOND)):
        own = {name: values[columns["sequence"] == number] for name, values in columns.items()}
        sampled = [*tokenizer.encode(text).tolist(), tokenizer.eos_token_id]
        assert own["token_ids"].tolist() == [*policy.prompts[number].tolist(), *sampled]
        is_sampled_T = own["policy_versions"] != OBSERVED
        assert is_sampled_T.sum() == len(sampled) and is_sampled_T[-len(sampled) :].all()
    assert set(columns["sequence"]) == {0, 1}


def test_thoughts_are_kept_before_the_answer_of_a_tool(
    scripted: Callable[..., Made], thinking: Callable[..., Tokenizer]
) -> None:
    """One sequence: the tokens of the first turn are continued as they were sampled."""
    tokenizer, tools = thinking(), [tool_schema()]
    call = '<think>\nI add\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    policy, _, session = made = scripted(call, SECOND, of=tokenizer, limit=500)
    asked = [{"role": "user", "content": "17 + 5?"}]
    said = chat(made, asked, tools=tools)
    assert said["reasoning_content"] == "I add" and said["content"] is None
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": json.dumps({"a": 1})}
    tool = {"role": "tool", "content": "22", "tool_call_id": said["tool_calls"][0]["id"]}
    assert chat(made, [*asked, said, tool], tools=tools)["content"] == "It is 20."
    before_T = [*policy.prompts[0].tolist(), *tokenizer.encode(call).tolist(), tokenizer.eos_token_id]
    assert policy.prompts[1][: len(before_T)].tolist() == before_T
    assert set(session.columns()["sequence"]) == {0}
    # A new question drops the thoughts of both turns.
    third = [*asked, said, tool, {"role": "assistant", "content": "It is 20."}, {"role": "user", "content": "ok?"}]
    policy.texts.append("Yes.")
    assert chat(made, third, tools=tools) == {"role": "assistant", "content": "Yes."}
    text = tokenizer.decode(policy.prompts[2], skip_special=False)
    assert "I add" not in text and "less 2" not in text and set(session.columns()["sequence"]) == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "text", "expected"),
    [
        ({"enable_thinking": False}, "It is 22.", (None, "It is 22.")),
        ({"opens": True}, "17 and 5\n</think>\n\nIt is 22.", ("17 and 5", "It is 22.")),
    ],
)
def test_arguments_of_the_template_decide(
    scripted: Callable[..., Made], thinking: Callable[..., Tokenizer], arguments: dict[str, Any], text: str,
    expected: tuple[str | None, str],
) -> None:  # fmt: skip
    made = scripted(text, of=thinking(**arguments))
    said = chat(made, [{"role": "user", "content": "17 + 5?"}])
    assert (said.get("reasoning_content"), said["content"]) == expected


def test_thoughts_are_streamed_at_the_end(scripted: Callable[..., Made], thinking: Callable[..., Tokenizer]) -> None:
    made, events = scripted(FIRST, of=thinking()), list[bytes]()
    body = {"messages": [{"role": "user", "content": "17 + 5?"}], "stream": True}
    asyncio.run(made[1].chat(made[2], body, events.append))
    deltas = [json.loads(one[6:])["choices"][0]["delta"] for one in events if one.startswith(b"data: {")]
    assert "".join(one.get("content") or "" for one in deltas) == "It is 22."
    assert [one["reasoning_content"] for one in deltas if "reasoning_content" in one] == ["17 and 5"]
    assert np.array_equal(made[2].columns()["token_ids"][: len(made[0].prompts[0])], made[0].prompts[0])
