"""Settings of an evaluation over those of the run that it is like."""

from __future__ import annotations

from typing import Any

import pytest

from llamarl.config import load_config
from llamarl.parts.answers.scored import EVERY_PROMPT, completed, settings_for

SETS: list[dict[str, Any]] = [
    {"label": "greedy", "name": "jsonl", "temperature": 0.0, "max_prompts": 5},
    {"label": "warm", "name": "jsonl", "temperature": 0.7, "samples": 4},
    {"label": "plain", "name": "jsonl"},
]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, {"greedy": (1, 0.0, 5), "warm": (4, 0.7, EVERY_PROMPT), "plain": (1, 0.0, EVERY_PROMPT)}),
        ({"samples": 2}, {"greedy": (2, 1.0, 5), "warm": (2, 0.7, EVERY_PROMPT), "plain": (2, 1.0, EVERY_PROMPT)}),
        (
            {"temperature": 0.5},
            {"greedy": (1, 0.5, 5), "warm": (4, 0.5, EVERY_PROMPT), "plain": (1, 0.5, EVERY_PROMPT)},
        ),
        ({"max_prompts": 9}, {"greedy": (1, 0.0, 9), "warm": (4, 0.7, 9), "plain": (1, 0.0, 9)}),
        ({"samples": 1}, {"greedy": (1, 0.0, 5), "warm": (1, 0.7, EVERY_PROMPT), "plain": (1, 0.0, EVERY_PROMPT)}),
    ],
)
def test_what_is_said_wins_over_sets_and_sets_over_the_run(
    said: dict[str, Any], wanted: dict[str, tuple[int, float, int]]
) -> None:
    """The run's own `eval` is how it is watched; an evaluation takes all problems, unless a set says otherwise."""
    run = load_config(
        {"model": {"path": "a"}, "data": {"train": "jsonl", "eval": SETS}, "eval": {"max_prompts": 7, "every_steps": 3}}
    )
    config = completed(
        settings_for("b", run), lambda found: load_config(found, settings={"eval": said} if said else {})
    )
    found = {name: one.eval for name, one in config.by_eval_set.items()}
    assert {name: (one.samples, one.temperature, one.max_prompts) for name, one in found.items()} == wanted
