"""OpenAI's bodies: what a call asks for, checked; and what it is answered. No HTTP, no torch.

What would change an answer and is not there is refused, by name. Log-probabilities are those of the distribution that
was sampled.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llamarl.data.tokenizer import Tokenizer
from llamarl.types import Rollout

MAX_TEXT = 1 << 22
"""Characters of a prompt; more could not be a context."""
Json = dict[str, Any]


class Refused(Exception):
    """A call that is not answered, as OpenAI's clients read it."""

    code: str | None = None

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind

    @property
    def body(self) -> Json:
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.code}}


class OutOfTokens(Refused):
    """There is no room for an answer; the code is the one by which OpenAI's clients know that."""

    code = "context_length_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class Call(BaseModel):
    """What both kinds of calls have. Options that are None are as if they were not there."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    stream: bool = False
    stream_options: dict[str, bool] | None = None
    n: Literal[1] | None = None
    user: str | None = None
    """Changes no answer."""

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def drawn_by(self) -> dict[str, Any]:
        """How tokens are to be drawn, where it is said."""
        said = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return {
            name: 0 if name == "top_k" and value == -1 else value for name, value in said.items() if value is not None
        }


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Json] | None = None
    tool_calls: list[Json] | None = None


class ChatCall(Call):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None


class CompletionCall(Call):
    """`/v1/completions`."""

    prompt: (
        Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    )
    logprobs: Literal[0, 1] | bool | None = None


C = TypeVar("C", bound=Call)


def read(kind: type[C], body: Any) -> C:
    """Raises Refused."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        said = "is not supported; leave it out" if first["type"] == "extra_forbidden" else first["msg"]
        raise Refused(400, f"{place} = {first['input']!r:.100}: {said}") from None


def plain(message: Message) -> Json:
    """As a chat template reads it: text, and calls whose arguments are objects."""
    content = message.content
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise Refused(400, "messages.content: only text is read")
        content = "".join(str(part.get("text", "")) for part in content)
    found = {**(message.model_extra or {}), "role": message.role, "content": content or ""}
    if message.tool_calls:
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
            for call in message.tool_calls
            if isinstance(call.get("function"), dict)
        ]
    return found


def canonical(messages: list[Json], tools: list[Json] | None) -> str:
    """Equal for conversations that mean the same, however a client writes them. Of `plain` messages."""
    said = [
        [
            one["role"],
            one["content"],
            [[call["function"].get("name"), call["function"]["arguments"]] for call in one.get("tool_calls", ())],
        ]
        for one in messages
    ]
    return json.dumps([said, tools or []], sort_keys=True)


def _arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments


def head(kind: str, model: str, prompt_T: np.ndarray, *, has_ids: bool) -> Json:
    """What an answer begins with. `kind`: `chat.completion` or `text_completion`."""
    found = {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }
    return found | ({"prompt_token_ids": prompt_T.tolist()} if has_ids else {})


def answer(begun: Json, choice: Json, prompt_T: np.ndarray, rollout: Rollout) -> Json:
    """The whole of it, which began with `begun`."""
    num_prompt, num = len(prompt_T), rollout.num_tokens
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}
    if prompt_ids := begun.get("prompt_token_ids"):
        choice = choice | {"token_ids": rollout.token_ids_T.tolist(), "prompt_token_ids": prompt_ids}
    return begun | {"choices": [{"index": 0, **choice}], "usage": usage}


def wants_logprobs(call: Call) -> bool:
    """0 asks for those of the tokens alone, which are all that there are."""
    asked = getattr(call, "logprobs", None)
    return asked is not None and asked is not False


def logprobs(tokenizer: Tokenizer, rollout: Rollout, *, is_chat: bool, start: int = 0, offset: int = 0) -> Json:
    """Of each token from `start` on, whose text begins at character `offset`."""
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
