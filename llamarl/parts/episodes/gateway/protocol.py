"""OpenAI's request bodies, checked, and response bodies. No HTTP, no torch.

Unsupported options that would change an answer are refused by name. Log-probabilities are those of the sampling
distribution.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

import json
import reprlib
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import xxhash
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic import model_validator as validator
from pydantic_core import from_json

from llamarl.data.tokenizer import Tokenizer
from llamarl.types import Rollout

MAX_MESSAGES, MAX_TOOLS, MAX_CHOICES, MAX_PROMPTS, MAX_TOP = 2048, 1024, 128, 1024, 20
_UNREAD = frozenset(("user", "metadata", "safety_identifier", "prompt_cache_key"))
"""Options that do not change an answer."""
_CHANGES_NOTHING: dict[str, Any] = {
    "add_generation_prompt": True, "best_of": 1, "chat_template_kwargs": {}, "continue_final_message": False,
    "echo": False, "frequency_penalty": 0, "ignore_eos": False, "logit_bias": {}, "min_tokens": 0,
    "modalities": ["text"], "parallel_tool_calls": True, "presence_penalty": 0, "repetition_penalty": 1,
    "response_format": {"type": "text"}, "service_tier": "auto", "skip_special_tokens": True, "stop_token_ids": [],
    "store": False, "suffix": "", "top_logprobs": 0,
}  # fmt: skip
"""Unsupported options, with the value that disables them."""
_SAID = reprlib.Repr()
_SAID.maxstring = _SAID.maxother = 100
INVALID = "invalid_request_error"
Json = dict[str, Any]


TOO_LONG = "context_length_exceeded"


class CallRefused(Exception):
    """A refused call, in the form that OpenAI's clients expect."""

    def __init__(self, status: int, message: str, kind: str = INVALID, *, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    @property
    def body(self) -> Json:
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param or None, "code": self.code or None}
        }


class OutOfTokens(CallRefused):
    """There are no tokens left for an answer. OpenAI's clients know the error code."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message, code=TOO_LONG)


class _Body(BaseModel):
    """A request body. Unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @validator(mode="before")
    @classmethod
    def _said(cls, said: Any) -> Any:
        """Removes options that are None."""
        return {name: value for name, value in said.items() if value is not None} if isinstance(said, dict) else said

    @property
    def plain(self) -> Json:
        """Returns the message for a chat template: a dict without absent fields."""
        return self.model_dump(exclude_none=True)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ModelCall(_Body):
    """Fields of both chat calls and text completions."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31), AfterValidator(lambda top_k: max(top_k, 0))] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[_Stop], Field(max_length=16, fail_fast=True), BeforeValidator(_listed)] = []
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer includes log-probabilities."""
        raise NotImplementedError

    @property
    def drawn_by(self) -> dict[str, Any]:
        """Sampling parameters of the call, by name."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _text(content: Any) -> Any:
    """Returns the text of a message's content. Joins its parts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise ValueError("only text is read, in parts of type `text` with a `text` each")
    return "".join(map(str, texts))


def _arguments(arguments: Any) -> Any:
    try:
        return from_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


class _Called(_Body):
    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments)] = Field(default_factory=dict)


class _MessageToolCall(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: _Called


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_MessageToolCall], Field(fail_fast=True)] | None = None


class _NamedFunction(_Body):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: Json | None = None
    strict: Annotated[Literal[False], Field(exclude=True)] = False


class _Tool(_Body):
    type: Literal["function"] = "function"
    function: _NamedFunction


class ChatCall(ModelCall):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    """Requests log-probabilities of the sampled tokens. Prompt tokens have none."""

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def conversation(self) -> tuple[list[Json], list[Json]]:
        """Returns messages and tools for a chat template: text, and calls whose arguments are objects."""
        tools = [] if self.tool_choice == "none" else self.tools
        return [one.plain for one in self.messages], [one.plain for one in tools]


def _asked(logprobs: Any) -> Any:
    """Converts True and False to 0 and None."""
    return {True: 0, False: None}[logprobs] if isinstance(logprobs, bool) else logprobs


_HIDDEN = "", " ", "  "
"""Union tags that error paths do not show."""


_Token = Annotated[int, Field(ge=0, lt=1 << 31)]
_Text = Annotated[str, Tag(_HIDDEN[0])]
_Tokens = Annotated[list[_Token], Field(min_length=1, fail_fast=True), Tag(_HIDDEN[1])]
_Prompt = Annotated[_Text | _Tokens, Discriminator(lambda prompt: _HIDDEN[isinstance(prompt, list)])]
_Prompts = Annotated[list[_Prompt], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag(_HIDDEN[2])]


def _which(prompt: Any) -> str:
    """Returns the union tag of a prompt: a text, token ids, or a list of them."""
    if not isinstance(prompt, list):
        return _HIDDEN[0]
    return _HIDDEN[2 if prompt and isinstance(prompt[0], str | list) else 1]


class CompletionCall(ModelCall):
    """`/v1/completions`."""

    prompt: Annotated[_Text | _Tokens | _Prompts, Discriminator(_which)]
    """A text, token ids, or a list of them. Each prompt gets `n` answers."""
    max_tokens: int | None = Field(None, ge=0)
    """Maximum tokens. 0 samples nothing, for use with `echo`."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP), BeforeValidator(_asked)] = None
    """Requests log-probabilities, and those of this many most likely tokens at each position."""
    echo: bool = False
    """Includes the prompt in the answer."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, at least one."""
        given: Any = self.prompt
        return given if _which(given) == _HIDDEN[2] else [given]

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def check(self, *, has_scores: bool) -> None:
        """Raises CallRefused if options contradict each other, or need scores that the endpoint does not provide."""
        if self.limit == 0 and not self.echo:
            raise CallRefused(400, "max_tokens = 0 is for echo = true; ask for 1 at least", param="max_tokens")
        if self.stream and self.echo:
            raise CallRefused(400, "echo = true is not streamed; leave stream out", param="echo")
        if self.stream and (self.logprobs or 0) > 1:
            said = f"logprobs = {self.logprobs}: alternatives are not streamed; leave stream out, or ask for 1"
            raise CallRefused(400, said, param="logprobs")
        if not has_scores and (self.logprobs or 0) + (self.echo and self.wants_logprobs) > 1:
            said = "this endpoint has log-probabilities of sampled tokens only; leave echo out, or ask for 0"
            raise CallRefused(400, f"logprobs = {self.logprobs}: {said}", param="logprobs")
        if len(self.prompts) * self.n > MAX_PROMPTS:
            said = f"n = {self.n} for {len(self.prompts)} prompts: a call has {MAX_PROMPTS} answers at most"
            raise CallRefused(400, said, param="n")


C = TypeVar("C", bound=ModelCall)


def parsed(data: bytes | bytearray) -> Json:
    """Returns a parsed body. Raises CallRefused."""
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise CallRefused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise CallRefused(400, "the body is not a JSON object")
    return body


def read(kind: type[C], body: Json) -> C:
    """Validates a body. Raises CallRefused."""
    said = {name: value for name, value in body.items() if name not in _UNREAD and value != _CHANGES_NOTHING.get(name)}
    try:
        call = kind.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        shown = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part not in _HIDDEN]
        place, why = "".join(shown).removeprefix("."), first["msg"].removeprefix("Value error, ")
        why = "is not supported; leave it out" if first["type"] == "extra_forbidden" else why
        raise CallRefused(400, f"{place} = {_SAID.repr(first['input'])}: {why}", param=place) from None
    if call.stream_options and not call.stream:
        raise CallRefused(400, "stream_options without stream = true: leave it out", param="stream_options")
    return call


def conversations(messages: Sequence[Json], tools: Sequence[Json]) -> list[bytes]:
    """Returns a digest of each prefix of a conversation, independent of how a client formats it. Takes the result of
    `ChatCall.conversation`."""
    digest, found = xxhash.xxh3_128(json.dumps(tools, sort_keys=True).encode()), list[bytes]()
    for one in messages:
        called = [[call["function"]["name"], call["function"]["arguments"]] for call in one.get("tool_calls", ())]
        digest.update(json.dumps([one["role"], one["content"], called], sort_keys=True).encode())
        found.append(digest.digest())
    return found


def head(kind: str, model: str) -> Json:
    """Returns the first fields of each answer and event. `kind`: `chat.completion` or `text_completion`."""
    name = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{name}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def answer(
    begun: Json, choices: Sequence[Json], prompts: Sequence[np.ndarray], rollouts: Sequence[Rollout], *, has_ids: bool
) -> Json:
    """Returns the whole answer, which begins with `begun`. The choices of each prompt are consecutive."""
    num_prompt, num = sum(map(len, prompts)), sum(rollout.num_tokens for rollout in rollouts)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}
    found, each = [{"index": number, **choice} for number, choice in enumerate(choices)], len(choices) // len(prompts)
    for number, rollout in enumerate(rollouts) if has_ids else ():
        prompt_ids = prompts[number // each].tolist()
        found[number] |= {"token_ids": rollout.token_ids_T.tolist(), "prompt_token_ids": prompt_ids}
    ids = {"prompt_token_ids": prompts[0].tolist()} if has_ids and len(prompts) == 1 else {}
    return begun | ids | {"choices": found, "usage": usage}


def logprobs(tokenizer: Tokenizer, rollout: Rollout, *, is_chat: bool, start: int = 0, offset: int = 0) -> Json:
    """Returns log-probabilities of tokens from `start` on, in OpenAI's format. The text of the first is at character
    `offset`."""
    ids, logprobs = rollout.token_ids_T[start:].tolist(), rollout.behavior_logprobs_T[start:].tolist()
    texts = [tokenizer.decode([token], skip_special=False) for token in ids]
    if is_chat:
        tokens = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
        return {"content": tokens}
    starts = offset + np.cumsum([0, *map(len, texts)])[:-1]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": starts.tolist()}


class Scores(NamedTuple):
    """Log-probabilities of the tokens of a sequence after the first, and of the most likely tokens at their
    positions."""

    logprobs_T: np.ndarray
    """float32 [T - 1]."""
    top_ids_T_K: np.ndarray
    """int [T - 1, K]."""
    top_logprobs_T_K: np.ndarray
    """float32 [T - 1, K]."""


def text_logprobs(
    tokenizer: Tokenizer, prompt_T: np.ndarray, rollout: Rollout, scores: Scores, *, echo: bool, has_top: bool
) -> Json:
    """Returns log-probabilities of a text completion in OpenAI's format, with `echo` preceded by those of its prompt.
    Sampled tokens have their log-probability under the sampling distribution."""
    first = 0 if echo else len(prompt_T)
    ids = np.concatenate([prompt_T, rollout.token_ids_T])[first:].tolist()
    own: list[float | None] = [None, *scores.logprobs_T[: len(prompt_T) - 1].tolist()][first:]
    own += rollout.behavior_logprobs_T.tolist()
    texts, tops = _texts(tokenizer, ids), list[Json | None]()
    for place, (text, logprob) in enumerate(zip(texts, own, strict=True), start=first - 1):
        if place < 0 or logprob is None:
            tops.append(None)
            continue
        found = dict[str, float]()
        token, found = ids[place + 1 - first], dict[str, tuple[int, float]]()
        likeliest, values = scores.top_ids_T_K[place].tolist(), scores.top_logprobs_T_K[place].tolist()
        for other, name, value in zip(likeliest, _texts(tokenizer, likeliest), values, strict=True):
            found.setdefault(_key(other, name), (other, value))
        if found.get(key := _key(token, text), (token,))[0] == token:  # the sampled value has priority
            found[key] = token, logprob
        tops.append({name: value for name, (_, value) in found.items()})
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    return {
        "tokens": texts, "token_logprobs": own, "top_logprobs": tops if has_top else None,
        "text_offset": starts.tolist(),
    }  # fmt: skip


def _key(token_id: int, text: str) -> str:
    """Returns a key for a token among others at its position: its text, or its id if it is a part of a character."""
    return f"token_id:{token_id}" if "\ufffd" in text else text


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special=False) for token in ids]
