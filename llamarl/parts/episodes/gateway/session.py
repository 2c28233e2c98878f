"""`Session`: the calls of one agent as token sequences for training. No HTTP.

A session is an episode. Agents send full histories, drop parts of them, retry, and go back. A call continues a sequence
that is an exact token prefix of its prompt, and otherwise starts a new sequence. Each sampled token is in exactly one
sequence as a sampled token, after the tokens that it was sampled after. In other sequences it counts as observed and is
excluded from the loss.

Sampled tokens are never encoded again: a session remembers the tokens of its texts.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamarl.types import Columns, Rollout, observed, packed_columns

_NOTHING: Columns = Rollout.empty(0, 0).columns


class Written(NamedTuple):
    """A prompt and the tokens that were sampled after it."""

    token_ids_T: np.ndarray
    """Tokens of prompt and answer, int32 [T]."""
    has_stop_token: bool
    """The last token is a stop token, which is not in the text."""
    has_thoughts: bool = False
    """The sampled tokens have thoughts, which the chat template may leave out of later prompts."""


@dataclass(slots=True)
class Session:
    """Calls of one episode, as token sequences.

    Example::

        number, prompt = session.fitting(prompt_T)
        session.record(prompt_T, sampled)
        columns = session.columns()
    """

    num_calls: int = 0
    """Number of answered calls."""
    num_sampled: int = 0
    """Number of sampled tokens over all calls."""
    is_full: bool = False
    """A call was refused because there were no tokens left for an answer."""
    _sequences: list[Columns] = field(default_factory=list)
    _written: dict[str | bytes, Written] = field(default_factory=dict)
    """Earlier sequences by text, or by digest of the conversation."""

    def fitting(self, prompt_T: np.ndarray) -> tuple[int, Columns]:
        """Returns the number of the longest sequence that is a prefix of `prompt_T`, or of a new one, and the prompt as
        its columns."""
        found = [number for number, one in enumerate(self._sequences) if _begins_with(prompt_T, one["token_ids"])]
        number = max(found, key=lambda one: len(self._sequences[one]["token_ids"]), default=len(self._sequences))
        before = self._sequences[number] if found else _NOTHING
        return number, observed(before, prompt_T[len(before["token_ids"]) :])

    def record(self, prompt_T: np.ndarray, sampled: Columns, prompt_routes: np.ndarray | None = None) -> int:
        """Records an answered call. Returns the number of its sequence.

        Args:
            prompt_routes: experts of the prompt's tokens except the last, used for tokens without recorded experts.
        """
        self.num_calls += 1
        self.num_sampled += len(sampled["token_ids"])
        number, before = self.fitting(prompt_T)
        packed = packed_columns([before, sampled])
        if prompt_routes is not None and "routes" in packed:  # a row belongs to the token before it
            known = packed["routes"][1 : len(prompt_T)]
            np.copyto(known, prompt_routes, where=known == np.iinfo(known.dtype).max)
        self._sequences[number:] = [packed, *self._sequences[number + 1 :]]
        return number

    def columns(self) -> Columns:
        """Returns all sequences, end to end. The column `sequence` numbers them."""
        if not self._sequences:
            return _NOTHING
        numbered = (
            one | {"sequence": np.full(len(one["token_ids"]), number, np.int32)}
            for number, one in enumerate(self._sequences)
        )
        return packed_columns(list(numbered))

    def remember(self, text: str | bytes, written: Written) -> None:
        """Remembers the tokens of a text, or of the conversation with this digest."""
        self._written[text] = written

    def recall(self, text: str | bytes) -> Written | None:
        """Returns the tokens of a text. None means unknown."""
        return self._written.get(text)

    def longest(self, text: str) -> tuple[str, Written | None]:
        """Returns the longest known text that is a prefix of `text`, and its tokens."""
        texts = (one for one in list(self._written) if isinstance(one, str))  # a copy: other calls add entries
        found = max(filter(text.startswith, texts), key=len, default="")
        return found, self._written.get(found)


def _begins_with(prompt_T: np.ndarray, sequence_T: np.ndarray) -> bool:
    return len(sequence_T) <= len(prompt_T) and np.array_equal(prompt_T[: len(sequence_T)], sequence_T)
