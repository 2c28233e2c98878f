"""The prompt format of a run as a chat template in Jinja, so that other programs ask the model as the run did."""

from __future__ import annotations

import json
from string import Formatter
from typing import Any

from llamarl.config.data import DataConfig
from llamarl.config.errors import ConfigError
from llamarl.data.prompts import CHAT, PLAIN, conversation, examples_text, render, settled
from llamarl.data.sources import ProblemRow
from llamarl.data.tokenizer import Tokenizer

FORMAT = ("template", "system", "examples", "template_arguments", "date")
"""Settings of the section `data` that decide how a question becomes a prompt."""
SAMPLE = "2 + 2 = ?"
"""Question with which a command shows a format when it has no prompt yet."""
_SHOWN = 400
"""Characters of a prompt that are shown of a longer one."""


def chat_template_of(data: DataConfig, tokenizer: Tokenizer) -> str | None:
    """The chat template that writes the prompts of `settled` settings. None means that the tokenizer's own does.

    Raises:
        ConfigError: the text template has fields besides `{question}`, which no chat has.
    """
    if data.template == CHAT:
        head = _arguments(data) + _head(data)
        own = tokenizer.template_text or ""
        return f"{head}\n{own}" if head and not own.startswith(head) else None
    return text_chat_template(data.template, examples_text(data), _first_text(tokenizer))


def with_chat(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with the plain text format as its chat template if it has none."""
    if tokenizer.has_chat_template:
        return tokenizer
    return tokenizer.with_template(text_chat_template(PLAIN, start=_first_text(tokenizer)))


def text_chat_template(template: str, head: str = "", start: str = "") -> str:
    """A text template as a chat template: the text stands for each message of a user, and an assistant's message
    follows as the answers of examples do.

    Args:
        head: text in front of the first question.
        start: text in front of everything, such as BOS.

    Raises:
        ConfigError: the template has fields besides `{question}`.
    """
    pieces = list[str]()
    for text, field, _, _ in Formatter().parse(template):
        if field not in (None, "question"):
            raise ConfigError(
                f"data.template = {template!r} has the field {field!r}, and a chat has the question only, so it cannot "
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
    """Sentence that shows how a question is asked, by `settled` settings. Empty: the template needs other fields."""
    row = ProblemRow(problem_id="sample", question=SAMPLE, answer="")
    try:
        text = render(row, data, tokenizer)
    except ConfigError:
        return ""
    (token_ids_T,) = tokenizer.encode_prompts([text], is_chat=data.template == CHAT)
    return f"{SAMPLE!r} is asked as {shortened(tokenizer.decode(token_ids_T, skip_special=False))!r}"


def sample_chat(tokenizer: Tokenizer) -> str:
    """Sentence that shows how a user's message is asked by the tokenizer's chat template, or why it is refused."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": SAMPLE}])
    except ConfigError as error:
        return f"{SAMPLE!r} alone is refused: {error}"
    (token_ids_T,) = tokenizer.encode_prompts([text], is_chat=True)
    return f"{SAMPLE!r} is asked as {shortened(tokenizer.decode(token_ids_T, skip_special=False))!r}"


def shortened(text: str) -> str:
    """A text without its middle if it is long."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN * 2 // 3]} ... {text[-_SHOWN // 3 :]}"


def of_run(data: DataConfig, *, for_agent: bool) -> dict[str, Any]:
    """The format of a run's prompts as settings of the section `data`. Sources of a mixture that agree on one decide;
    otherwise the run's own settings do. The calls of an agent are chats, whatever its task is written with."""
    formats = [data.of(one) for one in data.sources] or [data]
    chosen = formats[0] if all(_same(one, formats[0]) for one in formats) else data
    found = {name: getattr(chosen, name) for name in FORMAT}
    return found | ({"template": "auto", "examples": []} if for_agent else {})


def settled_format(data: DataConfig, tokenizer: Tokenizer) -> DataConfig:
    """`settled`, without a date where the template writes none."""
    found = settled(data, tokenizer)
    return found if tokenizer.tells_date else found.model_copy(update={"date": ""})


def _same(one: DataConfig, other: DataConfig) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in FORMAT)


def _first_text(tokenizer: Tokenizer) -> str:
    """Text of the tokens, such as BOS, that stand in front of every prompt; a chat template writes them itself."""
    return tokenizer.decode(tokenizer.first_ids, skip_special=False)


def _head(data: DataConfig) -> str:
    """Jinja that puts the run's system message and examples in front of a conversation which lacks them."""
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
    """Jinja that gives a chat template the run's arguments, which a caller may replace."""
    return "".join(
        "{%- if " + name + " is not defined -%}{%- set " + name + " = " + _jinja(value) + " -%}{%- endif %}"
        for name, value in data.template_arguments.items()
    )


def _jinja(value: Any) -> str:
    """A value as an expression of Jinja."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_jinja(str(key))}: {_jinja(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_jinja, value)) + "]"
    return repr(value)
