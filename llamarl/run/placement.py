"""Machines and devices of a run: which executor computes where. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llamarl.algorithms.advantages._base import ValueAdvantage
from llamarl.cluster.api import Cluster, ExecutorHandle, HostShare
from llamarl.cluster.open import open_cluster
from llamarl.config import ConfigError, RunConfig, build
from llamarl.config.ref import NotRun, part
from llamarl.config.roles import ParallelismConfig
from llamarl.config.schema import CriticConfig, ReferenceConfig, RewardModelConfig, TrainerConfig
from llamarl.config.section import ALONE, PLACED, named_devices
from llamarl.controller.controller import Controller
from llamarl.controller.supervision import Supervisor
from llamarl.controller.telemetry import Telemetry

COUNT_S = 120.0
"""Time limit of a process that imports torch and counts devices, in seconds."""
MAX_ROWS = 24
"""Most rows of a table."""
MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
"""Environment variable with the folder of a daemon of CUDA MPS."""


class WantedExecutor(NamedTuple):
    """An executor that a config needs."""

    executor: str
    role: str
    """Role, as in `cluster.place`."""
    num_ranks: int
    device: str
    """`cpu`, `cuda`, or `cuda` with device numbers."""
    threads: int = 0
    """CPU threads of each rank. 0 means that no setting decides."""
    number: int = 0
    """Number among the replicas."""

    @property
    def option(self) -> str:
        """Option that sets its device."""
        return f"{'reward.model' if self.role == 'reward_model' else self.role}.device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Ranks and devices of one executor by host. The empty name is this machine."""

    wanted: WantedExecutor
    ranks: dict[str, int]
    """Number of ranks on each host, in the order of ranks."""
    devices: dict[str, tuple[int, ...]]
    """Devices on each host, one per rank. Empty means CPU."""


class Assignments(dict[str, Assignment]):
    """Assignments by executor, with an index by host, because each placement asks for all executors of a host."""

    def __init__(self, assigned: Mapping[str, Assignment] | None = None) -> None:
        super().__init__()
        self._at = defaultdict[str, dict[str, Assignment]](dict)
        for executor, one in (assigned or {}).items():
            self[executor] = one

    def __setitem__(self, executor: str, one: Assignment) -> None:
        self._forget(executor)
        super().__setitem__(executor, one)
        for host in one.ranks:
            self._at[host][executor] = one

    def pop(self, executor: str, *default: Any) -> Any:
        self._forget(executor)
        return super().pop(executor, *default)

    def clear(self) -> None:
        super().clear()
        self._at.clear()

    def at(self, host: str) -> Mapping[str, Assignment]:
        """Returns assignments with at least one rank on a host."""
        return self._at.get(host, {})

    def _forget(self, executor: str) -> None:
        for host in self[executor].ranks if executor in self else ():
            del self._at[host][executor]


class Placer(ABC):
    """Assigns hosts and devices to all executors of a run, at the start and later."""

    def __init__(self, config: RunConfig, only: str = "") -> None:
        """
        Args:
            only: the only role of the run. Empty means all roles that the config needs.

        Raises:
            ConfigError: an executor has no place.
        """
        self._config = config
        self._assigned = Assignments()
        self._wanted = [one for one in wanted_executors(config) if only in ("", one.role)]

    @abstractmethod
    def crowded(self) -> list[str]:
        """Returns sentences about hosts whose CPU executors want more threads at once than there are cores."""

    @abstractmethod
    def _assign(self, wanted: WantedExecutor) -> Assignment:
        """Returns a place for one more executor. Raises ConfigError if there is none."""

    def take(self, wanted: WantedExecutor) -> tuple[HostShare, ...]:
        """Assigns and keeps a place for an executor. Raises ConfigError if there is none."""
        self._assigned[wanted.executor] = self._assign(wanted)
        return self.place(wanted.executor)

    def place(self, executor: str) -> tuple[HostShare, ...]:
        """Returns hosts, ranks and environment for the processes of an executor."""
        one = self._assigned[executor]
        return tuple(
            HostShare(host, number, self._env(one.devices[host]) | self._company(executor, host))
            for host, number in one.ranks.items()
        )

    def _company(self, executor: str, host: str) -> dict[str, str]:
        """Returns environment variables for an executor that shares no device on a host."""
        own = set(self._assigned[executor].devices.get(host, ()))
        return {ALONE: "1"} if own and not own & self._shared(host) else {}

    def _shared(self, host: str) -> set[object]:
        """Returns devices on a host that several executors share."""
        used = Counter(device for one in self._assigned.at(host).values() for device in set(one.devices.get(host, ())))
        return {device for device, count in used.items() if count > 1}

    def _env(self, devices: Iterable[object]) -> dict[str, str]:
        """Returns environment variables that show a process only these devices. Its ranks then count from 0."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), PLACED: "1"}

    def devices(self, executor: str) -> list[tuple[str, int]]:
        """Returns host and GPU of each rank. Empty means CPU."""
        return [(host, device) for host, used in self._assigned[executor].devices.items() for device in used]

    def again(self, executor: str) -> tuple[HostShare, ...]:
        """Returns a place for a replacement, elsewhere if the host is lost. Raises ConfigError if there is none."""
        return self.place(executor)

    def layout(self, executor: str) -> ParallelismConfig | None:
        """Returns a smaller layout of trainer or critic if there are too few devices. None means the layout of the
        settings."""
        return None

    def displaced(self) -> list[str]:
        """Returns generators whose devices now belong to executors that are about to start. Names each one once."""
        return []

    def keepers(self) -> Sequence[tuple[str, str]]:
        """Returns address and secret of the processes on all hosts that keep states of trainer and critic. Empty means
        none."""
        return ()

    def of_role(self, role: str) -> list[str]:
        """Returns the placed executors of a role."""
        return [name for name, one in self._assigned.items() if one.wanted.role == role]

    def take_generator(self, number: int) -> tuple[HostShare, ...]:
        """Assigns a place to one more generator. Raises ConfigError if there is none."""
        return self.take(self._generator(number))

    def _generator(self, number: int) -> WantedExecutor:
        taken = {self._assigned[name].wanted.number for name in self.of_role("generator")}
        return wanted_generator(self._config, number)._replace(number=min(set(range(len(taken) + 1)) - taken))

    def leave(self, executor: str) -> None:
        """Removes an executor from its place. Its devices become free."""
        self._assigned.pop(executor, None)

    def free_generator_slots(self) -> int:
        """Returns the number of further generators that fit."""
        return self._config.generator.replicas - len(self.of_role("generator"))

    def _crowded(self, cores: Mapping[str, int]) -> list[str]:
        """Implements `crowded` for hosts with known numbers of `cores`.

        Two OpenMP threads that share a core wait for each other at every operation and can be 20 times slower than one.
        """
        said, at_once = list[str](), max if self._config.cluster.placement == "colocated" else sum
        for host, num_cores in cores.items():
            here = [one for one in self._assigned.at(host).values() if one.wanted.device == "cpu"]
            used = [(one.wanted.role == "trainer", one.wanted.threads * one.ranks[host]) for one in here]
            threads = at_once(sum(number for of, number in used if of is wanted) for wanted in (True, False))
            if threads > num_cores:
                where, other = (f"of host {host}", ", or name other hosts in cluster.place") if host else ("here", "")
                said.append(
                    f"{threads} CPU threads work at once on the {num_cores} cores {where}, which is slow; lower "
                    f"trainer.threads, generator.threads or generator.replicas{other}"
                )
        return said

    def table(self) -> list[str]:
        """Returns a table of ranks and devices, with one line per executor and host."""
        rows = [("executor", "ranks", "host", "devices")]
        for name, one in self._assigned.items():
            for host, number in one.ranks.items():
                devices = f"cuda {ranges(one.devices[host])}" if one.devices[host] else "cpu"
                rows.append((name, str(number), host, devices))
        is_here = not any(host for _, _, host, _ in rows[1:])
        return aligned([(name, number, devices) for name, number, _, devices in rows] if is_here else rows)


class LocalPlacer(Placer):
    """Places executors on this machine, which has space for as many generators as at the start."""

    def __init__(self, config: RunConfig, num_devices: int | None = None, only: str = "") -> None:
        """
        Args:
            num_devices: GPUs of this host. None means that they are counted if an executor needs one. `check` raises if
                there are too few.
            only: as for `Placer`.

        Raises:
            ConfigError: named devices do not match the ranks.
        """
        super().__init__(config, only)
        if num_devices is None:
            num_devices = count_devices() if any(one.device != "cpu" for one in self._wanted) else 0
        self._num_devices = num_devices
        self._named = {device for one in self._wanted for device in named_devices(one.device)}
        self._together = set[object]()
        for wanted in self._wanted:
            self.take(wanted)
        self._together = super()._shared("")
        """Devices that several executors share while all are present."""

    def _shared(self, host: str) -> set[object]:
        return self._together

    def _assign(self, wanted: WantedExecutor) -> Assignment:
        devices = _named(wanted, self._config.generator.replicas)
        if wanted.device == "cuda" and self._config.cluster.kind == "inline":  # one process uses one device
            devices = (0,)
        elif wanted.device == "cuda":
            together = self._config.cluster.placement == "colocated"
            beside = [one for one in self._assigned.values() if not together or one.wanted.role == wanted.role]
            taken = {device for one in beside for device in one.devices[""]} | (set() if together else self._named)
            devices = tuple(islice((device for device in count() if device not in taken), wanted.num_ranks))
        return Assignment(wanted=wanted, ranks={"": wanted.num_ranks}, devices={"": devices})

    def _env(self, devices: Iterable[object]) -> dict[str, str]:
        if not self._num_devices:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return super()._env(devices if visible == [""] else (visible[int(str(device))] for device in devices))

    def crowded(self) -> list[str]:
        return self._crowded({"": os.cpu_count() or 1})

    @property
    def sharing(self) -> str:
        """Text on GPUs that processes share at the same time, and how. Empty means that there are none."""
        if self._config.cluster.kind == "inline" or self._config.generators_sleep:
            return ""
        names = sorted(name for name, one in self._assigned.items() if self._together & {*one.devices[""]})
        if not names:
            return ""
        shared = ranges(tuple(sorted(int(str(device)) for device in self._together)))
        how = "by CUDA MPS" if has_mps() else f"by time, because CUDA MPS is off (no daemon at {mps_folder()})"
        return f"{', '.join(names)} share cuda {shared} {how}"

    @property
    def lack(self) -> str:
        """Text on needed and available devices. Empty means that there are enough."""
        used = [device for one in self._assigned.values() for device in one.devices[""]]
        needed, there = 1 + max(used, default=-1), self._num_devices
        return f"{needed} GPUs are needed and this host has {there}" if needed > there else ""

    def check(self) -> None:
        """Raises ConfigError if this host has too few devices."""
        if self.lack and not self._num_devices:
            wanted = (one.wanted for one in self._assigned.values() if one.devices[""])
            options = ", ".join(dict.fromkeys(f"{one.option} = 'cuda'" for one in wanted))
            raise ConfigError(f"{options}, but torch sees no GPU; use 'cpu' or install a CUDA build of torch")
        if self.lack:
            table = "\n".join(f"  {line}" for line in self.table())
            raise ConfigError(
                f"{self.lack}; lower generator.replicas or trainer.parallelism, name devices to share as in "
                f"generator.device = 'cuda:0', or use cluster.placement = 'colocated':\n{table}"
            )


def models_in_use(config: RunConfig) -> dict[str, ReferenceConfig | CriticConfig | RewardModelConfig]:
    """Returns settings of the models that the config needs, except the policy. Raises ConfigError."""
    found = dict[str, ReferenceConfig | CriticConfig | RewardModelConfig]()
    if config.reward.model:
        found["reward-model"] = config.reward.model
    if config.reference.kl_coefficient:
        found["reference"] = config.reference
    with suppress(NotRun):  # an advantage that may not be imported counts as one without a critic
        advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
        if isinstance(advantage, ValueAdvantage):
            found["critic"] = config.critic
    return found


def model_paths(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yields executor, option and path of each model that the settings name, except the policy. Raises ConfigError."""
    used = models_in_use(config)
    for name, settings in used.items():
        if settings.path:
            yield name, f"{'reward.model' if name == 'reward-model' else name}.path", settings.path
    for number, source in enumerate(config.data.sources if "reference" in used else ()):
        if source.teacher:
            yield "reference", f"data.train.{number}.teacher", source.teacher


def wanted_executors(config: RunConfig) -> Iterator[WantedExecutor]:
    """Yields executors that a config needs, in the order in which they get devices. Raises ConfigError."""
    models = models_in_use(config)
    critic = models.pop("critic", None)
    for name, one in (("trainer", config.trainer), ("critic", critic)):
        if isinstance(one, TrainerConfig | CriticConfig):
            yield WantedExecutor(name, name, one.parallelism.num_ranks, one.device, one.threads)
    for i in range(config.generator.replicas):
        yield wanted_generator(config, i)
    yield WantedExecutor("reward", "reward", 1, "cpu")
    if config.has_episodes:
        yield WantedExecutor("environment", "environment", 1, "cpu")
    for name, settings in models.items():
        yield WantedExecutor(name, name.replace("-", "_"), 1, settings.device, settings.threads)


def wanted_generator(config: RunConfig, number: int) -> WantedExecutor:
    """Returns the generator with a number."""
    of = config.generator
    return WantedExecutor(f"generator-{number}", "generator", of.tensor_parallel, of.device, of.threads, number)


def _named(wanted: WantedExecutor, replicas: int) -> tuple[int, ...]:
    """Returns the devices that settings name for an executor, if any. Replicas share a list of the length for one."""
    devices, num_ranks, number = named_devices(wanted.device), wanted.num_ranks, wanted.number
    if not devices:
        return ()
    if wanted.role == "generator" and len(devices) == num_ranks * replicas:
        return devices[number * num_ranks : (number + 1) * num_ranks]
    if len(devices) != num_ranks:
        needs = f"{num_ranks} ranks" + (f" of each of {replicas} replicas" if wanted.role == "generator" else "")
        found = f"{wanted.option} = {wanted.device!r} names {len(devices)} devices for {needs}"
        raise ConfigError(f"{found}; name one for each, or 'cuda'")
    return devices


def ranges(numbers: tuple[int, ...]) -> str:
    """Returns `0-2,5` for 0, 1, 2, 5."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the aligned lines of a table with a heading. Long tables omit rows."""
    if len(rows) > MAX_ROWS:
        rows = [*rows[: MAX_ROWS - 2], ("...", *("" for _ in rows[0][1:])), rows[-1]]
    signs = ["<", ">", *"<" * len(rows[0])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=False)).rstrip()
        for row in rows
    ]


def mps_folder() -> Path:
    """Returns the folder by which processes find the daemon of CUDA MPS."""
    return Path(os.environ.get(MPS_FOLDER) or "/tmp/nvidia-mps")


def has_mps() -> bool:
    """Returns whether a daemon of CUDA MPS serves this machine, so that kernels of several processes run at once."""
    try:
        pid = int((mps_folder() / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):  # a container may have the pipes of a daemon outside, without its number
        return (mps_folder() / "control").exists()
    return Path(f"/proc/{pid}").exists()


def count_devices() -> int:
    """Returns the number of GPUs that an executor would see. Raises ConfigError."""
    return len(device_bytes())


@cache
def device_bytes() -> tuple[int, ...]:
    """Returns the memory of each GPU that an executor would see. Raises ConfigError."""
    code = (
        "import torch.cuda as cuda; "
        "print(*(cuda.get_device_properties(i).total_memory for i in range(cuda.device_count())))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=COUNT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"torch cannot count the GPUs of this host: {error}; use device = 'cpu'") from None
    lines = done.stdout.splitlines()
    return tuple(int(size) for size in lines[-1].split()) if lines else ()


class Machines(Protocol):
    """The machines of a run, by `cluster.kind`: this machine, or the hosts that a part waits for."""

    hosts_may_join: bool
    """Whether there may be more places later."""

    def open(self) -> Cluster:
        """Opens the cluster, once. Raises ConfigError if something is missing."""
        ...

    async def places(self, tell: Callable[[str], None]) -> Placer:
        """Waits for all machines. Returns the places for executors. Raises ConfigError."""
        ...

    def follow(self, controller: Controller, telemetry: Telemetry, supervisor: Supervisor) -> None:
        """Adds and removes generators when machines join and leave, from now on."""

    def end_with(self, handle: ExecutorHandle, supervisor: Supervisor) -> None:
        """Ends the run, with a checkpoint, when the machine of this executor leaves."""


class ThisMachine:
    """This machine only, which never changes."""

    hosts_may_join = False

    def __init__(self, config: RunConfig, logs: Path, placer: LocalPlacer) -> None:
        self._config, self._logs, self._placer = config, logs, placer

    def open(self) -> Cluster:
        return open_cluster(self._config.cluster, self._logs)

    async def places(self, tell: Callable[[str], None]) -> LocalPlacer:
        return self._placer

    def follow(self, controller: Controller, telemetry: Telemetry, supervisor: Supervisor) -> None:
        return

    def end_with(self, handle: ExecutorHandle, supervisor: Supervisor) -> None:
        return


def open_machines(
    config: RunConfig,
    logs: Path,
    folder: Path,
    placer: LocalPlacer | None,
    tell: Callable[[str], None],
    only: str = "",
    *,
    resume: bool = False,
) -> Machines:
    """Returns the machines of a run.

    Args:
        folder: of the run, to which trainer and critic write checkpoints.
        placer: of this machine. None means several hosts.
        tell: called with sentences for the user: who joined, was refused or left.
        only: the only role of the run. Empty means all roles that the config needs.
        resume: the run resumes, with as few hosts as allowed.

    Raises:
        ConfigError: hosts cannot connect here.
    """
    if placer is None:
        return part("hosts", "HostMachines")(config, logs, folder, tell, only, resume=resume)
    return ThisMachine(config, logs, placer)
