"""`Endpoint`: answers OpenAI's calls by whoever generates, and records them in their session. No HTTP, no torch.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace

import numpy as np

from llamarl.config import ConfigError
from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.gateway import protocol
from llamarl.parts.episodes.gateway.protocol import CallRefused, Json
from llamarl.parts.episodes.gateway.session import Session, Written
from llamarl.parts.episodes.gateway.stream import CUT, ChatStream
from llamarl.parts.episodes.tool_calls import tool_calls
from llamarl.types import FinishReason, Rollout, SamplingParams

More = Callable[[Rollout], None]
Generate = Callable[[np.ndarray, SamplingParams, More | None], Awaitable[Rollout]]
"""Samples after a prompt; what it answers holds the sampled tokens alone. It may tell what there is until then."""
Tell = Callable[[bytes], None]
"""Takes server-sent events."""


CHARS_PER_TOKEN = 32
"""Most characters per token that are worth encoding; few vocabularies have longer tokens, and none a text of them."""


_Asked = tuple[protocol.ModelCall, np.ndarray, Callable[[Rollout], Json], bool]
"""A call, its prompt, what a rollout says, and whether that may turn out to be something else at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Answers of one model to calls over OpenAI's protocol, for one session of a run or for anybody."""

    tokenizer: Tokenizer
    model: str
    """Name that calls have for the model."""
    generate: Generate
    context: int
    """Tokens that a prompt and its answer have at most."""
    sampling: SamplingParams
    """Sampling where a call does not say otherwise; its `max_new_tokens` bounds all calls of a session together."""
    is_fixed: bool = False
    """Calls may not sample in another way: what they would teach would not be the policy's."""

    async def chat(self, session: Session, body: Json, tell: Tell | None = None) -> Json:
        """Answers a chat call; with `tell`, which is called in any thread, as events too. Raises CallRefused."""
        return await self._answered(self._read_chat, session, body, tell)

    async def complete(self, session: Session, body: Json, tell: Tell | None = None) -> Json:
        """Answers a text completion; with `tell`, which is called in any thread, as events too. Raises CallRefused."""
        return await self._answered(self._read_text, session, body, tell)

    def models(self) -> Json:
        """List of models, which has this one alone."""
        return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "llamarl"}]}

    def check_model(self, name: str) -> None:
        """Raises CallRefused: it is another one. No name is none."""
        if name not in ("", self.model):
            said = f"there is no model {name!r:.100}; this is {self.model!r}"
            raise CallRefused(404, said, param="model", code="model_not_found")

    async def _answered(
        self, read: Callable[[Session, Json], _Asked], session: Session, body: Json, tell: Tell | None
    ) -> Json:
        """Answer to a call; slow work is done in threads, so that others are answered meanwhile."""
        try:
            call, prompt_T, choice_of, waits = await asyncio.to_thread(read, session, body)
            kind = "chat.completion" if isinstance(call, protocol.ChatCall) else "text_completion"
            begun = protocol.head(kind, self.model, prompt_T, has_ids=call.return_token_ids)
            streams = (
                [ChatStream(tell, self.tokenizer, call, begun, n, waits=waits) for n in range(call.n)] if tell else []
            )
            sampling = self._sampling(session, call, len(prompt_T))
            rollouts = await _together(
                self._sampled(session, prompt_T, one, streams[n].more if streams else None)
                for n, one in enumerate(sampling)
            )
        except protocol.OutOfTokens:
            session.is_full = True
            raise
        return await asyncio.to_thread(self._whole, call, begun, prompt_T, rollouts, choice_of, streams)

    def _read_chat(self, session: Session, body: Json) -> _Asked:
        call = protocol.read(protocol.ChatCall, body)
        self.check_model(call.model)
        messages, tools = call.conversation
        prompt_T = self._chat_prompt(session, messages, tools)

        def choice(rollout: Rollout) -> Json:
            message, reason = self._message(rollout, call, tools)
            if rollout.finish_reason is FinishReason.STOP:
                said = protocol.Message.model_validate(message).plain
                known = protocol.conversations([*messages, said], tools)[-1]
                session.remember(known, self._written(prompt_T, rollout))
            return {"message": message, "finish_reason": reason}

        return call, prompt_T, choice, bool(tools and self.tokenizer.tool_format)

    def _read_text(self, session: Session, body: Json) -> _Asked:
        call = protocol.read(protocol.CompletionCall, body)
        self.check_model(call.model)
        prompt_T = self._text_prompt(session, call.prompt)

        def choice(rollout: Rollout) -> Json:
            written, text = self._written(prompt_T, rollout), self.tokenizer.decode(rollout.token_ids_T)
            if isinstance(call.prompt, str) and not written.has_stop_token and not text.endswith(CUT):
                session.remember(call.prompt + text, written)
            return {"text": self._cut(text, call), "finish_reason": rollout.finish_reason.value}

        return call, prompt_T, choice, False

    def _chat_prompt(self, session: Session, messages: list[Json], tools: list[Json]) -> np.ndarray:
        """The longest part that this session has, as the tokens that it was; the rest as the template writes it."""
        known = protocol.conversations(messages[:-1], tools) if session.num_calls else []
        try:
            for count in range(len(known), 0, -1):
                if written := session.recall(known[count - 1]):
                    text = self.tokenizer.after_turn(messages[count:], without_stop=written.has_stop_token, tools=tools)
                    return np.concatenate([written.token_ids_T, self._encoded(text)])
            text = self.tokenizer.apply_chat_template(messages, tools=tools)
            self._check_length(text)
            return self.tokenizer.encode_prompts([text], is_chat=True)[0]
        except ConfigError as error:
            raise CallRefused(400, str(error), param="messages") from None

    def _text_prompt(self, session: Session, prompt: str | list[int]) -> np.ndarray:
        if not isinstance(prompt, str):
            return np.array(prompt, np.int32)
        known, written = session.longest(prompt)
        if written is None:
            return self._encoded(prompt, add_special_tokens=True)
        return np.concatenate([written.token_ids_T, self._encoded(prompt.removeprefix(known))])

    def _encoded(self, text: str, **options: bool) -> np.ndarray:
        """Tokens of a text, int32 [T]."""
        self._check_length(text)
        return self.tokenizer.encode(text, **options)

    def _check_length(self, text: str) -> None:
        """Refuses at once what cannot fit, as encoding it would take long."""
        if len(text) > CHARS_PER_TOKEN * self.context:
            raise protocol.OutOfTokens(f"{len(text):,} characters are too many for a context of {self.context} tokens")

    def _whole(
        self, call: protocol.ModelCall, begun: Json, prompt_T: np.ndarray, rollouts: list[Rollout],
        choice_of: Callable[[Rollout], Json], streams: list[ChatStream],
    ) -> Json:  # fmt: skip
        choices = [choice_of(rollout) | {"logprobs": None} for rollout in rollouts]
        for choice, rollout in zip(choices, rollouts, strict=True) if call.logprobs else ():
            is_chat = isinstance(call, protocol.ChatCall)
            choice["logprobs"] = protocol.logprobs(self.tokenizer, rollout, is_chat=is_chat)
        found = protocol.answer(begun, choices, prompt_T, rollouts)
        for stream, choice, rollout in zip(streams, choices, rollouts, strict=False):
            stream.end(choice, rollout)
        if streams:
            streams[-1].close(found["usage"])
        return found

    async def _sampled(
        self, session: Session, prompt_T: np.ndarray, sampling: SamplingParams, more: More | None
    ) -> Rollout:
        rollout = await self.generate(prompt_T, sampling, more)
        if rollout.finish_reason is FinishReason.FAILED:
            raise CallRefused(400, rollout.error)
        session.record(prompt_T, rollout.columns, rollout.prompt_routes)
        return rollout

    def _sampling(self, session: Session, call: protocol.ModelCall, num_prompt: int) -> list[SamplingParams]:
        """Sampling of each choice of a call. Raises CallRefused."""
        ours, drawn = self.sampling, call.drawn_by
        for name, value in drawn.items() if self.is_fixed else ():
            if name == "seed" or value != getattr(ours, name):
                said = f"{name} = {value:g}, but this run samples with {getattr(ours, name):g}: leave it out"
                raise CallRefused(400, said, param=name)
        least, left = 1 if self.is_fixed else call.limit or 1, (ours.max_new_tokens - session.num_sampled) // call.n
        if num_prompt + least > self.context:
            said = f"the prompt has {num_prompt} tokens and the context {self.context}: it has no room for {least} more"
            raise protocol.OutOfTokens(said)
        if left <= 0:
            said = f"this session has sampled its {ours.max_new_tokens} tokens (rollout.max_new_tokens)"
            raise protocol.OutOfTokens(said)
        asked = replace(
            ours, **drawn, max_new_tokens=min(call.limit or left, left), is_repeatable="seed" in drawn,
            stop_strings=(*ours.stop_strings, *call.stop),
        )  # fmt: skip
        return [replace(asked, seed=asked.seed + n * asked.is_repeatable) for n in range(call.n)]

    def _written(self, prompt_T: np.ndarray, rollout: Rollout) -> Written:
        ids_T = np.concatenate([prompt_T, rollout.token_ids_T])
        return Written(ids_T, bool(rollout.num_tokens) and int(ids_T[-1]) in self.tokenizer.eos_token_ids)

    def _cut(self, text: str, call: protocol.ModelCall) -> str:
        """The text up to the stop string that ended it, or with it if the call asks for that."""
        if call.include_stop_str_in_output:
            return text
        return text[: min((text.find(one) for one in call.stop if one in text), default=len(text))]

    def _message(self, rollout: Rollout, call: protocol.ModelCall, tools: list[Json]) -> tuple[Json, str]:
        """Message of the assistant, and why it stopped. A malformed tool call is text, for the agent to answer."""
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


async def _together(calls: Iterable[Coroutine[None, None, Rollout]]) -> list[Rollout]:
    """The first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]
