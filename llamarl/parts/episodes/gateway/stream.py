"""`ChatStream`: an answer as server-sent events while it is sampled. No HTTP, no torch.

Token ids and log-probabilities are sent with every token. Text is sent when its characters are complete and it cannot
be the beginning of a stop string, which is not shown. If tools may be called, text is sent at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from llamarl.data.tokenizer import Tokenizer
from llamarl.parts.episodes.gateway import protocol
from llamarl.parts.episodes.gateway.protocol import Json
from llamarl.types import Rollout

CUT = "\ufffd"
"""Decoded form of an incomplete character."""


class ChatStream:
    """One choice of an answer."""

    def __init__(
        self, tell: Callable[[bytes], None], tokenizer: Tokenizer, call: protocol.ModelCall, head: Json, index: int, *,
        prompt_T: np.ndarray, waits: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            tell: receives events.
            head: the answer without choices and usage.
            index: index of this choice.
            prompt_T: tokens of its prompt.
            waits: the text may change until the end, so it is sent at the end.
        """
        self._tell, self._tokenizer, self._call, self._waits = tell, tokenizer, call, waits
        self._choice: Json = {"index": index, "finish_reason": None, "logprobs": None}
        self._is_chat = isinstance(call, protocol.ChatCall)
        head = head | ({"prompt_token_ids": prompt_T.tolist()} if call.return_token_ids else {})
        self._head = head | {"object": "chat.completion.chunk" if self._is_chat else head["object"]}
        self._told = self._offset = 0  # sent tokens, and their characters
        self._window = self._read = 0  # text is decoded from the first token on, and complete up to the second
        self._text, self._shown = "", 0  # unsent text, and the number of sent characters

    def more(self, rollout: Rollout) -> None:
        """Sends new text and tokens of a growing rollout."""
        if rollout.num_tokens > self._told:
            self._piece({"text": self._new_text(rollout)}, rollout)

    def end(self, choice: Json, rollout: Rollout) -> None:
        """Sends the rest of the choice and its end."""
        message = choice.get("message", choice)
        rest: Json = {"text": (message.get("text") or message.get("content") or "")[self._shown :]}
        if thoughts := message.get("reasoning_content"):
            rest["reasoning_content"] = thoughts
        if calls := message.get("tool_calls"):
            rest["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
        if rest["text"] or thoughts or calls or rollout.num_tokens > self._told or not self._told:
            self._piece(rest, rollout)
        end = {"delta": {}} if self._is_chat else {"text": ""}
        self._event([self._choice | {"finish_reason": choice["finish_reason"]} | end])

    def close(self, usage: Json) -> None:
        """Sends the end of the stream after all choices have ended."""
        if self._call.stream_options and self._call.stream_options.include_usage:
            self._event([], usage=usage)
        self._tell(b"data: [DONE]\n\n")

    def _piece(self, said: Json, rollout: Rollout) -> None:
        choice = dict(self._choice)
        if self._is_chat:
            role = {} if self._told else {"role": "assistant"}
            choice["delta"] = {**role, "content": said.pop("text"), **said}
        else:
            choice |= said
        if self._call.wants_logprobs:
            choice["logprobs"] = protocol.logprobs(
                self._tokenizer, rollout, is_chat=self._is_chat, start=self._told, offset=self._offset
            )
            self._offset += sum(map(len, choice["logprobs"].get("tokens", ())))
        if self._call.return_token_ids:
            choice["token_ids"] = rollout.token_ids_T[self._told :].tolist()
            if not self._told:
                choice["prompt_token_ids"] = self._head["prompt_token_ids"]
        self._told = rollout.num_tokens
        self._event([choice])

    def _event(self, choices: list[Json], **more: Json) -> None:
        self._tell(b"data: " + json.dumps(self._head | {"choices": choices} | more).encode() + b"\n\n")

    def _new_text(self, rollout: Rollout) -> str:
        """Returns new text that can be sent."""
        ids = rollout.token_ids_T[self._window :].tolist()
        before, text = (self._tokenizer.decode(part) for part in (ids[: self._read - self._window], ids))
        if not text.endswith(CUT):
            self._text += text[len(before) :]
            self._window, self._read = self._read, rollout.num_tokens
        count = 0 if self._waits else len(self._text) - self._may_be_stop()
        shown, self._text = self._text[:count], self._text[count:]
        self._shown += count
        return shown

    def _may_be_stop(self) -> int:
        """Returns the number of characters at the end of the text that may be the beginning of a stop string."""
        strings = () if self._call.include_stop_str_in_output else self._call.stop
        begun = (length for one in strings for length in range(1, len(one)) if self._text.endswith(one[:length]))
        return max(begun, default=0)
