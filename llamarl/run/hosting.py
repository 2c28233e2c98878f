"""`Hosting`: the host and the devices of each executor, while hosts come and go. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from llamarl.cluster.registry import Host
from llamarl.config import ConfigError, RunConfig
from llamarl.config.device import PLACED
from llamarl.run.placement import Place, Wanted, aligned, ranges, wanted_executors

MAX_REPLICAS = 10_000


class NoRoom(ConfigError):
    """No host that is here can take an executor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAssignment:
    """Where one executor is."""

    wanted: Wanted
    hosts: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    """On each host, one for each rank there; none: on the CPU."""

    @property
    def place(self) -> Place:
        """What its processes are started with."""
        env = [{"CUDA_VISIBLE_DEVICES": ",".join(map(str, own)), PLACED: "1"} for own in self.devices]
        return Place(hosts=self.hosts, host_env=tuple(env))


class Hosting:
    """All executors of a run. Processes of one executor are evenly shared by its hosts."""

    def __init__(self, config: RunConfig, hosts: Mapping[str, Host], only: str = "") -> None:
        """
        Args:
            hosts: those that are here, by name; it changes as they come and go.
            only: the one role that there is; empty: all that the config asks for.

        Raises:
            ConfigError: an executor has no place.
        """
        self._config, self._hosts = config, hosts
        self._assigned = dict[str, HostAssignment]()
        for wanted in wanted_executors(config):
            if only and wanted.role != only:
                continue
            if wanted.device not in ("cpu", "cuda"):
                raise ConfigError(
                    f"{wanted.option} = {wanted.device!r} names devices, which are counted out on several hosts; use "
                    "'cuda', and cluster.place for the hosts"
                )
            self.take(wanted)
        if not config.generator.replicas and not only:
            self.take_generator(0)
            for number in range(1, 1 + self.room()):
                self.take_generator(number)

    def place(self, executor: str) -> Place:
        """Of one that has been placed."""
        return self._assigned[executor].place

    def of_role(self, role: str) -> list[str]:
        """Executors that have been placed."""
        return [name for name, one in self._assigned.items() if one.wanted.role == role]

    def on_host(self, name: str) -> list[str]:
        """Executors that are there."""
        return [executor for executor, one in self._assigned.items() if name in one.hosts]

    def hosts_of(self, *roles: str) -> set[str]:
        """Where executors of some roles are."""
        return {host for one in self._assigned.values() if one.wanted.role in roles for host in one.hosts}

    def take_generator(self, number: int) -> Place:
        """For one more. Raises NoRoom."""
        return self.take(self._generator(number)).place

    def leave(self, executor: str) -> None:
        """Its devices are free; it may have none any more."""
        self._assigned.pop(executor, None)

    def room(self) -> int:
        """For so many more generators, up to `generator.replicas`."""
        left = (self._config.generator.replicas or MAX_REPLICAS) - len(self.of_role("generator"))
        tried = [f"generator-?{i}" for i in range(left)]
        try:
            for executor in tried:
                self.take(self._generator(0)._replace(executor=executor))
        except NoRoom:
            pass
        taken = [self._assigned.pop(executor) for executor in tried if executor in self._assigned]
        return len(taken)

    def table(self) -> list[str]:
        """Who computes where, a line each."""
        rows = [("executor", "ranks", "host", "devices")]
        for name, one in self._assigned.items():
            devices = [f"cuda {ranges(own)}" if own else "cpu" for own in one.devices]
            for host, own in zip(one.hosts, devices, strict=True):
                rows.append((name, str(one.wanted.num_ranks // len(one.hosts)), host, own))
        return aligned(rows)

    def take(self, wanted: Wanted) -> HostAssignment:
        """Raises NoRoom."""
        one = self._assigned[wanted.executor] = self._assign(wanted)
        return one

    def _generator(self, number: int) -> Wanted:
        generator = self._config.generator
        return Wanted(f"generator-{number}", "generator", generator.tensor_parallel, generator.device)

    def _assign(self, wanted: Wanted) -> HostAssignment:
        """Raises NoRoom."""
        names, num_ranks = list(self._candidates(wanted)), wanted.num_ranks
        if wanted.device == "cpu":
            spreads = wanted.role in ("trainer", "critic") and self._patterns("trainer", wanted.role)
            hosts = names if spreads else names[:1]
            if num_ranks % len(hosts):
                raise ConfigError(
                    f"cluster.place.{wanted.role} matches {len(hosts)} hosts ({', '.join(hosts)}), which cannot share "
                    f"{num_ranks} ranks evenly; name others, or change {wanted.role}.parallelism"
                )
            return HostAssignment(wanted=wanted, hosts=tuple(hosts), devices=((),) * len(hosts))
        free = {name: self._free_devices(name) for name in names}
        for num_hosts in (number for number in range(1, num_ranks + 1) if not num_ranks % number):
            each = num_ranks // num_hosts
            able = [name for name in names if len(free[name]) >= each][:num_hosts]
            if len(able) == num_hosts and (num_hosts == 1 or wanted.role in ("trainer", "critic")):
                return HostAssignment(
                    wanted=wanted, hosts=tuple(able), devices=tuple(free[name][:each] for name in able)
                )
        has = ", ".join(f"{name} has {len(devices)}" for name, devices in free.items())
        table = "".join(f"\n  {line}" for line in self.table())
        raise NoRoom(f"{wanted.executor} needs {num_ranks} GPUs, and of those that are free {has}:{table}")

    def _patterns(self, *roles: str) -> list[str]:
        """Of the last role; a role without any goes with the one before."""
        for role in reversed(roles):
            if patterns := getattr(self._config.cluster.place, role):
                return patterns
        return []

    def _candidates(self, wanted: Wanted) -> Iterator[str]:
        """Hosts for an executor, the first the best. Raises NoRoom: there are none."""
        role, here = wanted.role, sorted(name for name, host in self._hosts.items() if not host.is_leaving)
        with_trainer = self.hosts_of("trainer", "critic")
        patterns = self._patterns("trainer", role) if role == "critic" else self._patterns(role)
        names = [name for name in here if not patterns or any(fnmatchcase(name, one) for one in patterns)]
        if role == "generator":
            if not patterns and wanted.device == "cpu":
                names = [name for name in names if name not in with_trainer] or names
            if not self._config.generator.replicas and wanted.device == "cpu":
                names = [name for name in names if self._has_cores(name, wanted.num_ranks)]
            beside = with_trainer if not patterns else set[str]()
            names.sort(key=lambda name: (name in beside, len(self._generators_at(name)), name))
        elif not patterns and role != "trainer":
            names.sort(key=lambda name: (name not in with_trainer, name))
        if not names:
            matching = f" that match cluster.place.{role} = {patterns}" if patterns else ""
            raise NoRoom(f"{wanted.executor} finds no host{matching}; these are here: {', '.join(here) or 'none'}")
        yield from names

    def _generators_at(self, name: str) -> list[HostAssignment]:
        return [one for one in self._assigned.values() if one.wanted.role == "generator" and name in one.hosts]

    def _free_devices(self, name: str) -> tuple[int, ...]:
        taken = {
            device
            for one in self._assigned.values()
            for host, devices in zip(one.hosts, one.devices, strict=True)
            if host == name
            for device in devices
        }
        return tuple(device for device in range(self._hosts[name].inventory.gpus) if device not in taken)

    def _has_cores(self, name: str, num_ranks: int) -> bool:
        """For a generator on its CPU; a host with none of them takes one in any case."""
        threads = self._config.generator.threads * num_ranks
        busy = 0
        for one in self._assigned.values():
            if name in one.hosts:
                settings = getattr(self._config, one.wanted.role, None)
                busy += getattr(settings, "threads", 1) * one.wanted.num_ranks // len(one.hosts)
        return not self._generators_at(name) or busy + threads <= self._hosts[name].inventory.cores
