"""Rows of a source -> rendered, tokenized prompts.

Shape suffix: T tokens of one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from string import Formatter
from typing import Any, Literal

import numpy as np

from llamarl.config.errors import ConfigError
from llamarl.config.ref import Ref, build
from llamarl.config.schema import DataConfig
from llamarl.data.rates import kept
from llamarl.data.sources import ProblemRow, ProblemSource
from llamarl.data.sources._base import ROW
from llamarl.data.sources._table import Table
from llamarl.data.tokenizer import Tokenizer
from llamarl.observability.spans import stage
from llamarl.types import Prompt

SOURCES = "llamarl.data.sources"
AUTO, CHAT, PLAIN = "auto", "chat", "{question}\n"
_SHOWN = 300
"""Most characters of a prompt to show."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts of one source, in order."""

    prompts: tuple[Prompt, ...]
    """At least one prompt."""
    rows: tuple[ProblemRow, ...]
    """Row of each prompt."""
    warnings: tuple[str, ...]
    """Sentences about dropped rows and columns."""
    first_prompt: str
    """Sentence that shows the first prompt as the model sees it, and the template."""
    note: str = ""
    """Sentence on what `data.filter` drops. Empty means nothing."""


@stage("reading the tokenizer")
def open_tokenizer(path: str, config: DataConfig) -> Tokenizer:
    """Opens the tokenizer of a folder, with the settings' arguments for its chat template. Raises ConfigError."""
    return Tokenizer(path, config.template_arguments, config.date)


def resolved_data(
    config: DataConfig, tokenizer: Tokenizer, before: DataConfig | None = None, *, for_agent: bool = False
) -> DataConfig:
    """Returns settings with a fixed template and date, which make the same prompts on any day. A resumed run takes them
    from `before`. An agent writes chats itself, so for it `auto` is the plain question."""
    template, day = config.template, config.date
    if template == AUTO:
        template = before.template if before else AUTO
    found = CHAT if tokenizer.has_chat_template and not for_agent else PLAIN
    template = found if template == AUTO else template
    own = {"template": found}
    both = ("train", config.sources), ("eval", config.eval_sets)
    several = {
        name: [one.model_copy(update=own) if one.template == AUTO else one for one in found]
        for name, found in both
        if found
    }
    has_chats = for_agent or CHAT in (template, *(one.template for found in several.values() for one in found))
    if not day and has_chats and tokenizer.tells_date:
        day = (before.date if before else "") or time.strftime("%Y-%m-%d")
    return config.model_copy(update={"template": template, "date": day} | several)


@stage("reading the data")
def load_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    context_tokens: int,
    which: Literal["train", "eval"] = "train",
    tools: Sequence[Mapping[str, Any]] = (),
    most: int | None = None,
    for_agent: bool = False,
    label: str = "",
) -> PromptSet:
    """Loads the prompts of `config.train`, which is a single source, or of `config.eval`.

    Args:
        config: source, template and length policy.
        tokenizer: of the policy model.
        context_tokens: the model's longest sequence. A prompt leaves space for at least one more token.
        which: the source to load.
        tools: JSON schemas of functions that the policy may call, for the chat template.
        most: number of rows to read. None means all.
        for_agent: True if prompts are tasks of an agent, which writes chats itself.
        label: of the source in a mixture. It prefixes the names of its rows.

    Raises:
        ConfigError: source, template or filter is wrong, a prompt is overlong under `refuse`, or no prompt is left.
    """
    ref = config.train if which == "train" else config.eval
    assert isinstance(ref, Ref), "`DataConfig.of` gives each source of a mixture; without a source nothing is loaded"
    source: ProblemSource = build(ref, SOURCES, f"data.{which}")
    rows = _read(source, most, f"data.{which}")
    given, config = config.template, resolved_data(config, tokenizer, for_agent=for_agent)
    check_template(config, tokenizer, tools, for_agent=for_agent)
    texts = [render(row, config, tokenizer, tools) for row in rows]
    if texts and config.system.strip() not in texts[0]:
        raise ConfigError("data.system is not in the prompts: the chat template drops it; put it into the question")
    token_ids = tokenizer.encode_prompts(texts, is_chat=config.template == CHAT)
    limit = min(config.max_prompt_tokens, context_tokens - 1)
    fitting, prompts = list[ProblemRow](), list[Prompt]()
    for row, text, token_ids_T in zip(rows, texts, token_ids, strict=True):
        if _fits(row, token_ids_T, limit, config, f"data.{which}"):
            fitting.append(row)
            prompts.append(_prompt(row, text, token_ids_T, label))
    if not prompts:
        raise ConfigError(
            f"data.{which}: each of the {len(rows)} prompts has more than {limit} tokens; raise data.max_prompt_tokens "
            f"(it is {config.max_prompt_tokens}, the model's context {context_tokens})"
        )
    warnings, note = left_out(source, f"data.{which}"), ""
    warnings += [said for said in (header_warning(config, tokenizer),) if said]
    if num_overlong := len(rows) - len(prompts):
        fix = f"data.max_prompt_tokens = {config.max_prompt_tokens}"
        warnings.append(f"data.{which}: {num_overlong} prompts are too long and were skipped ({fix})")
    if config.filter and which == "train":
        keeps, note = kept(fitting, config.filter)
        prompts, fitting = list(compress(prompts, keeps)), list(compress(fitting, keeps))
    return PromptSet(
        prompts=tuple(prompts), rows=tuple(fitting), warnings=tuple(warnings), note=note,
        first_prompt=shown_prompt(given, config.template, tokenizer.decode(prompts[0].token_ids_T, skip_special=False)),
    )  # fmt: skip


def header_warning(data: DataConfig, tokenizer: Tokenizer) -> str:
    """Returns a warning about a chat template that ignores `add_generation_prompt` but writes a header in front of
    assistant turns, which the policy must then write itself. Empty means that the template opens the turn."""
    if data.template != CHAT or not tokenizer.has_chat_template:
        return ""
    asked, mark = [{"role": "user", "content": "."}], "\ufdd0reply\ufdd0"
    try:
        opened, plain = (tokenizer.apply_chat_template(asked, add_generation_prompt=one) for one in (True, False))
        whole = tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": mark}], add_generation_prompt=False
        )
    except ConfigError:
        return ""
    header, found, _ = whole.removeprefix(plain).partition(mark)
    if opened != plain or not found or not whole.startswith(plain) or not header.strip():
        return ""
    return (
        f"the chat template of {tokenizer.folder} ignores add_generation_prompt: prompts end without {header!r}, which "
        "it writes in front of assistant turns, so the policy has to learn to write it; add it to the template, "
        "after {% if add_generation_prompt %}"
    )


def _read(source: ProblemSource, most: int | None, option: str) -> list[ProblemRow]:
    """Reads the rows of a source. Raises ConfigError."""
    try:
        return [source[i] for i in range(len(source))[:most]]
    except ConfigError as error:
        if not str(error).startswith(ROW):
            raise
        raise ConfigError(f"{option}, {error}") from None


def _fits(row: ProblemRow, token_ids_T: np.ndarray, limit: int, config: DataConfig, option: str) -> bool:
    """Returns whether a prompt is short enough. Raises ConfigError if it is not under `refuse`, or is empty."""
    if len(token_ids_T) == 0:
        raise ConfigError(f"{option}: the prompt of {row.name} has no tokens; check data.template")
    if len(token_ids_T) > limit and config.overlong_prompts == "refuse":
        raise ConfigError(
            f"{option}: the prompt of {row.name} has {len(token_ids_T)} tokens and at most {limit} "
            "fit; raise data.max_prompt_tokens (below the model's context) or set data.overlong_prompts = 'skip'"
        )
    return len(token_ids_T) <= limit


def left_out(source: ProblemSource, option: str) -> list[str]:
    """Returns sentences about columns that were dropped."""
    if not isinstance(source, Table) or not source.left_out:
        return []
    names = ", ".join(f"`{name}` ({kind})" for name, kind in source.left_out.items())
    return [f"{option}: columns that hold values that are not JSON are left out: {names}"]


def shown_prompt(given: str, template: str, text: str) -> str:
    """Returns a sentence on a prompt and its template: the given one, or the one that `auto` chose."""
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN * 2 // 3]} ... {text[-_SHOWN // 3 :]}"
    found = f"data.template = {given!r}" + (f" is {template!r}" if given == AUTO else "")
    return f"{found}; the first prompt: {text!r}"


def check_template(
    config: DataConfig, tokenizer: Tokenizer, tools: Sequence[object] = (), *, for_agent: bool = False
) -> None:
    """Raises ConfigError if settings or tools do not fit the kind of template."""
    of_chats = ("system",) if for_agent else ("system", "template_arguments", "date")
    for name in of_chats if config.template != CHAT else ():
        if value := getattr(config, name):
            raise ConfigError(
                f"data.{name} = {value!r} is for chat templates, and data.template = {config.template!r} is none; use "
                "'chat', or leave it out"
            )
    if config.date and not tokenizer.tells_date:
        cause = f"the chat template of {tokenizer.folder} does not use a date"
        raise ConfigError(f"data.date = {config.date!r}: {cause}; leave it out")
    if tools and config.template != CHAT:
        raise ConfigError(f"data.template = {config.template!r} cannot describe tools to the policy; use 'chat'")
    if tools and not tokenizer.tool_format:
        raise ConfigError(
            f"the chat template of {tokenizer.folder} writes tools neither as Qwen nor as Llama; use such a model"
        )
    for number, example in enumerate(config.examples):
        if not {"question", "answer"} <= example.keys():
            raise ConfigError(f"data.examples: number {number + 1} needs `question` and `answer`; it has {[*example]}")


def render(row: ProblemRow, config: DataConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the prompt text of `row` for resolved settings. Raises ConfigError."""
    if config.template == CHAT:
        head, own = conversation(row, config)
        return tokenizer.apply_chat_template(head + own, tools=tools)
    return examples_text(config) + render_text(row, config.template)


def examples_text(config: DataConfig) -> str:
    """Returns the text of `data.examples` for a text template. Raises ConfigError."""
    before = ""
    for one in config.examples:
        shown = ProblemRow(
            problem_id="of data.examples", question=one["question"], answer=one["answer"], metadata=dict(one)
        )
        before += f"{fill_template(shown, config.template)}{shown.answer}\n\n"
    return before


def render_text(row: ProblemRow, template: str) -> str:
    """Fills the template from a row with one question. Raises ConfigError for conversations."""
    if len(row.messages) > 1:
        raise ConfigError(
            f"{row.name} is a conversation of {len(row.messages)} messages, and data.template = "
            f"{template!r} writes one question; use 'chat' with a model that has a chat template"
        )
    return fill_template(row, template)


def conversation(row: ProblemRow, config: DataConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the messages of a row's prompt: system message and examples, then the row's messages. Raises
    ConfigError."""
    messages = list(row.messages) or [{"role": "user", "content": row.question}]
    head = [{"role": "system", "content": config.system}] if config.system else []
    if messages[0]["role"] == "system":
        if head:
            raise ConfigError(f"{row.name} has its own message of role system; leave data.system out")
        head = [messages.pop(0)]
    for example in config.examples:
        head.append({"role": "user", "content": example["question"]})
        head.append({"role": "assistant", "content": example["answer"]})
    return head, messages


def fill_template(row: ProblemRow, template: str) -> str:
    """Returns `template` with its `{field}` placeholders filled from `row`.

    Raises:
        ConfigError: the template is malformed, has no field, or has a field that the row lacks.
    """
    try:
        places = [place for place in Formatter().parse(template) if place[1] is not None]
    except ValueError as error:
        raise ConfigError(f"data.template = {template!r} is malformed: {error}; write {{{{ for a plain brace") from None
    if not places:
        raise ConfigError(
            f"data.template = {template!r} has no {{field}}, so all prompts would be equal; use {{question}}"
        )
    for _, name, spec, conversion in places:
        if spec or conversion or name not in row.fields:
            raise ConfigError(
                f"data.template = {template!r}: {row.name} has no field {name!r}; "
                f"known: {', '.join(sorted(row.fields))}"
            )
    return template.format_map(row.fields)


def _prompt(row: ProblemRow, text: str, token_ids_T: np.ndarray, label: str) -> Prompt:
    name = f"{label}/{row.problem_id}" if label else row.problem_id
    return Prompt(
        prompt_id=name, text=text, token_ids_T=token_ids_T, answer=row.answer, metadata=row.metadata, source=label
    )
