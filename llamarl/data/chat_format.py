"""A run's prompt format as a Jinja chat template, so that other programs prompt the model as the run did."""

from __future__ import annotations

import json
from string import Formatter
from typing import Any

from llamarl.config.data import DataConfig
from llamarl.config.errors import ConfigError
from llamarl.data.prompts import CHAT, PLAIN, conversation, examples_text, render, resolved_data
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import Tokenizer

FORMAT = ("template", "system", "examples", "template_arguments", "date")
"""Settings of the section `data` that decide how a question becomes a prompt."""
SAMPLE = "2 + 2 = ?"
"""Question for showing a format if there is no prompt yet."""
_SHOWN = 400
"""Most characters of a prompt to show."""


def chat_template_of(data: DataConfig, tokenizer: Tokenizer) -> str | None:
    """Returns the chat template that writes the prompts of resolved settings. None means the tokenizer's template.

    Raises:
        ConfigError: the text template has fields other than `{question}`, which a chat does not have.
    """
    if data.template == CHAT:
        head = _arguments(data) + _head(data)
        own = tokenizer.template_text or ""
        return f"{head}\n{own}" if head and not own.startswith(head) else None
    return text_chat_template(data.template, examples_text(data), _first_text(tokenizer))


def with_chat(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer with a chat template: its template, or the plain text format if it has none."""
    if tokenizer.has_chat_template:
        return tokenizer
    return tokenizer.with_template(text_chat_template(PLAIN, start=_first_text(tokenizer)))


def text_chat_template(template: str, head: str = "", start: str = "") -> str:
    """Returns a text template as a chat template. The text renders each user message, and an assistant message follows
    as answers of examples do.

    Args:
        head: text in front of the first question.
        start: text in front of everything, such as BOS.

    Raises:
        ConfigError: the template has fields other than `{question}`.
    """
    pieces = list[str]()
    for text, field, _, _ in Formatter().parse(template):
        if field not in (None, "question"):
            raise ConfigError(
                f"data.template = {template!r} has the field {field!r}, but a chat has only the question, so it cannot "
                "be written as a chat template"
            )
        pieces += [_jinja(text)] if text else []
        pieces += ["message['content']"] if field else []
    first, question = _jinja(head), " + ".join(pieces)
    return (
        "{{- " + _jinja(start) + " -}}"
        "{%- for message in messages -%}"
        "{%- if loop.first and message['role'] != 'system' -%}{{- " + first + " -}}{%- endif -%}"
        "{%- if message['role'] == 'user' -%}{{- " + question + " -}}"
        "{%- elif message['role'] == 'assistant' -%}"
        "{{- message['content'] -}}{%- if not loop.last -%}{{- '\\n\\n' -}}{%- endif -%}"
        "{%- else -%}{{- message['content'] + '\\n\\n' -}}{%- if loop.first -%}{{- " + first + " -}}{%- endif -%}"
        "{%- endif -%}"
        "{%- endfor -%}"
    )


def sample_prompt(data: DataConfig, tokenizer: Tokenizer) -> str:
    """Returns a sentence that shows the prompt of a question. Empty means that the template needs other fields."""
    row = ProblemRow(problem_id="sample", question=SAMPLE, answer="")
    try:
        text = render(row, data, tokenizer)
    except ConfigError:
        return ""
    (token_ids_T,) = tokenizer.encode_prompts([text], is_chat=data.template == CHAT)
    return f"{SAMPLE!r} is asked as {shortened(tokenizer.decode(token_ids_T, skip_special=False))!r}"


def sample_chat(tokenizer: Tokenizer) -> str:
    """Returns a sentence that shows a user's message in the tokenizer's chat template, or why the template refuses
    it."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": SAMPLE}])
    except ConfigError as error:
        return f"{SAMPLE!r} alone is refused: {error}"
    (token_ids_T,) = tokenizer.encode_prompts([text], is_chat=True)
    return f"{SAMPLE!r} is asked as {shortened(tokenizer.decode(token_ids_T, skip_special=False))!r}"


def shortened(text: str) -> str:
    """Returns a text without its middle if it is long."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN * 2 // 3]} ... {text[-_SHOWN // 3 :]}"


def of_run(data: DataConfig, *, for_agent: bool) -> dict[str, Any]:
    """Returns the format of a run's prompts as settings of the section `data`. If all sources of a mixture agree,
    theirs is used, and otherwise the run's. Calls of an agent are chats."""
    formats = [data.of(one) for one in data.sources] or [data]
    chosen = formats[0] if all(_same(one, formats[0]) for one in formats) else data
    found = {name: getattr(chosen, name) for name in FORMAT}
    return found | ({"template": "auto", "examples": []} if for_agent else {})


def resolved_format(data: DataConfig, tokenizer: Tokenizer) -> DataConfig:
    """Returns resolved settings, without a date if the template does not use it."""
    found = resolved_data(data, tokenizer)
    return found if tokenizer.tells_date else found.model_copy(update={"date": ""})


def _same(one: DataConfig, other: DataConfig) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in FORMAT)


def _first_text(tokenizer: Tokenizer) -> str:
    """Returns the text of tokens in front of every prompt, such as BOS. Chat templates write it themselves."""
    return tokenizer.decode(tokenizer.first_ids, skip_special=False)


def _head(data: DataConfig) -> str:
    """Returns Jinja that adds the run's system message and examples to conversations without them."""
    nothing = ProblemRow(problem_id="", question="", answer="")
    head, _ = conversation(nothing, data)
    system = [one for one in head if one["role"] == "system"]
    examples = head[len(system) :]
    if not head:
        return ""
    own = f"[{_jinja(system[0])}]" if system else "[]"
    text = (
        "{%- if messages[0]['role'] == 'system' -%}"
        "{%- set llamarl_system = [messages[0]] -%}{%- set messages = messages[1:] -%}"
        "{%- else -%}{%- set llamarl_system = " + own + " -%}{%- endif -%}"
    )
    if examples:
        shown = _jinja(examples)
        text += (
            "{%- if " + _jinja(examples[0]) + " not in messages -%}"
            "{%- set messages = " + shown + " + messages -%}{%- endif -%}"
        )
    return text + "{%- set messages = llamarl_system + messages %}"


def _arguments(data: DataConfig) -> str:
    """Returns Jinja with defaults for the template's arguments, which a caller can override."""
    return "".join(
        "{%- if " + name + " is not defined -%}{%- set " + name + " = " + _jinja(value) + " -%}{%- endif %}"
        for name, value in data.template_arguments.items()
    )


def _jinja(value: Any) -> str:
    """Returns a value as a Jinja expression."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_jinja(str(key))}: {_jinja(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_jinja, value)) + "]"
    return repr(value)
