"""`place`: which devices each executor computes on, counted out from those of this host or named. No torch.

`device = "cuda"` takes the next free devices, one for each rank; `"cuda:0,2-3"` names them, and may name those of
another executor, which then shares them. With `cluster.placement = "colocated"` and in one process every role counts
from the first device on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.config import ConfigError, RunConfig, build
from llamarl.config.device import PLACED, named_devices
from llamarl.config.schema import CriticConfig, ReferenceConfig, RewardModelConfig

COUNT_S = 120.0
"""For a process that imports torch and counts."""
MAX_ROWS = 24
"""Of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What one executor computes on."""

    executor: str
    option: str
    """Of its device."""
    num_ranks: int
    devices: tuple[int, ...]
    """Of each rank, counted among those that this process sees; none: on the CPU."""

    @property
    def place(self) -> str:
        """For people."""
        return "cuda " + ranges(self.devices) if self.devices else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """All executors of a run."""

    assignments: tuple[Assignment, ...]
    num_devices: int
    """That this host has."""

    @property
    def num_needed(self) -> int:
        """Devices, up to the last that is used."""
        return 1 + max((device for one in self.assignments for device in one.devices), default=-1)

    @property
    def lack(self) -> str:
        """Of devices, for people; empty: there are enough."""
        needed, there = self.num_needed, self.num_devices
        return f"{needed} GPUs are needed and this host has {there}" if needed > there else ""

    def table(self) -> list[str]:
        """Who computes where, a line each."""
        rows = [
            ("executor", "ranks", "devices"),
            *((one.executor, str(one.num_ranks), one.place) for one in self.assignments),
        ]
        if len(rows) > MAX_ROWS:
            rows = [*rows[: MAX_ROWS - 2], ("...", "", ""), rows[-1]]
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        return [f"{name:<{first}}  {ranks:>{second}}  {place}" for name, ranks, place in rows]

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
        """What shows a process of this executor its devices alone; its ranks count from 0 then."""
        devices = next((one.devices for one in self.assignments if one.executor == executor), ())
        if not self.num_devices:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if visible != [""] else [str(i) for i in range(self.num_devices)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in devices), PLACED: "1"}


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
    wanted = list(_wanted(config))
    if num_devices is None:
        num_devices = count_devices() if any(device != "cpu" for *_, device, _ in wanted) else 0
    together = config.cluster.placement == "colocated" or config.cluster.kind == "inline"
    named = {device for *_, text, _ in wanted for device in named_devices(text)}
    assignments, free, role = list[Assignment](), _counting(named), ""
    for executor, option, num_ranks, text, number in wanted:
        if together and option != role:
            role, free = option, _counting(set())
        if text == "cpu":
            devices = ()
        elif text == "cuda":
            devices = tuple(next(free) for _ in range(num_ranks))
            if config.cluster.kind == "inline":  # one process, for which one device is enough
                devices = (devices[0] % max(num_devices, 1),)
        else:
            devices = _named(option, text, num_ranks, number, config.generator.replicas)
        assignments.append(Assignment(executor=executor, option=option, num_ranks=num_ranks, devices=devices))
    return Placement(assignments=tuple(assignments), num_devices=num_devices)


def count_devices() -> int:
    """GPUs that an executor would see. Raises ConfigError."""
    code = "import torch; print(torch.cuda.device_count())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=COUNT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"torch cannot count the GPUs of this host: {error}; use device = 'cpu'") from None
    return int(done.stdout.split()[-1])


def _wanted(config: RunConfig) -> Iterator[tuple[str, str, int, str, int]]:
    """Executor, its option, ranks, device, and number among the replicas; in the order in which devices go to them."""
    models = models_in_use(config)
    yield "trainer", "trainer.device", config.trainer.parallelism.num_ranks, config.trainer.device, 0
    critic = models.pop("critic", None)
    if isinstance(critic, CriticConfig):
        yield "critic", "critic.device", critic.parallelism.num_ranks, critic.device, 0
    for i in range(config.generator.replicas):
        yield f"generator-{i}", "generator.device", config.generator.tensor_parallel, config.generator.device, i
    yield "reward", "", 1, "cpu", 0
    for name, settings in models.items():
        yield name, f"{name.replace('-', '.')}.device", 1, settings.device, 0


def _counting(taken: set[int]) -> Iterator[int]:
    number = 0
    while True:
        if number not in taken:
            yield number
        number += 1


def _named(option: str, text: str, num_ranks: int, number: int, replicas: int) -> tuple[int, ...]:
    """Those of one executor; replicas share a list that is as long as one of them needs."""
    devices = named_devices(text)
    if option == "generator.device" and len(devices) == num_ranks * replicas:
        return devices[number * num_ranks : (number + 1) * num_ranks]
    if len(devices) != num_ranks:
        needs = f"{num_ranks} ranks" + (f" of each of {replicas} replicas" if option == "generator.device" else "")
        raise ConfigError(f"{option} = {text!r} names {len(devices)} devices for {needs}; name one for each, or 'cuda'")
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
