"""Tokenizers and chat templates of Hugging Face folders: text to tokens and back.

Shape suffix: T tokens of one text.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import tokenizers
from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamarl.config import ConfigError, read_json, read_text
from llamarl.config.hub import folder_of, missing_folder

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_Dicts = Sequence[Mapping[str, Any]]
SENTINEL = "\ufdd0turn\ufdd0"
"""Placeholder for text of the policy. It appears in no model's text."""
_MOST_RENDER_S = 5.0
_LONGEST_S = 1e8
"""Longest possible time of an alarm, three years."""
ToolFormat = Literal["qwen", "qwen_coder", "llama", "gpt_oss"]
PYTHON_TAG = "<|python_tag|>"
_LAST_TAG = re.compile(r"(<[^<>]+>|\[[^][]+])(\s*)$")
_FIX = "give a complete Hugging Face folder"


def tool_format(template: str) -> ToolFormat | None:
    """Returns the format of tool calls in a chat template. None means that it has none of these formats."""
    if "<tool_call>" in template:
        return "qwen_coder" if "<function=" in template else "qwen"
    if "<|channel|>" in template and "functions" in template:
        return "gpt_oss"
    return "llama" if PYTHON_TAG in template or '"parameters"' in template else None


class WrittenTurn(NamedTuple):
    """An assistant turn of a conversation, as the chat template writes it."""

    given: str
    """Text since the previous turn, which is the prompt of this turn."""
    said: str
    """Text of the turn."""
    end_id: int
    """Token that ends the turn: the template's, or `eos_token_id` if the text has none there."""
    after: int
    """Index in the conversation's text after that token."""


class Tokenizer:
    """The tokenizer of a Hugging Face folder. Thread-safe; encoding does not change it."""

    def __init__(self, folder: str | Path, arguments: Mapping[str, Any] | None = None, today: str = "") -> None:
        """Reads `tokenizer.json`, `tokenizer_config.json` and, if present, `generation_config.json`.

        Args:
            folder: Hugging Face folder.
            arguments: of the chat template, as `data.template_arguments`.
            today: date for the chat template, such as `2026-07-26`. Empty means the current date.

        Raises:
            ConfigError: a file is missing or damaged, or no end-of-text token is named.
        """
        self.folder = folder_of(folder)
        if not self.folder.is_dir():
            raise ConfigError(missing_folder(folder))
        if (self.folder / "checkpoints").is_dir() and not (self.folder / TOKENIZER_FILE).exists():
            raise ConfigError(
                f"{folder} is the folder of a run; name its export, {self.folder / 'export'}, which `llamarl export "
                f"{folder}` writes"
            )
        self._arguments, self._today = dict(arguments or {}), today
        if "model" not in read_json(self.folder / TOKENIZER_FILE, _FIX):
            raise ConfigError(f"{self.folder / TOKENIZER_FILE} has no tokenizer `model`; save the tokenizer again")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / TOKENIZER_FILE))
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(f"{self.folder / TOKENIZER_FILE} cannot be read: {error}; {_FIX}") from None
        self._config = read_json(self.folder / CONFIG_FILE, _FIX)
        self._template_text = self._read_template()  # now: `serve` deletes the exported folder later
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        """Returns the tokens of `text`, int32 [T]. `add_special_tokens` adds the post-processor's tokens, such as
        BOS."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[np.ndarray]:
        """Encodes each text, in parallel."""
        # The only method of the library that releases the interpreter lock.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_prompts(self, texts: Sequence[str], *, is_chat: bool) -> list[np.ndarray]:
        """Returns the tokens of each prompt, int32 [T]. Tokens that the post-processor adds in front, such as BOS,
        appear once, even if the text already has them, as in most chat templates."""
        first, rows_T = self.first_ids, self.encode_batch(texts, add_special_tokens=not is_chat)
        if not len(first):
            return rows_T

        def begins(row_T: np.ndarray) -> bool:
            return row_T[: len(first)].tolist() == first.tolist()

        if is_chat:
            return [row_T if begins(row_T) else np.append(first, row_T) for row_T in rows_T]
        return [row_T[len(first) :] if begins(row_T[len(first) :]) else row_T for row_T in rows_T]

    @cached_property
    def first_ids(self) -> np.ndarray:
        """Tokens that the folder's post-processor adds in front of a text, such as BOS, int32 [T]."""
        plain_T, whole_T = self.encode("a"), self.encode("a", add_special_tokens=True)
        where = next(at for at in range(len(whole_T)) if np.array_equal(whole_T[at : at + len(plain_T)], plain_T))
        return whole_T[:where]

    def decode(self, token_ids_T: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Returns the text of tokens. Bytes that are not UTF-8 (a part of a character) become U+FFFD."""
        ids = token_ids_T.tolist() if isinstance(token_ids_T, np.ndarray) else list(token_ids_T)
        return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special)[0]  # `decode` blocks all threads

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id: the rows that an embedding needs. Raises ConfigError if two tokens share
        an id."""
        ids = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if len(set(ids)) < len(ids):
            raise ConfigError(f"{self.folder / TOKENIZER_FILE} gives two tokens the same id; save the tokenizer again")
        return max(ids) + 1

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: those of `generation_config.json` and the tokenizer's `eos_token`.

        Raises:
            ConfigError: there is none, so no response would end before `max_new_tokens`.
        """
        ids: set[int] = set()
        if (self.folder / "generation_config.json").exists():
            named = read_json(self.folder / "generation_config.json", _FIX).get("eos_token_id")
            listed = named if isinstance(named, list) else [] if named is None else [named]
            if not all(isinstance(one, int) and one >= 0 and self._tokenizer.id_to_token(one) for one in listed):
                raise ConfigError(f"{self.folder / 'generation_config.json'}: eos_token_id = {named!r}; {_FIX}")
            ids.update(listed)
        if eos := self._special_tokens.get("eos_token"):
            own = self._tokenizer.token_to_id(eos)
            if own is None:
                raise ConfigError(f"{self.folder / CONFIG_FILE}: eos_token = {eos!r} is not in the vocabulary")
            ids.add(own)
        if not ids:
            raise ConfigError(f"{self.folder / CONFIG_FILE} names no `eos_token`; name the token that ends a response")
        return tuple(sorted(ids))

    @property
    def eos_token_id(self) -> int:
        """Token that ends a response in training data: the tokenizer's `eos_token`, as chat templates write it, if it
        has one. Raises ConfigError, as `eos_token_ids`."""
        ids, name = self.eos_token_ids, self._special_tokens.get("eos_token")
        own = self._tokenizer.token_to_id(name) if name else None
        return ids[0] if own is None else own

    def apply_chat_template(self, messages: _Dicts, add_generation_prompt: bool = True, tools: _Dicts = ()) -> str:
        """Renders a conversation with the folder's chat template.

        Args:
            messages: `{"role": ..., "content": ...}` each.
            add_generation_prompt: end with the text that opens the assistant's turn.
            tools: available functions, as JSON schemas: `{"type": "function", "function": {...}}` each.

        Raises:
            ConfigError: the folder has no template, or the template fails on these messages.
        """
        try:
            with ended_after(_MOST_RENDER_S, TimeoutError(f"it took over {_MOST_RENDER_S:g} s")):
                return self._chat_template.render(
                    messages=[dict(message) for message in messages],
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens | self._arguments,
                )
        except ConfigError:
            raise
        except Exception as error:  # the template is foreign code, in a sandbox
            cause = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            said = f"{self.folder}: the chat template refuses these messages: {cause}{error}"
            raise ConfigError(said + self._without_system(messages, add_generation_prompt, tools)) from None

    def _without_system(self, messages: _Dicts, *options: Any) -> str:
        """Returns a fix for a template that refuses only the role `system`. Empty means that there is another cause."""
        if messages and messages[0].get("role") == "system":
            with suppress(ConfigError):
                self.apply_chat_template(messages[1:], *options)
                return "; it accepts them without role 'system', so put that message into the question"
        return ""

    def after_turn(self, messages: _Dicts, *, without_stop: bool, tools: _Dicts = ()) -> str:
        """Returns the text that the chat template writes between an assistant turn and the next one, with `messages` in
        between.

        Args:
            without_stop: the turn ended with a stop token, which is left out of the text.

        Raises:
            ConfigError: as `apply_chat_template`, or the template does not write the turn verbatim.
        """
        opening = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}]
        text = self.apply_chat_template([*opening, *messages], tools=tools)
        _, found, rest = text.rpartition(SENTINEL)
        if not found:
            raise ConfigError(f"{self.folder}: the chat template does not write an assistant's turn verbatim")
        if without_stop:
            stop = next((one for one in map(self._text_of, self.eos_token_ids) if rest.startswith(one)), "")
            rest = rest.removeprefix(stop)
        return rest

    def turn(self, messages: _Dicts, number: int, whole: str, place: int = 0) -> WrittenTurn:
        """Returns the assistant turn that is message `number`.

        The last reply of a conversation is complete: if the template drops its reasoning, as in earlier turns, its
        content follows the prompt of the turn.

        Args:
            messages: the conversation.
            number: index of the message.
            whole: text of the conversation, as the template writes it.
            place: index in `whole` after the previous turn.

        Raises:
            ConfigError: as `apply_chat_template`, or the template does not write the turn verbatim.
        """
        asking, content = self.apply_chat_template(messages[:number]), messages[number]["content"]
        has_calls = bool(messages[number].get("tool_calls"))
        if has_calls and not content:  # with content, some templates add a line break
            first = last = len(asking) if whole.startswith(asking) else -1
        else:
            marked = [{**one, "content": SENTINEL} if at == number else one for at, one in enumerate(messages)]
            head, found, tail = self.apply_chat_template(marked, add_generation_prompt=False).partition(SENTINEL)
            # Some templates leave the text before the last turn out of earlier turns.
            first = next((len(text) for text in (asking, head) if whole.startswith(text)), -1)
            last = len(whole) - len(tail) if found and whole.endswith(tail) else -1
            is_whole = number + 1 < len(messages) or _dense(content) in _dense(whole[first:last])
            if 0 <= first <= last and not is_whole:
                first = len(asking) if asking.startswith(whole[:place]) else -1
                whole = asking + _unsaid(asking, content) + tail
                last = len(whole) - len(tail)
        stops = {self._text_of(one): one for one in self.eos_token_ids}
        places = {at: text for text in stops if (at := whole.find(text, last)) >= 0}
        at = min(places, default=-1)
        if not place <= first <= last or (has_calls and at < 0):
            raise ConfigError(
                f"{self.folder}: the chat template does not write message {number + 1}, an assistant's, verbatim, so "
                "the text to train on cannot be found; use another template"
            )
        if at == last or has_calls:  # calls follow the content
            return WrittenTurn(whole[place:first], whole[first:at], stops[places[at]], at + len(places[at]))
        return WrittenTurn(whole[place:first], whole[first:last], self.eos_token_id, last)

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or "\0"

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        tokens = {}
        for name in SPECIAL_TOKEN_NAMES:
            token = self._config.get(name)
            if token is not None:  # plain text or a serialized AddedToken
                tokens[name] = token["content"] if isinstance(token, dict) and "content" in token else token
                if not isinstance(tokens[name], str):
                    raise ConfigError(f"{self.folder / CONFIG_FILE}: {name} = {token!r} is not text; {_FIX}")
        return tokens

    @property
    def has_chat_template(self) -> bool:
        """Returns whether the folder has a chat template."""
        return bool(self._template_text)

    @property
    def template_text(self) -> str | None:
        """Text of the chat template; None means that there is none."""
        return self._template_text

    def with_template(self, text: str) -> Tokenizer:
        """Returns a copy with another chat template, without arguments."""
        other = copy(self)
        other.__dict__.pop("_chat_template", None)
        other._template_text, other._arguments = text, {}
        return other

    @property
    def tells_date(self) -> bool:
        """Returns whether the chat template uses today's date, so that prompts depend on the day."""
        return "strftime_now" in (self._template_text or "")

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of tool calls in the chat template. None means that it has no tools, or that there is no template."""
        return tool_format(self._template_text or "")

    def _read_template(self) -> str | None:
        file = self.folder / TEMPLATE_FILE
        template = read_text(file, _FIX) if file.exists() else self._config.get("chat_template")
        if isinstance(template, list):
            template = next((item["template"] for item in template if item["name"] == "default"), None)
        return template

    @cached_property
    def _chat_template(self) -> Template:
        if not self._template_text:
            raise ConfigError(
                f"{self.folder} has no chat template; set data.template to a text such as '{{question}}\\n' "
                "or use an instruction-tuned checkpoint"
            )
        for name in self._arguments:
            if name in {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKEN_NAMES}:
                raise ConfigError(f"data.template_arguments: every chat template gets {name!r} anyway; leave it out")
            if not re.search(rf"\b{re.escape(name)}\b", self._template_text):
                raise ConfigError(
                    f"data.template_arguments: the chat template of {self.folder} does not use {name!r}; leave it out"
                )
        try:
            return _chat_environment(self._today).from_string(self._template_text)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.folder}: line {error.lineno} of the chat template is malformed: {error}"
            ) from None


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raises ConfigError if the tokenizer has ids without an embedding in the model."""
    if tokenizer.vocab_size > model_vocab_size:
        raise ConfigError(
            f"the tokenizer in {tokenizer.folder} has {tokenizer.vocab_size} tokens and the model's vocab_size is "
            f"{model_vocab_size}; use the tokenizer that the model was trained with"
        )


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text in some templates. Here it is ignored."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared like this by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _chat_environment(today: str) -> ImmutableSandboxedEnvironment:
    """Returns the environment that Hugging Face chat templates expect, in a sandbox because templates are untrusted."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    # Jinja's `tojson` escapes HTML, which chat templates do not expect.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    now = date.fromisoformat(today).strftime if today else time.strftime
    helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": now}
    environment.globals.update(helpers)
    return environment


@contextmanager
def ended_after(limit_s: float, error: Exception) -> Iterator[None]:
    """Raises `error` in a block that takes longer. Only works in the main thread, where runs are prepared."""

    def end(*_: object) -> NoReturn:
        raise error

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, start_s = signal.signal(signal.SIGALRM, end), time.monotonic()
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, min(limit_s, _LONGEST_S))
    try:
        yield
    finally:  # an outer block may have a limit, too
        left_s = max(outer_s - (time.monotonic() - start_s), 1e-3) if outer_s else 0.0
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s)


def _dense(text: str) -> str:
    """Returns text without white space, which templates change."""
    return "".join(text.split())


def _unsaid(asking: str, content: str) -> str:
    """Returns content without its opening tag, such as `<think>`, if the prompt of the turn ends with that tag."""
    written = _LAST_TAG.search(asking)
    if written is None or not content.lstrip().startswith(written[1]):
        return content
    return content.lstrip().removeprefix(written[1]).removeprefix(written[2])


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
