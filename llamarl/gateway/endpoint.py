"""`Endpoint`: answers OpenAI's calls by whoever generates, and records them in their session. No HTTP, no torch.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamarl.config import ConfigError
from llamarl.data.chat import tool_calls
from llamarl.data.tokenizer import Tokenizer
from llamarl.gateway import protocol
from llamarl.gateway.protocol import Json, Refused
from llamarl.gateway.session import Session, Written
from llamarl.gateway.stream import CUT, Stream
from llamarl.types import FinishReason, Rollout, SamplingParams

More = Callable[[Rollout], None]
Generate = Callable[[np.ndarray, SamplingParams, More | None], Awaitable[Rollout]]
"""Samples after a prompt; what it answers holds the sampled tokens alone. It may tell what there is until then."""
Tell = Callable[[bytes], None]
"""Takes server-sent events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Of one session, or of nobody's."""

    tokenizer: Tokenizer
    model: str
    """What it is called."""
    generate: Generate
    sampling: SamplingParams
    """What a call does not say; `max_new_tokens` bounds all calls of a session together."""
    is_fixed: bool = False
    """Calls may not sample in another way: what they would teach would not be the policy's."""

    async def chat(self, session: Session, body: Any, tell: Tell | None = None) -> Json:
        """With `tell`, as events too. Raises Refused."""
        call = protocol.read(protocol.ChatCall, body)
        messages = [protocol.plain(message) for message in call.messages]
        tools = None if call.tool_choice == "none" else call.tools
        prompt_T = self._chat_prompt(session, messages, tools)
        begun = protocol.head("chat.completion", self.model, prompt_T, has_ids=call.return_token_ids)
        waits = bool(tools and self.tokenizer.tool_format)
        stream = Stream(tell, self.tokenizer, call, begun, waits=waits) if tell else None
        rollout = await self._sampled(session, call, prompt_T, stream)
        message, reason = self._message(rollout, call, tools)
        if rollout.finish_reason is FinishReason.STOP:
            said = protocol.plain(protocol.read(protocol.ChatCall, {"messages": [message]}).messages[0])
            session.remember(protocol.canonical([*messages, said], tools), self._written(prompt_T, rollout))
        choice: Json = {"message": message, "finish_reason": reason, "logprobs": None}
        return self._answer(call, begun, choice, prompt_T, rollout, stream)

    async def complete(self, session: Session, body: Any, tell: Tell | None = None) -> Json:
        """With `tell`, as events too. Raises Refused."""
        call = protocol.read(protocol.CompletionCall, body)
        prompt_T = self._text_prompt(session, call.prompt)
        begun = protocol.head("text_completion", self.model, prompt_T, has_ids=call.return_token_ids)
        stream = Stream(tell, self.tokenizer, call, begun, waits=False) if tell else None
        rollout = await self._sampled(session, call, prompt_T, stream)
        written, text = self._written(prompt_T, rollout), self.tokenizer.decode(rollout.token_ids_T)
        if isinstance(call.prompt, str) and not written.has_stop_token and not text.endswith(CUT):
            session.remember(call.prompt + text, written)
        reason = rollout.finish_reason.value
        choice: Json = {"text": self._cut(text, call), "finish_reason": reason, "logprobs": None}
        return self._answer(call, begun, choice, prompt_T, rollout, stream)

    def models(self) -> Json:
        """The one that there is."""
        return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "llamarl"}]}

    def _chat_prompt(self, session: Session, messages: list[Json], tools: list[Json] | None) -> np.ndarray:
        """The longest part that this session has, as the tokens that it was; the rest as the template writes it."""
        try:
            for count in range(len(messages) - 1, 0, -1):
                if written := session.recall(protocol.canonical(messages[:count], tools)):
                    text = self.tokenizer.after_turn(
                        messages[count:], without_stop=written.has_stop_token, tools=tools or ()
                    )
                    return np.concatenate([written.token_ids_T, self.tokenizer.encode(text)])
            return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages, tools=tools or ()))
        except ConfigError as error:
            raise Refused(400, str(error)) from None

    def _text_prompt(self, session: Session, prompt: str | list[int]) -> np.ndarray:
        if not isinstance(prompt, str):
            return np.array(prompt, np.int64).clip(max=np.iinfo(np.int32).max).astype(np.int32)
        known, written = session.longest(prompt)
        if written is None:
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return np.concatenate([written.token_ids_T, self.tokenizer.encode(prompt.removeprefix(known))])

    def _answer(
        self, call: protocol.Call, begun: Json, choice: Json, prompt_T: np.ndarray, rollout: Rollout,
        stream: Stream | None,
    ) -> Json:  # fmt: skip
        if protocol.wants_logprobs(call):
            is_chat = isinstance(call, protocol.ChatCall)
            choice["logprobs"] = protocol.logprobs(self.tokenizer, rollout, is_chat=is_chat)
        found = protocol.answer(begun, choice, prompt_T, rollout)
        if stream:
            stream.end(found, rollout)
        return found

    async def _sampled(
        self, session: Session, call: protocol.Call, prompt_T: np.ndarray, stream: Stream | None
    ) -> Rollout:
        try:
            rollout = await self.generate(prompt_T, self._sampling(session, call), stream.more if stream else None)
        except protocol.OutOfTokens:
            session.is_full = True
            raise
        if rollout.finish_reason is FinishReason.FAILED:
            raise Refused(400, rollout.error)
        session.record(prompt_T, rollout.columns)
        return rollout

    def _sampling(self, session: Session, call: protocol.Call) -> SamplingParams:
        ours = self.sampling
        for name, value in call.drawn_by.items() if self.is_fixed else ():
            if value != getattr(ours, name):
                raise Refused(
                    400, f"{name} = {value:g}, but this run samples with {getattr(ours, name):g}: leave it out"
                )
        left = ours.max_new_tokens - session.num_sampled
        if left <= 0:
            raise protocol.OutOfTokens(
                f"this session has sampled its {ours.max_new_tokens} tokens (rollout.max_new_tokens)"
            )
        return replace(
            ours,
            **call.drawn_by,
            max_new_tokens=min(call.limit or left, left),
            stop_strings=(*ours.stop_strings, *call.stop_strings),
        )

    def _written(self, prompt_T: np.ndarray, rollout: Rollout) -> Written:
        ids_T = np.concatenate([prompt_T, rollout.token_ids_T])
        return Written(ids_T, bool(rollout.num_tokens) and int(ids_T[-1]) in self.tokenizer.eos_token_ids)

    def _cut(self, text: str, call: protocol.Call) -> str:
        """Up to the string that ended it."""
        if call.include_stop_str_in_output:
            return text
        return text[: min((text.find(one) for one in call.stop_strings if one in text), default=len(text))]

    def _message(self, rollout: Rollout, call: protocol.Call, tools: list[Json] | None) -> tuple[Json, str]:
        """What the assistant said, and why it stopped. A malformed tool call is text, for the agent to answer."""
        text, reason = self._cut(self.tokenizer.decode(rollout.token_ids_T), call), rollout.finish_reason.value
        written_in = self.tokenizer.tool_format
        if tools and written_in and reason == "stop":
            ids_T = rollout.token_ids_T
            whole_T = ids_T[:-1] if int(ids_T[-1]) in self.tokenizer.eos_token_ids else ids_T
            content, calls = tool_calls(self.tokenizer.decode(whole_T, skip_special=False), written_in)
            if calls and not any(one.error for one in calls):
                found = [
                    {
                        "id": f"call_{int(rollout.group_id)}_{number}",
                        "type": "function",
                        "function": {"name": one.name, "arguments": json.dumps(one.arguments)},
                    }
                    for number, one in enumerate(calls)
                ]
                return {"role": "assistant", "content": content or None, "tool_calls": found}, "tool_calls"
        return {"role": "assistant", "content": text}, reason
