"""`Session`: what one agent asked for and was given, as the token sequences that are learnt from. No HTTP.

A session is an episode. Agents send whole histories, forget parts of them, retry, go back: so a call goes on with a
sequence if that is an exact token prefix of its prompt, and begins another one otherwise. Whatever is asked for, each
sampled token is in exactly one sequence as sampled, after the tokens that it was sampled after; wherever else it stands
it is observed, and nobody learns from it there.

What was sampled is never encoded again: a session remembers which tokens its texts were.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamarl.types import Columns, Rollout, observed, packed_columns

_NOTHING: Columns = Rollout.empty(0, 0).columns


class Written(NamedTuple):
    """A prompt and what was sampled after it."""

    token_ids_T: np.ndarray
    """Prompt and answer as tokens, int32 [T]."""
    has_stop_token: bool
    """The last one is a stop token, which the text does not show."""


@dataclass(slots=True)
class Session:
    """Calls of one episode, as the token sequences that they make."""

    num_calls: int = 0
    """Calls that were answered."""
    num_sampled: int = 0
    """Tokens that were sampled, in all calls."""
    is_full: bool = False
    """A call was refused, as there was no room for an answer."""
    _sequences: list[Columns] = field(default_factory=list)
    _written: dict[str | bytes, Written] = field(default_factory=dict)
    """Sequences that were written before, by their texts, or by the digests of conversations."""

    def fitting(self, prompt_T: np.ndarray) -> tuple[int, Columns]:
        """The number of the longest sequence that `prompt_T` begins with, or of one that is to begin, and the prompt as
        its columns."""
        found = [number for number, one in enumerate(self._sequences) if _begins_with(prompt_T, one["token_ids"])]
        number = max(found, key=lambda one: len(self._sequences[one]["token_ids"]), default=len(self._sequences))
        before = self._sequences[number] if found else _NOTHING
        return number, observed(before, prompt_T[len(before["token_ids"]) :])

    def record(self, prompt_T: np.ndarray, sampled: Columns, prompt_routes: np.ndarray | None = None) -> int:
        """A call was answered. The number of its sequence.

        Args:
            prompt_routes: experts of the prompt's tokens but the last; for those of which nothing is known.
        """
        self.num_calls += 1
        self.num_sampled += len(sampled["token_ids"])
        number, before = self.fitting(prompt_T)
        packed = packed_columns([before, sampled])
        if prompt_routes is not None and "routes" in packed:  # a row is of the token before it
            known = packed["routes"][1 : len(prompt_T)]
            np.copyto(known, prompt_routes, where=known == np.iinfo(known.dtype).max)
        self._sequences[number:] = [packed, *self._sequences[number + 1 :]]
        return number

    def columns(self) -> Columns:
        """All sequences, end to end, each from its first token on; the column `sequence` numbers them."""
        if not self._sequences:
            return _NOTHING
        numbered = (
            one | {"sequence": np.full(len(one["token_ids"]), number, np.int32)}
            for number, one in enumerate(self._sequences)
        )
        return packed_columns(list(numbered))

    def remember(self, text: str | bytes, written: Written) -> None:
        """These tokens are what is meant by `text`, or the conversation of this digest, from now on."""
        self._written[text] = written

    def recall(self, text: str | bytes) -> Written | None:
        """Tokens of a text that this session has; None: it does not have it."""
        return self._written.get(text)

    def longest(self, text: str) -> tuple[str, Written | None]:
        """The longest text that this session has and `text` begins with."""
        texts = (one for one in list(self._written) if isinstance(one, str))  # other calls may add some meanwhile
        found = max(filter(text.startswith, texts), key=len, default="")
        return found, self._written.get(found)


def _begins_with(prompt_T: np.ndarray, sequence_T: np.ndarray) -> bool:
    return len(sequence_T) <= len(prompt_T) and np.array_equal(prompt_T[: len(sequence_T)], sequence_T)
