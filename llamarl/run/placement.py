"""`place`: which devices each executor computes on, counted out from those of this host or named. No torch.

`device = "cuda"` takes the next free devices, one for each rank; `"cuda:0,2-3"` names them, and may name those of
another executor, which then shares them. With `cluster.placement = "colocated"` and in one process every role counts
from the first device on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.cluster.api import HostShare
from llamarl.config import ConfigError, RunConfig, build
from llamarl.config.device import PLACED, named_devices
from llamarl.config.schema import CriticConfig, ReferenceConfig, RewardModelConfig

COUNT_S = 120.0
"""Seconds for a process that imports torch and counts devices."""
MAX_ROWS = 24
"""Most rows of a table."""


class WantedExecutor(NamedTuple):
    """An executor that a config asks for."""

    executor: str
    role: str
    """Role, as `cluster.place` names it."""
    num_ranks: int
    device: str
    """`cpu`, `cuda`, or with the numbers of some."""
    number: int = 0
    """Among the replicas."""

    @property
    def option(self) -> str:
        """Option that names its device."""
        return f"{'reward.model' if self.role == 'reward_model' else self.role}.device"


class Place(NamedTuple):
    """Place where an executor is started: devices and hosts."""

    env: Mapping[str, str] = MappingProxyType({})
    """Environment variables that show it its devices alone."""
    hosts: tuple[HostShare, ...] = ()


ANYWHERE = Place()
"""Place on the one machine that there is, on its CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Devices that one executor computes on."""

    executor: str
    option: str
    """Option that names its device."""
    num_ranks: int
    devices: tuple[int, ...]
    """Device of each rank, counted among those that this process sees; none: on the CPU."""

    @property
    def place(self) -> str:
        """Text for people: its devices, or the CPU."""
        return "cuda " + ranges(self.devices) if self.devices else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """All executors of a run."""

    assignments: tuple[Assignment, ...]
    num_devices: int
    """Devices that this host has."""

    @property
    def num_needed(self) -> int:
        """Devices, up to the last that is used."""
        return 1 + max((device for one in self.assignments for device in one.devices), default=-1)

    @property
    def lack(self) -> str:
        """Text for people: how many devices are needed and how many there are; empty: there are enough."""
        needed, there = self.num_needed, self.num_devices
        return f"{needed} GPUs are needed and this host has {there}" if needed > there else ""

    def table(self) -> list[str]:
        """Who computes where, a line each."""
        rows = [("executor", "ranks", "devices")]
        return aligned(rows + [(one.executor, str(one.num_ranks), one.place) for one in self.assignments])

    def check(self) -> None:
        """Raises ConfigError when this host has fewer devices."""
        if self.num_needed and not self.num_devices:
            options = ", ".join(dict.fromkeys(f"{one.option} = 'cuda'" for one in self.assignments if one.devices))
            raise ConfigError(f"{options}, but torch sees no GPU; use 'cpu' or install a CUDA build of torch")
        if self.lack:
            table = "\n".join(f"  {line}" for line in self.table())
            raise ConfigError(
                f"{self.lack}; lower generator.replicas or trainer.parallelism, name devices to share as in "
                f"generator.device = 'cuda:0', or use cluster.placement = 'colocated':\n{table}"
            )

    def env(self, executor: str) -> dict[str, str]:
        """Environment variables that show a process of this executor its devices alone; its ranks count from 0 then."""
        devices = next((one.devices for one in self.assignments if one.executor == executor), ())
        if not self.num_devices:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if visible != [""] else [str(i) for i in range(self.num_devices)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in devices), PLACED: "1"}


class Places(Protocol):
    """Places where executors of a run are started, now and later."""

    def place(self, executor: str) -> Place:
        """Place of an executor that has been placed."""

    def again(self, executor: str) -> Place:
        """Place for one that has died; elsewhere, if its host is lost. Raises ConfigError: there is no room."""

    def of_role(self, role: str) -> list[str]:
        """Executors that have been placed."""

    def take_generator(self, number: int) -> Place:
        """Place for one more generator. Raises ConfigError: there is no room."""

    def leave(self, executor: str) -> None:
        """Its devices are free; it may have none any more."""

    def free_generator_slots(self) -> int:
        """Number of further generators for which there is room."""


class LocalPlaces:
    """Places on one machine, where there is room for as many generators as at the start."""

    def __init__(self, placement: Placement) -> None:
        self._assigned = {one.executor: Place(env=placement.env(one.executor)) for one in placement.assignments}
        self._vacant = list[Place]()

    def place(self, executor: str) -> Place:
        return self._assigned[executor]

    again = place

    def of_role(self, role: str) -> list[str]:
        return [name for name in self._assigned if name.split("-")[0] == role]

    def take_generator(self, number: int) -> Place:
        place = self._assigned[f"generator-{number}"] = self._vacant.pop()
        return place

    def leave(self, executor: str) -> None:
        if place := self._assigned.pop(executor, None):
            self._vacant.append(place)

    def free_generator_slots(self) -> int:
        return len(self._vacant)


def models_in_use(config: RunConfig) -> dict[str, ReferenceConfig | CriticConfig | RewardModelConfig]:
    """Settings of the models beside policy and rule-based reward that the config asks for. Raises ConfigError."""
    found = dict[str, ReferenceConfig | CriticConfig | RewardModelConfig]()
    if config.reward.model:
        found["reward-model"] = config.reward.model
    if config.reference.kl_coefficient:
        found["reference"] = config.reference
    advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
    if isinstance(advantage, ValueAdvantage):
        found["critic"] = config.critic
    return found


def place(config: RunConfig, num_devices: int | None = None) -> Placement:
    """Devices of all executors; whether the host has so many devices says `Placement.check`.

    Args:
        num_devices: of this host; None: they are counted, if any executor wants one.

    Raises:
        ConfigError: named devices are not one for each rank.
    """
    wanted = list(wanted_executors(config))
    if num_devices is None:
        num_devices = count_devices() if any(one.device != "cpu" for one in wanted) else 0
    together = config.cluster.placement == "colocated" or config.cluster.kind == "inline"
    named = {device for one in wanted for device in named_devices(one.device)}
    assignments, free, role = list[Assignment](), _counting(named), ""
    for one in wanted:
        if together and one.role != role:
            role, free = one.role, _counting(set())
        if one.device == "cpu":
            devices = ()
        elif one.device == "cuda":
            devices = tuple(next(free) for _ in range(one.num_ranks))
            if config.cluster.kind == "inline":  # one process, for which one device is enough
                devices = (devices[0] % max(num_devices, 1),)
        else:
            devices = _named(one, config.generator.replicas)
        assigned = Assignment(executor=one.executor, option=one.option, num_ranks=one.num_ranks, devices=devices)
        assignments.append(assigned)
    return Placement(assignments=tuple(assignments), num_devices=num_devices)


def wanted_executors(config: RunConfig) -> Iterator[WantedExecutor]:
    """Executors that a config asks for, in the order in which devices go to them. Raises ConfigError."""
    models = models_in_use(config)
    yield WantedExecutor("trainer", "trainer", config.trainer.parallelism.num_ranks, config.trainer.device)
    critic = models.pop("critic", None)
    if isinstance(critic, CriticConfig):
        yield WantedExecutor("critic", "critic", critic.parallelism.num_ranks, critic.device)
    for i in range(config.generator.replicas):
        yield WantedExecutor(
            f"generator-{i}", "generator", config.generator.tensor_parallel, config.generator.device, i
        )
    yield WantedExecutor("reward", "reward", 1, "cpu")
    if config.rollout.has_episodes:
        yield WantedExecutor("environment", "environment", 1, "cpu")
    for name, settings in models.items():
        yield WantedExecutor(name, name.replace("-", "_"), 1, settings.device)


def _counting(taken: set[int]) -> Iterator[int]:
    number = 0
    while True:
        if number not in taken:
            yield number
        number += 1


def _named(wanted: WantedExecutor, replicas: int) -> tuple[int, ...]:
    """Devices named for one executor; replicas share a list that is as long as one of them needs."""
    devices, num_ranks, number = named_devices(wanted.device), wanted.num_ranks, wanted.number
    if wanted.role == "generator" and len(devices) == num_ranks * replicas:
        return devices[number * num_ranks : (number + 1) * num_ranks]
    if len(devices) != num_ranks:
        needs = f"{num_ranks} ranks" + (f" of each of {replicas} replicas" if wanted.role == "generator" else "")
        found = f"{wanted.option} = {wanted.device!r} names {len(devices)} devices for {needs}"
        raise ConfigError(f"{found}; name one for each, or 'cuda'")
    return devices


def ranges(numbers: tuple[int, ...]) -> str:
    """`0-2,5` for 0, 1, 2, 5."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A table with a heading, some rows left out where it is long."""
    if len(rows) > MAX_ROWS:
        rows = [*rows[: MAX_ROWS - 2], ("...", *("" for _ in rows[0][1:])), rows[-1]]
    signs = ["<", ">", *"<" * len(rows[0])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=False)).rstrip()
        for row in rows
    ]


def count_devices() -> int:
    """GPUs that an executor would see. Raises ConfigError."""
    code = "import torch; print(torch.cuda.device_count())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=COUNT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"torch cannot count the GPUs of this host: {error}; use device = 'cpu'") from None
    return int(done.stdout.split()[-1])
