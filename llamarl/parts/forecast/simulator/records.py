"""Rollouts without content: they have the length of real ones, but need few bytes in memory and in a pickle.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llamarl.config import RunConfig
from llamarl.controller.evaluation import HeldOutSet
from llamarl.types import Prompt


class Repeated(np.ndarray):
    """One number, `len` times, int32: an array with stride 0 that is pickled as (value, length)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return repeated, (int(self[0]), len(self))


def repeated(value: int, length: int) -> Repeated:
    """An array [length] of one number; `length` is at least 1."""
    return Repeated((length,), np.int32, np.array(value, np.int32), 0, (0,))


def simulated_sets(config: RunConfig, num_tokens: int) -> tuple[HeldOutSet, ...]:
    """Sets of held-out prompts, as large as they may be."""
    return tuple(
        HeldOutSet(
            name=name, number=number, settings=run.eval, prompts=simulated_prompts(run.eval.max_prompts, num_tokens)
        )
        for number, (name, run) in enumerate(config.by_eval_set.items())
    )


def simulated_prompts(count: int, num_tokens: int) -> tuple[Prompt, ...]:
    """Prompts to draw from."""
    token_ids_T = repeated(0, num_tokens)
    return tuple(
        Prompt(prompt_id=f"simulated-{number}", text="", token_ids_T=token_ids_T, answer="") for number in range(count)
    )
