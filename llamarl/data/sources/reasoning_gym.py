"""Problems of reasoning-gym: a hundred families of generated puzzles, each with a verifier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from llamarl.data.sources._base import ProblemRow
from llamarl.rewards._reasoning_gym import problems


@dataclass
class ReasoningGym:
    """Problems `first` to `first + count - 1` of a family and a seed. The reward `reasoning_gym` verifies answers.

    Raises (at first use):
        ConfigError: the package is not installed, or does not know the family or an option.
    """

    family: str
    """Name of the family, for example `chain_sum`."""
    count: Annotated[int, Field(ge=1)]
    """Number of problems."""
    first: Annotated[int, Field(ge=0)] = 0
    """Index of the first problem. Use different ranges of one seed for training and held-out problems."""
    seed: int = 0
    """Selects the sequence of problems."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the family, such as its difficulty."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> ProblemRow:
        if not 0 <= index < self.count:
            raise IndexError(index)
        number = self.first + index
        entry = self._problems[number]
        answer = entry["answer"]
        return ProblemRow(
            problem_id=f"{self.family}-{self.seed}-{number}",
            question=entry["question"],
            answer="" if answer is None else str(answer),
            # Text for the verifier: all fields of a row may go through JSON and back.
            metadata={"family": self.family, "entry": json.dumps(entry, default=str)},
        )

    @cached_property
    def _problems(self) -> Any:
        return problems(self.family, self.first + self.count, self.seed, self.options)
