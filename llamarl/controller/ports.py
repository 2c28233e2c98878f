"""Ports: the controller's calls to each role. The executors' methods are these (`tests/architecture/test_ports.py`)."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llamarl.cluster.api import ExecutorHandle
from llamarl.cluster.port import each_rank
from llamarl.executors.replies import Adoption, Collected, ControllerState, Published, ScoredResponse
from llamarl.training.result import PolicyStepResult, StepResult
from llamarl.types import (
    CandidateSets,
    GenerationRequest,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
    SampleGroup,
)
from llamarl.weight_sync.layout import Address, TensorSpec

Responses = Sequence[tuple[Prompt, Sequence[Rollout]]]
"""Rollouts with their token ids alone, group by group."""
SpawnGenerator = Callable[[int], Awaitable[ExecutorHandle]]
"""Starts the generator of this number."""
SpawnAgain = Callable[[str], Awaitable[ExecutorHandle]]
"""Starts another executor than a generator once more, by its name."""


class GeneratorPort(Protocol):
    """Decodes, and serves weights."""

    @each_rank
    async def weight_specs(self) -> list[tuple[TensorSpec, ...]]: ...
    async def try_sample(self, version: int, address: Address) -> None: ...
    async def submit(self, requests: Sequence[GenerationRequest]) -> None: ...
    async def abort(self, group_ids: Sequence[int]) -> None: ...
    async def release(self, rollouts: Sequence[tuple[int, int]]) -> None: ...
    async def sleep(self) -> None: ...
    async def collect(self, num_wanted: int, needed: Sequence[int] = ()) -> Collected: ...
    async def so_far(self, group_ids: Sequence[int]) -> list[Rollout]: ...
    async def adopt(self, version: int, address: Address) -> Adoption: ...
    async def score(
        self, sequences: Sequence[np.ndarray], candidates: CandidateSets | None = None
    ) -> list[np.ndarray]: ...


class RewardPort(Protocol):
    """Judges responses by rules."""

    async def score(self, groups: Responses) -> list[list[ScoredResponse]]: ...


class RewardModelPort(Protocol):
    """Judges responses by a model."""

    async def score(self, groups: Responses) -> list[list[RewardResult]]: ...


class ColumnPort(Protocol):
    """Fills a per-token column: reference and critic."""

    async def score(self, groups: Responses) -> list[list[np.ndarray]]: ...


class OptimizingPort(Protocol):
    """Calls that trainer and critic share."""

    async def add_groups(self, groups: Sequence[RolloutGroup]) -> None: ...
    async def commit(self) -> str: ...
    async def keep_at(self, keepers: Sequence[tuple[str, str]]) -> None: ...


class TrainerPort(OptimizingPort, Protocol):
    """Takes optimizer steps, publishes weights, keeps the controller's state in its checkpoints."""

    async def resumed(self) -> tuple[ControllerState | None, list[str]]: ...
    async def step(self, group_ids: Sequence[int], groups: Sequence[RolloutGroup]) -> PolicyStepResult: ...
    async def set_layout(self, rank: int, specs: tuple[TensorSpec, ...]) -> None: ...
    async def transports(self, same_host: bool, same_process: bool) -> list[str]: ...
    async def publish_sample(self, version: int, transport: str) -> Address: ...
    async def choose(self, transport: str, same_host: bool = True) -> None: ...
    async def publish(self, version: int, in_use: tuple[int, ...]) -> Published: ...
    async def outsized(self) -> str: ...
    async def save(self, state: ControllerState) -> None: ...
    async def restore(self, newest: int) -> int: ...


class CriticPort(OptimizingPort, ColumnPort, Protocol):
    """Learns the trainer's steps, a microbatch per call, and values new rollouts in between."""

    async def learn(self, step: int, group_ids: Sequence[int]) -> None: ...
    async def learn_on(self, step: int) -> StepResult | None: ...
    async def save(self, step: int) -> None: ...
    async def resume(self, step: int) -> None: ...
    async def restore(self, newest: int) -> int: ...


class SftPort(OptimizingPort, Protocol):
    """Learns documents, and keeps their order in its checkpoints."""

    async def resumed(self) -> tuple[dict[str, int] | None, list[str]]: ...
    async def step(self, documents: list[SampleGroup], order: dict[str, int]) -> StepResult: ...
    async def save(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Executors:
    """Handles of a run's executors."""

    generators: Sequence[ExecutorHandle]
    reward: ExecutorHandle
    trainer: ExecutorHandle | None = None
    """None where nothing is trained."""
    models: Mapping[str, ExecutorHandle] = field(default_factory=dict)
    """`reward-model`, `reference`, `critic` and `environment`, those that the config asks for."""
    spawn_generator: SpawnGenerator | None = None
    """Replaces a dead generator; None: there are no others."""
    spawn_again: SpawnAgain | None = None
    """Replaces what is no generator; None: a death ends the run."""
    free_generator_slots: Callable[[], int] = lambda: sys.maxsize
    """Tells for how many more generators there is a place now."""
    hosts_may_join: bool = False
    """There may be places later."""

    def __iter__(self) -> Iterator[ExecutorHandle]:
        return iter((*self.generators, *self.irreplaceable))

    @property
    def irreplaceable(self) -> Sequence[ExecutorHandle]:
        """Executors that the run cannot do without: all but the generators."""
        return (self.reward, *self.models.values(), *([self.trainer] if self.trainer else []))
