"""Rows of a source -> rendered, tokenized prompts.

Shape suffix: T tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

import numpy as np

from llamarl.config.errors import ConfigError
from llamarl.config.ref import build
from llamarl.config.schema import DataConfig
from llamarl.data.sources import ProblemRow, ProblemSource
from llamarl.data.tokenizer import Tokenizer
from llamarl.types import Prompt

SOURCES = "llamarl.data.sources"
CHAT = "chat"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of one source, in its order."""

    prompts: tuple[Prompt, ...]
    """Prompts of the set, at least one."""
    num_overlong: int
    """Rows skipped because their prompt has more tokens than allowed."""


def load_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    context_tokens: int,
    which: Literal["train", "eval"] = "train",
    tools: Sequence[Mapping[str, Any]] = (),
    most: int | None = None,
) -> PromptSet:
    """Prompts of `config.train` or `config.eval`.

    Args:
        config: sources, template and length policy.
        tokenizer: of the policy model.
        context_tokens: the model's longest sequence; a prompt leaves room for at least one more token.
        which: the source to load.
        tools: JSON schemas of what the policy may call, for the chat template.
        most: rows that are read, the first; None: all.

    Raises:
        ConfigError: the source or the template is wrong, a prompt is overlong under `refuse`, or every prompt is.
    """
    ref = config.train if which == "train" else config.eval
    if ref is None:
        raise ConfigError(
            "data.eval is not set; name a held-out source, for example {name = 'jsonl', path = 'test.jsonl'}"
        )
    source: ProblemSource = build(ref, SOURCES, f"data.{which}")
    rows = [source[i] for i in range(len(source))[:most]]
    if tools:
        _check_tools(config, tokenizer)
    texts = [render(row, config.template, tokenizer, tools) for row in rows]
    # A chat template writes its own BOS; a plain text gets the one that the model saw in pretraining.
    token_ids = tokenizer.encode_batch(texts, add_special_tokens=config.template != CHAT)
    limit = min(config.max_prompt_tokens, context_tokens - 1)
    prompts = []
    for row, text, token_ids_T in zip(rows, texts, token_ids, strict=True):
        if len(token_ids_T) == 0:
            raise ConfigError(f"data.{which}: the prompt of row {row.problem_id!r} has no tokens; check data.template")
        if len(token_ids_T) <= limit:
            prompts.append(_prompt(row, text, token_ids_T))
        elif config.overlong_prompts == "refuse":
            raise ConfigError(
                f"data.{which}: the prompt of row {row.problem_id!r} has {len(token_ids_T)} tokens and at most {limit} "
                "fit; raise data.max_prompt_tokens (below the model's context) or set data.overlong_prompts = 'skip'"
            )
    if not prompts:
        raise ConfigError(
            f"data.{which}: each of the {len(rows)} prompts has more than {limit} tokens; raise data.max_prompt_tokens "
            f"(it is {config.max_prompt_tokens}, the model's context {context_tokens})"
        )
    return PromptSet(prompts=tuple(prompts), num_overlong=len(rows) - len(prompts))


def _check_tools(config: DataConfig, tokenizer: Tokenizer) -> None:
    if config.template != CHAT:
        raise ConfigError(f"data.template = {config.template!r} cannot tell the policy of its tools; use 'chat'")
    if not tokenizer.tool_format:
        raise ConfigError(
            f"the chat template of {tokenizer.folder} writes tools neither as Qwen's nor as Llama's; use such a model"
        )


def render(row: ProblemRow, template: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The prompt text of `row`: `fill_template`, or one user message under the `chat` template. Raises ConfigError."""
    if template == CHAT:
        return tokenizer.apply_chat_template([{"role": "user", "content": row.question}], tools=tools)
    return fill_template(row, template)


def fill_template(row: ProblemRow, template: str) -> str:
    """`template` with its `{field}` places filled in from `row`.

    Raises:
        ConfigError: the template is malformed, names no field, or names one that the row lacks.
    """
    try:
        places = [place for place in Formatter().parse(template) if place[1] is not None]
    except ValueError as error:
        raise ConfigError(f"data.template = {template!r} is malformed: {error}; write {{{{ for a plain brace") from None
    if not places:
        raise ConfigError(
            f"data.template = {template!r} has no {{field}}, so all prompts would be alike; use {{question}}"
        )
    for _, name, spec, conversion in places:
        if spec or conversion or name not in row.fields:
            raise ConfigError(
                f"data.template = {template!r}: row {row.problem_id!r} has no field {name!r} for it; "
                f"known: {', '.join(sorted(row.fields))}"
            )
    return template.format_map(row.fields)


def _prompt(row: ProblemRow, text: str, token_ids_T: np.ndarray) -> Prompt:
    return Prompt(
        prompt_id=row.problem_id, text=text, token_ids_T=token_ids_T, answer=row.answer, metadata=row.metadata
    )
