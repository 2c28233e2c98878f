"""Ports: the controller's calls to each role. The executors' methods are these (`tests/architecture/test_ports.py`)."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from llamarl.cluster.api import ExecutorHandle
from llamarl.cluster.port import each_rank
from llamarl.config import RunConfig
from llamarl.config.ref import part
from llamarl.executors.replies import Adoption, Collected, ControllerState, Published, ScoredResponse
from llamarl.training.result import PolicyStepResult, StepResult
from llamarl.types import CandidateSets, GenerationRequest, Prompt, RewardResult, Rollout, RolloutGroup, SampleGroup
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


class Turns(Protocol):
    """Between generators and what is scored; `open_turns` of `parts/episodes` makes it."""

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Episodes begin."""

    def take(self, finished: Sequence[Rollout]) -> None:
        """Answers turns that have ended."""

    async def loop(self) -> None:
        """Consumes replies for as long as the run goes on."""

    def describe(self) -> str:
        """Text for a stall report on rollouts that wait; empty: none does."""
        ...


def open_turns(config: RunConfig, *wiring: Any) -> Turns | None:
    """None: a response is one turn. `wiring` is what the part's `open_turns` asks for. Raises ConfigError."""
    return part("episodes", "open_turns")(config, *wiring) if config.has_episodes else None


PARCEL_BYTES = 64 << 20
"""Size in bytes from which on a call takes no more: a quarter of what one may carry."""
TOKEN_BYTES = 24
"""Bytes of a token of a rollout, with its columns and its part of the text."""
NUMBER_BYTES = 8
"""Bytes of a number in the metadata of a prompt."""
Item = TypeVar("Item")


def routes_bytes(rollouts: Iterable[Rollout]) -> int:
    """Size of the experts that were recorded of these, those of a prompt that they share counted once."""
    rollouts = list(rollouts)
    prompts = {id(one.prompt_routes): one.prompt_routes.nbytes for one in rollouts if one.prompt_routes is not None}
    return sum(prompts.values()) + sum(one.routes_bytes for one in rollouts)


def parcels(items: Iterable[Item], num_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Consecutive items for one call each."""
    parcel, size = list[Item](), 0
    for item in items:
        if parcel and size + num_bytes(item) > PARCEL_BYTES:
            yield parcel
            parcel, size = [], 0
        parcel.append(item)
        size += num_bytes(item)
    if parcel:
        yield parcel


def requests_of(requests: Sequence[GenerationRequest]) -> Iterator[list[GenerationRequest]]:
    """Requests for one call each; one with large partials becomes several, for some of its rollouts each."""
    cut = (part for request in requests for part in _parts(request))
    return parcels(cut, lambda request: routes_bytes(request.partials))


def _parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    if routes_bytes(request.partials) <= PARCEL_BYTES:
        yield request
        return
    for partials in parcels(request.partials, lambda one: routes_bytes([one])):
        yield replace(request, partials=tuple(partials))


def groups_of(groups: Iterable[RolloutGroup]) -> Iterator[list[RolloutGroup]]:
    """Groups for one call each; a large one becomes several, of some of its rollouts each, which whoever gets them puts
    together again (`RolloutGroup.with_more`)."""
    return parcels((part for group in groups for part in _some(group)), group_bytes)


def _some(group: RolloutGroup) -> Iterator[RolloutGroup]:
    if group_bytes(group) <= PARCEL_BYTES or not group.rollouts:
        yield group
        return
    for places in parcels(range(len(group.rollouts)), lambda place: _rollout_bytes(group.rollouts[place])):
        yield group.some(places)


def _rollout_bytes(rollout: Rollout) -> int:
    return routes_bytes([rollout]) + TOKEN_BYTES * rollout.num_tokens


def group_bytes(group: RolloutGroup) -> int:
    """About the size of a group in a call."""
    prompt = group.prompt
    text = len(prompt.text) + len(prompt.answer) + _num_characters(prompt.metadata)
    num_tokens = len(prompt.token_ids_T) + sum(one.num_tokens for one in group.rollouts)
    return text + routes_bytes(group.rollouts) + TOKEN_BYTES * num_tokens


def _num_characters(plain: Any) -> int:
    """About, of plain data as text, by some parts of a long list: writing it out takes milliseconds."""
    parts = [*plain, *plain.values()] if isinstance(plain, dict) else plain
    if isinstance(parts, list | tuple):
        some = parts[:: len(parts) // 32 + 1]
        return sum(map(_num_characters, some)) * len(parts) // max(len(some), 1)
    return len(plain) if isinstance(plain, str) else NUMBER_BYTES
