"""`StopStrings`: does the newest token complete a stop string in the text of a response? No torch.

Only a tail of the tokens is decoded, long enough that a string cannot begin before it: tokens that decode to nothing
(special tokens) make it longer. Most tokens are not even decoded: their own text lacks the last character of each
string, or holds a whole one.

Shape suffix: T tokens of one response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_MARGIN = 4
"""Tokens more than a string has bytes: with them the first tail is nearly always long enough."""
_CUT = "\ufffd"
"""Stands for one to three bytes that are no character."""


class StopStrings:
    """The strings of one request, for all its rollouts."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings = strings
        self._decode = decode
        self._num_bytes = max(len(string.encode()) for string in strings)
        self._last = {string[-1] for string in strings}
        self._ending_bytes = dict[int, int]()
        self._whole = set[int]()
        self.passed = set[int]()
        """Tokens that are known to end none of them: `completed` need not look when one of these is the newest."""

    def completed(self, token_ids_T: np.ndarray) -> bool:
        """The text of the response holds one of the strings, and its newest token may have completed it."""
        newest = int(token_ids_T[-1])
        newest_bytes = self._ending(newest)
        if not newest_bytes:
            self.passed.add(newest)
        if not newest_bytes or newest in self._whole:
            return newest_bytes > 0
        count = self._num_bytes + _MARGIN
        while True:
            text = self._decode(token_ids_T[-count:].tolist())
            if any(string in text for string in self._strings):
                return True
            # A string may end at the first byte of the newest token.
            seen_bytes = len(text.replace(_CUT, "?").encode()) - newest_bytes
            if count >= len(token_ids_T) or seen_bytes >= self._num_bytes:
                return False
            count *= 2

    def _ending(self, token_id: int) -> int:
        """Bytes, at least, of a token in which a string can end; 0 for any other."""
        if token_id not in self._ending_bytes:
            # Twice, because the first token of a text may lose its leading space.
            text = self._decode((token_id, token_id))
            can_end = _CUT in text or any(last in text for last in self._last)
            self._ending_bytes[token_id] = len(text.encode()) if can_end else 0
            if can_end and any(string in self._decode((token_id,)) for string in self._strings):
                self._whole.add(token_id)
        return self._ending_bytes[token_id]
