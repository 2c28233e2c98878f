"""Rollouts without content: as long as real ones for everybody who asks, a few bytes in memory and in a pickle.

Shape suffix: T tokens of one sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llamarl.types import Prompt


class Repeated(np.ndarray):
    """One value, `len` times: an array with stride 0 that is pickled as (value, length, type)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return repeated, (self[0].item() if len(self) else 0, len(self), self.dtype.str)


def repeated(value: float, length: int, dtype: str) -> Repeated:
    """An array [length] of one value."""
    return Repeated((length,), dtype, np.array(value, dtype), 0, (0,))


def simulated_prompts(count: int, num_tokens: int) -> tuple[Prompt, ...]:
    """Prompts to draw from."""
    token_ids_T = repeated(0, num_tokens, "<i4")
    return tuple(
        Prompt(prompt_id=f"simulated-{number}", text="", token_ids_T=token_ids_T, answer="") for number in range(count)
    )
