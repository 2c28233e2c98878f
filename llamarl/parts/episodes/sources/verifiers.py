"""Tasks of the package verifiers, for the agent `verifiers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from llamarl.config import ConfigError
from llamarl.config.ref import may_run
from llamarl.data.sources._base import ProblemRow
from llamarl.parts.episodes.programs.verifiers import verifiers_adapter


@dataclass
class Verifiers:
    """Tasks `first` to `first + count - 1` of a taskset. `rollout.agent = "verifiers"` runs and scores them.

    Raises (at first use):
        ConfigError: the package or the taskset is not installed, or the taskset has fewer tasks.
    """

    id: str
    """Installed taskset, for example `gsm8k-v1`."""
    first: Annotated[int, Field(ge=0)] = 0
    """Index of the first task. Use different ranges for training and held-out problems."""
    count: Annotated[int, Field(ge=0)] = 0
    """Number of tasks. 0 means all, which an infinite taskset refuses."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the taskset."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ProblemRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rows[index]

    @cached_property
    def _rows(self) -> list[ProblemRow]:
        may_run("data.train.id", self.id)
        taskset = {**self.options, "id": self.id}
        tasks = verifiers_adapter().tasks_of(taskset, self.first, self.count)
        if not tasks or len(tasks) < self.count:
            raise ConfigError(
                f"data.train.count = {self.count}: the taskset {self.id!r} has {len(tasks)} tasks from {self.first} on"
            )
        return [
            ProblemRow(
                problem_id=f"{self.id}-{one.index}", question=one.prompt or f"task {one.index}", answer="",
                metadata={"taskset": taskset, "index": one.index, "key": one.key},
            )
            for one in tasks
        ]  # fmt: skip
