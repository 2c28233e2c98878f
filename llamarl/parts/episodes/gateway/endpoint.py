"""`Endpoint`: answers OpenAI calls with a generation function, and records them in their session. No HTTP, no torch.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace

import numpy as np

from llamarl.config import ConfigError
from llamarl.data.tokenizer import SENTINEL, Tokenizer
from llamarl.parts.episodes.gateway import protocol
from llamarl.parts.episodes.gateway.protocol import CallRefused, Json
from llamarl.parts.episodes.gateway.session import Session, Written
from llamarl.parts.episodes.gateway.stream import CUT, ChatStream
from llamarl.parts.episodes.thoughts import CLOSE, OPEN, split_thoughts, thought_format, with_marked_thoughts
from llamarl.parts.episodes.tool_calls import tool_calls
from llamarl.types import FinishReason, Rollout, SamplingParams

More = Callable[[Rollout], None]
Generate = Callable[[np.ndarray, SamplingParams, More | None], Awaitable[Rollout]]
"""Samples after a prompt. Returns a rollout with only the sampled tokens. May report partial rollouts."""
Tell = Callable[[bytes], None]
"""Receives server-sent events."""


PROMPT_END = 16
"""Tokens at the end of a prompt in which a tag of thoughts is looked for."""
CHARS_PER_TOKEN = 32
"""Maximum characters per token of a text that is encoded. Few vocabularies have longer tokens."""


Score = Callable[[np.ndarray, int, float], Awaitable[protocol.Scores]]
"""Scores a sequence, given its tokens, the number of most likely tokens at each position, and the temperature."""
_Asked = tuple[protocol.ModelCall, list[np.ndarray], Callable[[int, Rollout], Json], bool]
"""A call, its prompts, a function from a prompt's number and rollout to a choice, and whether the choice may change
until the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Answers calls to one model over OpenAI's protocol, for one session of a run or for any client."""

    tokenizer: Tokenizer
    model: str
    """Model name in calls."""
    generate: Generate
    context: int
    """Maximum tokens of a prompt and its answer."""
    sampling: SamplingParams
    """Default sampling parameters. `max_new_tokens` limits all calls of a session together."""
    score: Score | None = None
    """Scores given tokens. None means that only sampled tokens have log-probabilities."""
    is_fixed: bool = False
    """Calls may not change sampling parameters, because their tokens are trained on."""

    async def chat(self, session: Session, body: Json, tell: Tell | None = None) -> Json:
        """Answers a chat call, also as events if `tell` is given, which is called in any thread. Raises CallRefused."""
        return await self._answered(self._read_chat, session, body, tell)

    async def complete(self, session: Session, body: Json, tell: Tell | None = None) -> Json:
        """Answers a text completion, also as events if `tell` is given, which is called in any thread. Raises
        CallRefused."""
        return await self._answered(self._read_text, session, body, tell)

    def models(self) -> Json:
        """Returns the list of models, which contains only this one."""
        return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "llamarl"}]}

    def check_model(self, name: str) -> None:
        """Raises CallRefused if a call names another model. An empty name is accepted."""
        if name not in ("", self.model):
            said = f"there is no model {name!r:.100}; this is {self.model!r}"
            raise CallRefused(404, said, param="model", code="model_not_found")

    async def _answered(
        self, read: Callable[[Session, Json], _Asked], session: Session, body: Json, tell: Tell | None
    ) -> Json:
        """Answers a call. Slow work runs in threads, so that other calls are answered meanwhile."""
        try:
            call, prompts, choice_of, waits = await asyncio.to_thread(read, session, body)
            kind = "chat.completion" if isinstance(call, protocol.ChatCall) else "text_completion"
            begun = protocol.head(kind, self.model)
            asked = [
                (prompt_T, one)
                for prompt_T in prompts
                for one in self._sampling(session, call, len(prompt_T), len(prompts))
            ]
            streams = [
                ChatStream(tell, self.tokenizer, call, begun, n, prompt_T=prompt_T, waits=waits)
                for n, (prompt_T, _) in enumerate(asked)
                if tell
            ]
            rollouts = await _together(
                self._sampled(session, prompt_T, one, streams[n].more if streams else None)
                for n, (prompt_T, one) in enumerate(asked)
            )
            scores = [] if streams else await self._scores(call, prompts, rollouts)
        except protocol.OutOfTokens:
            session.is_full = True
            raise
        return await asyncio.to_thread(self._whole, call, begun, prompts, rollouts, choice_of, streams, scores)

    def _read_chat(self, session: Session, body: Json) -> _Asked:
        call = protocol.read(protocol.ChatCall, body)
        self.check_model(call.model)
        messages, tools = call.conversation
        prompt_T = self._chat_prompt(session, messages, tools)

        def choice(_: int, rollout: Rollout) -> Json:
            message, reason = self._message(rollout, call, tools, is_open=opens_thoughts)
            if rollout.finish_reason is FinishReason.STOP:
                said = protocol.Message.model_validate(message).plain
                known = protocol.conversations([*messages, said], tools)[-1]
                written = self._written(prompt_T, rollout)
                session.remember(known, written._replace(has_thoughts="reasoning_content" in message))
            return {"message": message, "finish_reason": reason}

        opens_thoughts, may_think = self._thinking_after(prompt_T)
        return call, [prompt_T], choice, may_think or bool(tools and self.tokenizer.tool_format)

    def _read_text(self, session: Session, body: Json) -> _Asked:
        call = protocol.read(protocol.CompletionCall, body)
        self.check_model(call.model)
        call.check(has_scores=self.score is not None)
        prompts = [self._text_prompt(session, prompt) for prompt in call.prompts]

        def choice(number: int, rollout: Rollout) -> Json:
            prompt, prompt_T = call.prompts[number], prompts[number]
            written, text = self._written(prompt_T, rollout), self.tokenizer.decode(rollout.token_ids_T)
            if isinstance(prompt, str) and not written.has_stop_token and not text.endswith(CUT):
                session.remember(prompt + text, written)
            begins = (prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt_T)) if call.echo else ""
            return {"text": begins + self._cut(text, call), "finish_reason": rollout.finish_reason.value}

        return call, prompts, choice, False

    def _chat_prompt(self, session: Session, messages: list[Json], tools: list[Json]) -> np.ndarray:
        """Returns the prompt: recorded tokens for the longest known part, the rest as the template writes it."""
        known = protocol.conversations(messages[:-1], tools) if session.num_calls else []
        try:
            for count in range(len(known), 0, -1):
                if (written := session.recall(known[count - 1])) and (
                    not written.has_thoughts or self._keeps_thoughts(messages, count, tools)
                ):
                    text = self.tokenizer.after_turn(messages[count:], without_stop=written.has_stop_token, tools=tools)
                    return np.concatenate([written.token_ids_T, self._encoded(text)])
            text = self.tokenizer.apply_chat_template(messages, tools=tools)
            self._check_length(text)
            return self.tokenizer.encode_prompts([text], is_chat=True)[0]
        except ConfigError as error:
            said = str(error).replace(str(self.tokenizer.folder), self.model)  # may be a temporary folder
            raise CallRefused(400, said, param="messages") from None

    def _keeps_thoughts(self, messages: list[Json], count: int, tools: list[Json]) -> bool:
        """Returns whether the chat template keeps the thoughts of message `count`, an assistant's, before the messages
        that follow it. If it leaves them out, the prompt is written anew, and begins another sequence."""
        written_in = thought_format(self.tokenizer.template_text)
        if written_in is None:
            return True
        marked = with_marked_thoughts(messages[count - 1], written_in)
        text = self.tokenizer.apply_chat_template([*messages[: count - 1], marked, *messages[count:]], tools=tools)
        return SENTINEL in text

    def _thinking_after(self, prompt_T: np.ndarray) -> tuple[bool, bool]:
        """Returns whether a prompt ends with the tag that opens thoughts, and whether the answer may have thoughts."""
        end = self.tokenizer.decode(prompt_T[-PROMPT_END:], skip_special=False).rstrip()
        may_think = thought_format(self.tokenizer.template_text) is not None and not end.endswith(CLOSE)
        return end.endswith(OPEN), may_think

    def _text_prompt(self, session: Session, prompt: str | list[int]) -> np.ndarray:
        if not isinstance(prompt, str):
            return np.array(prompt, np.int32)
        known, written = session.longest(prompt)
        if written is None:
            return self._encoded(prompt, add_special_tokens=True)
        return np.concatenate([written.token_ids_T, self._encoded(prompt.removeprefix(known))])

    def _encoded(self, text: str, **options: bool) -> np.ndarray:
        """Returns the tokens of a text, int32 [T]."""
        self._check_length(text)
        return self.tokenizer.encode(text, **options)

    def _check_length(self, text: str) -> None:
        """Refuses texts that cannot fit before encoding them, which would take long."""
        if len(text) > CHARS_PER_TOKEN * self.context:
            raise protocol.OutOfTokens(f"{len(text):,} characters are too many for a context of {self.context} tokens")

    def _whole(
        self, call: protocol.ModelCall, begun: Json, prompts: list[np.ndarray], rollouts: list[Rollout],
        choice_of: Callable[[int, Rollout], Json], streams: list[ChatStream], scores: list[protocol.Scores],
    ) -> Json:  # fmt: skip
        choices = [choice_of(at // call.n, rollout) | {"logprobs": None} for at, rollout in enumerate(rollouts)]
        for at, (choice, rollout) in enumerate(zip(choices, rollouts, strict=True)) if call.wants_logprobs else ():
            if scores and isinstance(call, protocol.CompletionCall):
                choice["logprobs"] = protocol.text_logprobs(
                    self.tokenizer, prompts[at // call.n], rollout, scores[at], echo=call.echo,
                    has_top=bool(call.logprobs),
                )  # fmt: skip
            else:
                is_chat = isinstance(call, protocol.ChatCall)
                choice["logprobs"] = protocol.logprobs(self.tokenizer, rollout, is_chat=is_chat)
        found = protocol.answer(begun, choices, prompts, rollouts, has_ids=call.return_token_ids)
        for stream, choice, rollout in zip(streams, choices, rollouts, strict=False):
            stream.end(choice, rollout)
        if streams:
            streams[-1].close(found["usage"])
        return found

    async def _sampled(
        self, session: Session, prompt_T: np.ndarray, sampling: SamplingParams, more: More | None
    ) -> Rollout:
        if not sampling.max_new_tokens:  # only the prompt is returned
            return Rollout.empty(0, 0, FinishReason.LENGTH)
        rollout = await self.generate(prompt_T, sampling, more)
        if rollout.finish_reason is FinishReason.FAILED:
            raise CallRefused(400, rollout.error)
        session.record(prompt_T, rollout.columns, rollout.prompt_routes)
        return rollout

    async def _scores(
        self, call: protocol.ModelCall, prompts: list[np.ndarray], rollouts: list[Rollout]
    ) -> list[protocol.Scores]:
        """Returns scores of each prompt with its answer, if a call asks for more than the log-probabilities of sampled
        tokens. Raises CallRefused."""
        if self.score is None or not isinstance(call, protocol.CompletionCall) or call.logprobs is None:
            return []
        if not call.logprobs and not call.echo:
            return []
        temperature = self.sampling.temperature if call.temperature is None else call.temperature
        wholes = (np.concatenate([prompts[at // call.n], one.token_ids_T]) for at, one in enumerate(rollouts))
        try:
            return [await self.score(whole_T, call.logprobs, temperature or 1.0) for whole_T in wholes]
        except ValueError as error:
            raise CallRefused(400, str(error), param="prompt") from None

    def _sampling(
        self, session: Session, call: protocol.ModelCall, num_prompt: int, num_prompts: int
    ) -> list[SamplingParams]:
        """Returns the sampling parameters of each choice of one prompt. Raises CallRefused."""
        ours, drawn = self.sampling, call.drawn_by
        for name, value in drawn.items() if self.is_fixed else ():
            if name == "seed" or value != getattr(ours, name):
                said = f"{name} = {value:g}, but this run samples with {getattr(ours, name):g}: leave it out"
                raise CallRefused(400, said, param=name)
        asked_for = 1 if call.limit is None else call.limit
        least = min(asked_for, 1) if self.is_fixed else asked_for
        left = (ours.max_new_tokens - session.num_sampled) // (call.n * num_prompts)
        if num_prompt + least > self.context:
            said = f"the prompt has {num_prompt} tokens and the context {self.context}: it has no room for {least} more"
            raise protocol.OutOfTokens(said)
        if left <= 0:
            said = f"this session has sampled its {ours.max_new_tokens} tokens (rollout.max_new_tokens)"
            raise protocol.OutOfTokens(said)
        asked = replace(
            ours, **drawn, max_new_tokens=left if call.limit is None else min(call.limit, left),
            is_repeatable="seed" in drawn, stop_strings=(*ours.stop_strings, *call.stop),
        )  # fmt: skip
        return [replace(asked, seed=asked.seed + n * asked.is_repeatable) for n in range(call.n)]

    def _written(self, prompt_T: np.ndarray, rollout: Rollout) -> Written:
        ids_T = np.concatenate([prompt_T, rollout.token_ids_T])
        return Written(ids_T, bool(rollout.num_tokens) and int(ids_T[-1]) in self.tokenizer.eos_token_ids)

    def _cut(self, text: str, call: protocol.ModelCall) -> str:
        """Returns the text up to the stop string that ended it, or including it if the call asks for that."""
        if call.include_stop_str_in_output:
            return text
        return text[: min((text.find(one) for one in call.stop if one in text), default=len(text))]

    def _message(
        self, rollout: Rollout, call: protocol.ModelCall, tools: list[Json], *, is_open: bool
    ) -> tuple[Json, str]:
        """Returns the assistant's message and the finish reason. A malformed tool call becomes text, which the agent
        can handle.

        Args:
            is_open: the prompt ends with the tag that opens thoughts.
        """
        ids_T, reason, written_in = rollout.token_ids_T, rollout.finish_reason.value, self.tokenizer.tool_format
        has_stop = len(ids_T) > 0 and int(ids_T[-1]) in self.tokenizer.eos_token_ids
        whole = self.tokenizer.decode(ids_T[:-1] if has_stop else ids_T, skip_special=False)
        thinks_in = thought_format(self.tokenizer.template_text)
        text = whole if thinks_in == "gpt_oss" else self.tokenizer.decode(ids_T)
        thoughts, text = split_thoughts(text, thinks_in, is_open=is_open)
        thought = {} if thoughts is None else {"reasoning_content": thoughts}
        if tools and written_in and reason == "stop":
            content, calls = tool_calls(whole, written_in, tools)
            if thinks_in == "think":
                _, content = split_thoughts(content, thinks_in, is_open=is_open)
            if calls and not any(one.error for one in calls):
                found = [
                    {
                        "id": f"call_{int(rollout.group_id)}_{number}",
                        "type": "function",
                        "function": {"name": one.name, "arguments": json.dumps(one.arguments)},
                    }
                    for number, one in enumerate(calls)
                ]
                return {"role": "assistant", "content": content or None, **thought, "tool_calls": found}, "tool_calls"
        return {"role": "assistant", "content": self._cut(text, call), **thought}, reason


async def _together(calls: Iterable[Coroutine[None, None, Rollout]]) -> list[Rollout]:
    """Runs the calls concurrently. The first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]
