"""Text to tokens and back, from the files of a Hugging Face folder; chat templates; small tokenizers from scratch.

Shape suffix: T tokens of one text.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import tokenizers
from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamarl.config import ConfigError, read_json, read_text

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_Dicts = Sequence[Mapping[str, Any]]
SENTINEL = "\ufdd0turn\ufdd0"
"""Stands for what the policy wrote; no model's text holds it."""
_MOST_RENDER_S = 5.0
ToolFormat = Literal["qwen", "llama"]
PYTHON_TAG = "<|python_tag|>"
_FIX = "give a complete Hugging Face folder"


def tool_format(template: str) -> ToolFormat | None:
    """Format in which a chat template has tools called; None: in neither."""
    if "<tool_call>" in template:
        return "qwen"
    return "llama" if PYTHON_TAG in template or '"parameters"' in template else None


class Tokenizer:
    """The tokenizer of one Hugging Face folder. Thread-safe; texts never change it."""

    def __init__(self, folder: str | Path) -> None:
        """Reads `tokenizer.json`, `tokenizer_config.json` and, where present, `generation_config.json`.

        Raises:
            ConfigError: a file is missing or damaged, or no end-of-text token is named.
        """
        self.folder = Path(folder)
        if "model" not in read_json(self.folder / TOKENIZER_FILE, _FIX):
            raise ConfigError(f"{self.folder / TOKENIZER_FILE} holds no tokenizer `model`; save the tokenizer anew")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / TOKENIZER_FILE))
        except Exception as error:  # that library raises no other
            raise ConfigError(f"{self.folder / TOKENIZER_FILE} cannot be read: {error}; {_FIX}") from None
        self._config = read_json(self.folder / CONFIG_FILE, _FIX)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        """Tokens of `text`, int32 [T]. `add_special_tokens` adds what the folder's post-processor adds, such as BOS."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[np.ndarray]:
        """`encode` of each text, in parallel."""
        # Of the library's ways this one alone lets other threads work meanwhile.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, token_ids_T: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Text of tokens; bytes that are no UTF-8 (a character cut in half) become U+FFFD."""
        ids = token_ids_T.tolist() if isinstance(token_ids_T, np.ndarray) else list(token_ids_T)
        return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special)[0]  # `decode` holds up all threads

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id: the rows that an embedding needs. Raises ConfigError: two tokens have one
        id."""
        ids = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if len(set(ids)) < len(ids):
            raise ConfigError(f"{self.folder / TOKENIZER_FILE} gives two tokens one id; save the tokenizer anew")
        return max(ids) + 1

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: those of `generation_config.json` and the tokenizer's own `eos_token`.

        Raises:
            ConfigError: there is none, so no response would end before `max_new_tokens`.
        """
        ids: set[int] = set()
        if (self.folder / "generation_config.json").exists():
            named = read_json(self.folder / "generation_config.json", _FIX).get("eos_token_id")
            listed = named if isinstance(named, list) else [] if named is None else [named]
            if not all(isinstance(one, int) and 0 <= one < self.vocab_size for one in listed):
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
        """Id of the token that ends a response to be learnt: the tokenizer's own, as chat templates write it, if it has
        one. Raises ConfigError, as `eos_token_ids`."""
        ids, name = self.eos_token_ids, self._special_tokens.get("eos_token")
        own = self._tokenizer.token_to_id(name) if name else None
        return ids[0] if own is None else own

    def apply_chat_template(self, messages: _Dicts, add_generation_prompt: bool = True, tools: _Dicts = ()) -> str:
        """The text of a conversation, as the folder's own template writes it.

        Args:
            messages: `{"role": ..., "content": ...}` each.
            add_generation_prompt: end with the words that open the assistant's turn.
            tools: that may be called, as JSON schemas: `{"type": "function", "function": {...}}` each.

        Raises:
            ConfigError: the folder has no template, or it fails on these messages.
        """
        try:
            with ended_after(_MOST_RENDER_S, TimeoutError(f"it took over {_MOST_RENDER_S:g} s")):
                return self._chat_template.render(
                    messages=[dict(message) for message in messages],
                    tools=list(tools) or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
        except ConfigError:
            raise
        except Exception as error:  # the template is code of somebody else, in a sandbox
            cause = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise ConfigError(f"{self.folder}: the chat template refuses these messages: {cause}{error}") from None

    def after_turn(self, messages: _Dicts, *, without_stop: bool, tools: _Dicts = ()) -> str:
        """Text that the chat template writes between a turn of the assistant and the next one, with `messages` in
        between.

        Args:
            without_stop: the turn was ended by a stop token, which the template's text then does not repeat.

        Raises:
            ConfigError: as `apply_chat_template`, or the template does not write the turn as it is.
        """
        opening = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}]
        text = self.apply_chat_template([*opening, *messages], tools=tools)
        _, found, rest = text.rpartition(SENTINEL)
        if not found:
            raise ConfigError(f"{self.folder}: the chat template does not write an assistant's turn as it is")
        if without_stop:
            stop = next((one for one in map(self._text_of, self.eos_token_ids) if rest.startswith(one)), "")
            rest = rest.removeprefix(stop)
        return rest

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or "\0"

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        tokens = {}
        for name in SPECIAL_TOKEN_NAMES:
            token = self._config.get(name)
            if token is not None:  # written plainly or as a serialized AddedToken
                tokens[name] = token["content"] if isinstance(token, dict) and "content" in token else token
                if not isinstance(tokens[name], str):
                    raise ConfigError(f"{self.folder / CONFIG_FILE}: {name} = {token!r} is no text; {_FIX}")
        return tokens

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format in which the chat template has tools called; None: it knows of none, or there is no template."""
        return tool_format(self._template_text or "")

    @cached_property
    def _template_text(self) -> str | None:
        file = self.folder / "chat_template.jinja"
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
        try:
            return _chat_environment().from_string(self._template_text)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.folder}: line {error.lineno} of the chat template is malformed: {error}"
            ) from None


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raises ConfigError when the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > model_vocab_size:
        raise ConfigError(
            f"the tokenizer in {tokenizer.folder} has {tokenizer.vocab_size} tokens and the model's vocab_size is "
            f"{model_vocab_size}; use the tokenizer that the model was trained with"
        )


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text in some templates; here it marks nothing."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face chat templates are written for: templates are untrusted, hence the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    # Jinja's own `tojson` escapes HTML, which chat templates do not want.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": time.strftime}
    environment.globals.update(helpers)
    return environment


@contextmanager
def ended_after(limit_s: float, error: Exception) -> Iterator[None]:
    """Raises `error` in what takes longer; in the main thread alone, where a run is prepared."""

    def end(*_: object) -> NoReturn:
        raise error

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, start_s = signal.signal(signal.SIGALRM, end), time.monotonic()
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:  # somebody around this may have a limit, too
        left_s = max(outer_s - (time.monotonic() - start_s), 1e-3) if outer_s else 0.0
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
