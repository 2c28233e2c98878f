"""Ports: the calls that the controller makes to each role, and how it cuts long calls into parts.

Executors have methods of the same names (`tests/architecture/test_ports.py`). `llamarl.cluster.api.port` turns a port
and a handle into an object whose methods make the calls::

    trainer = port(TrainerPort, executors.trainer, config.cluster.timeout_s)
    result = await trainer.step(group_ids, groups)
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from llamarl.batches import batches
from llamarl.cluster.api import ExecutorHandle, each_rank
from llamarl.config import RunConfig
from llamarl.config.ref import part
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
"""Prompts with their rollouts, which have token ids only."""
SpawnGenerator = Callable[[int], Awaitable[ExecutorHandle]]
"""Starts the generator of this number."""
SpawnAgain = Callable[[str], Awaitable[ExecutorHandle]]
"""Restarts an executor that is not a generator, by its name."""


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
    """Scores responses by rules."""

    async def score(self, groups: Responses) -> list[list[ScoredResponse]]: ...


class RewardModelPort(Protocol):
    """Scores responses by a model."""

    async def score(self, groups: Responses) -> list[list[RewardResult]]: ...


class ColumnPort(Protocol):
    """Fills a per-token column: the reference and the critic."""

    async def score(self, groups: Responses) -> list[list[np.ndarray]]: ...


class OptimizingPort(Protocol):
    """Calls that trainer and critic share."""

    async def add_groups(self, groups: Sequence[RolloutGroup]) -> None: ...
    async def commit(self) -> str: ...
    async def choose_keepers(self, keepers: Sequence[tuple[str, str]]) -> None: ...


class TrainerPort(OptimizingPort, Protocol):
    """Takes optimizer steps, publishes weights, and saves the controller's state in its checkpoints."""

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
    """Trains on the trainer's steps, one microbatch per call, and values new rollouts between these calls."""

    async def learn(self, step: int, group_ids: Sequence[int]) -> None: ...
    async def learn_on(self, step: int) -> StepResult | None: ...
    async def save(self, step: int) -> None: ...
    async def resume(self, step: int) -> None: ...
    async def restore(self, newest: int) -> int: ...


class SftPort(OptimizingPort, Protocol):
    """Trains on documents, and saves their order in its checkpoints."""

    async def resumed(self) -> tuple[dict[str, int] | None, list[str]]: ...
    async def step(self, documents: list[SampleGroup], order: dict[str, int]) -> StepResult: ...
    async def save(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Executors:
    """Handles of a run's executors, and how to start more of them."""

    generators: Sequence[ExecutorHandle]
    reward: ExecutorHandle
    trainer: ExecutorHandle | None = None
    """None means that the run only evaluates."""
    models: Mapping[str, ExecutorHandle] = field(default_factory=dict)
    """`reward-model`, `reference`, `critic` and `environment`, as far as the config asks for them."""
    spawn_generator: SpawnGenerator | None = None
    """None means that dead generators are not replaced."""
    spawn_again: SpawnAgain | None = None
    """None means that the death of another executor ends the run."""
    free_generator_slots: Callable[[], int] = lambda: sys.maxsize
    """Returns the number of generators that devices are free for."""
    hosts_may_join: bool = False
    """Whether devices for more generators may appear later."""

    def __iter__(self) -> Iterator[ExecutorHandle]:
        return iter((*self.generators, *self.irreplaceable))

    @property
    def irreplaceable(self) -> Sequence[ExecutorHandle]:
        """Executors without which the run cannot continue: all but the generators."""
        return (self.reward, *self.models.values(), *([self.trainer] if self.trainer else []))


class Turns(Protocol):
    """Multi-turn rollouts: passes each finished turn to an environment or agent, and requests the next one.

    `open_turns` of `parts/episodes` makes it.
    """

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Begins the episodes of these requests."""

    def take(self, finished: Sequence[Rollout]) -> None:
        """Passes finished turns to the environment."""

    async def loop(self) -> None:
        """Consumes replies of the environment until the run ends."""

    def describe(self) -> str:
        """Returns text for a stall report on rollouts that wait for a reply, or an empty string."""
        ...


def open_turns(config: RunConfig, *wiring: Any) -> Turns | None:
    """Opens the turns of `parts/episodes` with the arguments `wiring`. Returns None if each response is one turn.

    Raises ConfigError.
    """
    return part("episodes", "open_turns")(config, *wiring) if config.has_episodes else None


# Calls with many rollouts are cut into several, since a call carries at most 256 MiB.

CALL_BYTES = 64 << 20
"""Largest payload of one call, a quarter of the limit. Recorded experts of a mixture make rollouts large."""
TOKEN_BYTES = 24
"""Bytes of one token of a rollout with its columns and its share of the text."""
NUMBER_BYTES = 8
"""Bytes of a number in the metadata of a prompt."""
Item = TypeVar("Item")


def routes_bytes(rollouts: Iterable[Rollout]) -> int:
    """Returns the bytes of recorded experts, counting those of a shared prompt once."""
    rollouts = list(rollouts)
    prompts = {
        id(rollout.prompt_routes): rollout.prompt_routes.nbytes
        for rollout in rollouts
        if rollout.prompt_routes is not None
    }
    return sum(prompts.values()) + sum(rollout.routes_bytes for rollout in rollouts)


def split_calls(items: Iterable[Item], num_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Splits items into consecutive lists, each small enough for one call."""
    return batches(items, num_bytes, CALL_BYTES)


def split_requests(requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
    """Splits requests into calls. A request with large partial rollouts becomes several requests."""
    parts = (part for request in requests for part in _request_parts(request))
    return split_calls(parts, lambda request: routes_bytes(request.partials))


def _request_parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    if routes_bytes(request.partials) <= CALL_BYTES:
        yield request
        return
    for partials in split_calls(request.partials, lambda rollout: routes_bytes([rollout])):
        yield replace(request, partials=tuple(partials))


def split_groups(groups: Iterable[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
    """Splits groups into calls. A large group becomes several, which the receiver joins (`RolloutGroup.with_more`)."""
    return split_calls((part for group in groups for part in _group_parts(group)), group_bytes)


def _group_parts(group: RolloutGroup) -> Iterator[RolloutGroup]:
    if group_bytes(group) <= CALL_BYTES or not group.rollouts:
        yield group
        return
    for indices in split_calls(range(len(group.rollouts)), lambda index: _rollout_bytes(group.rollouts[index])):
        yield group.some(indices)


def _rollout_bytes(rollout: Rollout) -> int:
    return routes_bytes([rollout]) + TOKEN_BYTES * rollout.num_tokens


def group_bytes(group: RolloutGroup) -> int:
    """Estimates the bytes of a group in a call."""
    prompt = group.prompt
    text = len(prompt.text) + len(prompt.answer) + _num_characters(prompt.metadata)
    num_tokens = len(prompt.token_ids_T) + sum(rollout.num_tokens for rollout in group.rollouts)
    return text + routes_bytes(group.rollouts) + TOKEN_BYTES * num_tokens


def _num_characters(data: Any) -> int:
    """Estimates the length of plain data as text from a sample of long lists. Encoding all of it takes milliseconds."""
    parts = [*data, *data.values()] if isinstance(data, dict) else data
    if isinstance(parts, list | tuple):
        sample = parts[:: len(parts) // 32 + 1]
        return sum(map(_num_characters, sample)) * len(parts) // max(len(sample), 1)
    return len(data) if isinstance(data, str) else NUMBER_BYTES
