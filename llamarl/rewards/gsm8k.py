"""Grade-school mathematics with the answer after `####`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamarl.rewards._base import Reward, invalid, right, wrong
from llamarl.rewards._text import after_hashes, parse_number
from llamarl.types import RewardItem, RewardResult


@dataclass
class Gsm8k(Reward):
    """Right if the number after the last `####` equals the answer exactly.

    A number elsewhere in the response never counts, because policies learn to exploit "any last number". An answer that
    is not a number is a fault of the data, so its responses are INVALID.
    """

    correct: float = 1.0
    """Reward of a right answer."""
    wrong: float = 0.0
    """Reward of a wrong or missing answer."""

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [self._score(item) for item in items]

    def written(self, answer: str) -> str:
        return answer if after_hashes(answer) else f"#### {answer}"

    def _score(self, item: RewardItem) -> RewardResult:
        gold = parse_number(after_hashes(item.answer) or item.answer)
        if gold is None:
            return invalid(f"the data's answer {item.answer[:40]!r} is not a number")
        text = after_hashes(item.response)
        if text is None:
            return wrong(self.wrong, "no #### line")
        number = parse_number(text)
        if number is None:
            return wrong(self.wrong, f"{text[:40]!r} after #### is not a number")
        if number != gold:
            return wrong(self.wrong, f"{text[:40]} is not {item.answer[-40:]}")
        return right(self.correct)
