"""Reward functions as users write them."""

from __future__ import annotations


def is_answer(response: str, answer: str) -> bool:
    return response == answer


def is_same(response: str, answer: int) -> bool:
    return int(response) == answer


def is_near(response: str, answer: float, **row: object) -> bool:
    return abs(float(response) - answer) < 0.01


class Text:
    """One whose answer is text, as it is without a declaration."""

    def __call__(self, answer) -> bool:
        return isinstance(answer, str)
