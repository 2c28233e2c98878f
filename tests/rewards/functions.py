"""Reward functions as users write them."""

from __future__ import annotations


def is_answer(response: str, answer: str) -> bool:
    return response == answer
