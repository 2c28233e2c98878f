"""`HostPlacer`: assigns executors to hosts and devices while hosts join and leave. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from heapq import heappop, heapreplace
from types import SimpleNamespace
from typing import cast

from llamarl.cluster.api import HostShare
from llamarl.config import ConfigError, RunConfig
from llamarl.config.roles import CriticConfig, ParallelismConfig, TrainerConfig
from llamarl.parts.hosts.registry import Host
from llamarl.run.placement import Assignment, Assignments, Placer, WantedExecutor, wanted_generator

MAX_REPLICAS = 10_000
TRAINED = ("trainer", "critic")
"""Roles whose state is saved in the run folder."""


class NoRoom(ConfigError):
    """No connected host has a place for an executor."""


MAX_GPUS = 64
"""Maximum GPUs of an imagined host."""


class HostPlacer(Placer):
    """Places the executors of a run on hosts that join and leave."""

    def __init__(self, config: RunConfig, hosts: Mapping[str, Host], only: str = "") -> None:
        """
        Args:
            hosts: connected hosts by name. Changes as hosts join and leave.
            only: as for `Placer`.

        Raises:
            ConfigError: an executor has no place.
        """
        super().__init__(config, only)
        self._hosts = hosts
        self.models = list[str]()
        """Models of the Hub that a host needs before executors may run there."""
        self.ready = set[Host]()
        """Hosts that have these models."""
        self.lacks = dict[Host, str]()
        """Files that trainer and critic need and hosts lack, as a sentence per checked host. Empty means that they may
        be restarted there."""
        self._here = dict[str, Host]()
        """Snapshot of the hosts, which join and leave in another thread."""
        self._stands_still = False
        """Whether many executors are being placed in one snapshot."""
        self._queue: list[tuple[bool, int, str]] | None = None
        """Heap of hosts for generators in the snapshot: whether trainer or critic is there, number of generators, name.
        None means not built."""
        self._layouts = dict[str, ParallelismConfig]()
        """Layouts of trainer and critic that differ from the settings."""
        self._displaced = list[str]()
        """Generators that were displaced and not reported yet."""
        for wanted in self._wanted:
            if wanted.device not in ("cpu", "cuda"):
                raise ConfigError(
                    f"{wanted.option} = {wanted.device!r} names devices, which are counted out on several hosts; use "
                    "'cuda', and cluster.place for the hosts"
                )
        self._begin(is_short=len(hosts) < config.cluster.num_hosts)
        if not config.generator.replicas and not only:
            self.take_generator(0)
            number = 1 + self.free_generator_slots()
            with self._standing_still():
                for i in range(1, number):
                    self.take(wanted_generator(config, i))

    def again(self, executor: str) -> tuple[HostShare, ...]:
        one = self._assigned[executor]
        if self._usable().keys() >= one.ranks.keys():
            return self.place(executor)
        self.leave(executor)
        try:
            return self._train_again(executor) if one.wanted.role in TRAINED else self.take(one.wanted)
        except NoRoom:
            self._assigned[executor] = one
            raise

    def can_not_move(self, executors: Sequence[str]) -> str:
        """Returns why executors could not all restart on the remaining hosts. Empty means that they could."""
        before = Assignments(self._assigned), dict(self._layouts), list(self._displaced)
        try:
            for executor in executors:
                one = self._assigned.pop(executor)
                _ = self._train_again(executor) if one.wanted.role in TRAINED else self.take(one.wanted)
        except NoRoom as error:
            return str(error)
        finally:
            self._assigned, self._layouts, self._displaced = before
        return ""

    def layout(self, executor: str) -> ParallelismConfig | None:
        return self._layouts.get(executor)

    def displaced(self) -> list[str]:
        told, self._displaced = self._displaced, []
        return told

    def _begin(self, *, is_short: bool) -> None:
        """Places all executors. With fewer hosts than before, trainer and critic may have smaller layouts, and one
        generator is enough. Raises NoRoom."""
        reason: NoRoom | None = None
        for share in self._shares("trainer") if is_short else [1.0]:
            self._assigned.clear()
            self._layouts = {name: one for name in TRAINED if (one := self._at_most(name, share))}
            try:
                with self._standing_still():
                    for wanted in self._wanted:
                        self._take_first(wanted, is_short=is_short)
                return
            except NoRoom as error:
                reason = reason or error
        assert reason is not None
        raise reason

    def _take_first(self, wanted: WantedExecutor, *, is_short: bool) -> None:
        """Places one executor at the start. Raises NoRoom."""
        if layout := self._layouts.get(wanted.executor):
            wanted = wanted._replace(num_ranks=layout.num_ranks)
        try:
            self.take(wanted)
        except NoRoom:
            if not (is_short and wanted.number):
                raise

    def _shares(self, executor: str) -> list[float]:
        """Returns the shares of its ranks that an executor may start with, in descending order."""
        layout = self._settings(executor).parallelism
        return list(dict.fromkeys(one.num_ranks / layout.num_ranks for one in (layout, *layout.smaller())))

    def _at_most(self, executor: str, share: float) -> ParallelismConfig | None:
        """Returns the layout for a share of the ranks, at least one. None means the layout of the settings."""
        layout = self._settings(executor).parallelism
        able = (one for one in layout.smaller() if one.num_ranks <= max(1.0, share * layout.num_ranks))
        return None if share >= 1 else next(able, None)

    def _settings(self, executor: str) -> TrainerConfig | CriticConfig:
        return self._config.trainer if executor == "trainer" else self._config.critic

    def _train_again(self, executor: str) -> tuple[HostShare, ...]:
        """Returns a place for trainer or critic, in the layout of the settings or the nearest one, on free devices or
        on those of generators. One generator stays. Raises NoRoom."""
        number = sum(not host.is_leaving for host in dict(self._hosts).values())
        if number < (fewest := self._config.cluster.fewest_hosts):
            setting = "min_hosts" if self._config.cluster.min_hosts else "num_hosts; cluster.min_hosts allows for fewer"
            are = "host is" if number == 1 else "hosts are"
            raise NoRoom(f"{number} {are} left, and the run needs {fewest} (cluster.{setting})")
        usable, reason = self._usable(), None
        for lost in [name for name in self.of_role("generator") if self._assigned[name].ranks.keys() - usable.keys()]:
            self.leave(lost)  # may not have been reported yet
        wanted = next(one for one in self._wanted if one.executor == executor)
        for share in self._shares(executor):
            layout = self._at_most(executor, share)
            one = wanted._replace(num_ranks=layout.num_ranks) if layout else wanted
            try:
                return self._displacing(one, layout)
            except NoRoom as error:
                reason = reason or error
        assert reason is not None
        raise reason

    def _displacing(self, wanted: WantedExecutor, layout: ParallelismConfig | None) -> tuple[HostShare, ...]:
        """Takes a place, displacing as few generators as possible. Raises NoRoom."""
        before, generators = self._assigned, self.of_role("generator")
        for first in range(len(generators), min(len(generators), 1) - 1, -1):
            left = set(generators[first:])
            self._assigned = Assignments({name: one for name, one in before.items() if name not in left})
            with suppress(NoRoom):
                place = self.take(wanted)
                taken = self._assigned[wanted.executor].devices
                for name in generators[first:]:
                    if not any(set(taken.get(host, ())) & set(own) for host, own in before[name].devices.items()):
                        self._assigned[name] = before[name]
                if self.of_role("generator") or self.free_generator_slots():
                    self._displaced += [name for name in generators if name not in self._assigned]
                    self._layouts.pop(wanted.executor, None)
                    self._layouts |= {wanted.executor: layout} if layout else {}
                    return place
        self._assigned = before
        self._assign(wanted)  # raises with the reason if there are too few devices
        raise NoRoom(f"{wanted.executor} would leave no device to a generator")

    def _usable(self) -> dict[str, Host]:
        """Returns the hosts where executors may run, by name."""
        return {name: host for name, host in dict(self._hosts).items() if not self.models or host in self.ready}

    def keepers(self) -> list[tuple[str, str]]:
        """Returns hosts for copies of checkpoints, those without trainer and critic first. Empty if the run needs all
        hosts."""
        cluster = self._config.cluster
        if not self._config.checkpoint.mirror or cluster.fewest_hosts == cluster.num_hosts:
            return []
        learning = self.hosts_of(*TRAINED)
        here = sorted(dict(self._hosts).items(), key=lambda item: (item[0] in learning, item[0]))
        return [host.keeper for _, host in here if not host.is_leaving]

    def on_host(self, name: str) -> list[str]:
        """Returns the executors on a host."""
        return list(self._assigned.at(name))

    def hosts_of(self, *roles: str) -> set[str]:
        """Returns the names of hosts with executors of these roles."""
        return {host for one in self._assigned.values() if one.wanted.role in roles for host in one.ranks}

    def free_generator_slots(self) -> int:
        """Returns the number of free places for generators, up to `generator.replicas` in total."""
        left = (self._config.generator.replicas or MAX_REPLICAS) - len(self.of_role("generator"))
        wanted, taken = self._generator(0), list[str]()
        with suppress(NoRoom), self._standing_still():
            for i in range(left):
                self.take(wanted._replace(executor=f"generator-?{i}"))
                taken.append(f"generator-?{i}")
        for executor in taken:
            self.leave(executor)
        return len(taken)

    def crowded(self) -> list[str]:
        return self._crowded({name: host.inventory.cores for name, host in dict(self._hosts).items()})

    def _assign(self, wanted: WantedExecutor) -> Assignment:
        """Assigns an executor to hosts and devices. Raises NoRoom."""
        if not self._stands_still:
            self._here = self._usable()
        if wanted.role != "generator" or not self._stands_still:
            self._queue = None
        elif found := self._assign_in_turn(wanted):
            return found
        names, num_ranks = list(self._candidates(wanted)), wanted.num_ranks
        spreads = wanted.role in TRAINED
        if wanted.device == "cpu":
            hosts = names if spreads and self._patterns("trainer", wanted.role) else names[:1]
            ends = [num_ranks * i // len(hosts) for i in range(len(hosts) + 1)]
            ranks = {host: end - start for host, start, end in zip(hosts, ends, ends[1:], strict=False) if end > start}
            return Assignment(wanted=wanted, ranks=ranks, devices=dict.fromkeys(ranks, ()))
        free = {name: self._free_devices(name) for name in names}
        spreads |= num_ranks > max(self._here[name].inventory.gpus for name in names)
        able = [name for name in names if len(free[name]) >= num_ranks][:1]
        if not able and spreads:  # the fewest hosts with enough devices
            able = sorted(names, key=lambda name: -len(free[name]))
        devices, left = dict[str, tuple[int, ...]](), num_ranks
        for name in able:
            if left and free[name]:
                devices[name] = free[name][:left]
                left -= len(devices[name])
        if not left:
            ranks = {name: len(own) for name, own in devices.items()}
            return Assignment(wanted=wanted, ranks=ranks, devices=devices)
        has = ", ".join(f"{name} has {len(own)}" for name, own in free.items())
        table = "".join(f"\n  {line}" for line in self.table())
        raise NoRoom(f"{wanted.executor} needs {num_ranks} GPUs; free GPUs: {has}:{table}")

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Takes a snapshot of the hosts, so that placing many generators is fast."""
        self._here, self._queue, self._stands_still = self._usable(), None, True
        try:
            yield
        finally:
            self._stands_still = False

    def _assign_in_turn(self, wanted: WantedExecutor) -> Assignment | None:
        """Places one of many generators on the first host in the heap with a free place. None means that no single host
        has one.

        Raises NoRoom.
        """
        if self._queue is None:
            self._queue = self._order(self._candidates(wanted))
        while self._queue:
            beside, number, name = self._queue[0]
            on_cpu, num_ranks = wanted.device == "cpu", wanted.num_ranks
            devices = () if on_cpu else self._free_devices(name)[:num_ranks]
            if self._may_have(name, num_ranks) if on_cpu else len(devices) == num_ranks:
                heapreplace(self._queue, (beside, number + 1, name))
                return Assignment(wanted=wanted, ranks={name: num_ranks}, devices={name: devices})
            heappop(self._queue)  # nor for the next generator
        return None

    def _order(self, names: Iterable[str]) -> list[tuple[bool, int, str]]:
        """Returns hosts for generators, the best first."""
        beside = set[str]() if self._patterns("generator") else self.hosts_of(*TRAINED)
        return sorted((name in beside, len(self._generators_at(name)), name) for name in names)

    def _patterns(self, *roles: str) -> list[str]:
        """Returns the host patterns of the last of these roles that has any."""
        for role in reversed(roles):
            if patterns := getattr(self._config.cluster.place, role):
                return patterns
        return []

    def _candidates(self, wanted: WantedExecutor) -> Iterator[str]:
        """Yields hosts for an executor, the best first. Raises NoRoom if there are none."""
        role, here = wanted.role, sorted(name for name, host in self._here.items() if not host.is_leaving)
        if role in TRAINED and self.lacks:
            here = [name for name in here if self.lacks.get(self._here[name]) == ""]
        with_trainer = self.hosts_of("trainer", "critic")
        patterns = self._patterns("trainer", role) if role == "critic" else self._patterns(role)
        names = [name for name in here if not patterns or any(fnmatchcase(name, one) for one in patterns)]
        if role == "generator":
            if not patterns and wanted.device == "cpu":
                names = [name for name in names if name not in with_trainer] or names
            if wanted.device == "cpu":
                names = [name for name in names if self._may_have(name, wanted.num_ranks)]
            names = [name for *_, name in self._order(names)]
        elif not patterns:
            crowd = len if role in TRAINED else lambda _: 0  # prefers an empty host
            beside = (lambda _: False) if role == "trainer" else (lambda name: name not in with_trainer)
            names.sort(key=lambda name: (beside(name), crowd(self.on_host(name)), name))
        if not names:
            matching = f" that match cluster.place.{role} = {patterns}" if patterns else ""
            all_here = [name + self._objection(name, host, wanted) for name, host in sorted(dict(self._hosts).items())]
            raise NoRoom(f"{wanted.executor} finds no host{matching}; these are here: {', '.join(all_here) or 'none'}")
        yield from names

    def _objection(self, name: str, host: Host, wanted: WantedExecutor) -> str:
        """Returns why an executor may not be on a host, in brackets. Empty means that only `cluster.place` can exclude
        it."""
        reason = ""
        if host.is_leaving:
            reason = "is about to leave"
        elif name not in self._here:
            reason = "has not fetched the model yet"
        elif wanted.role in TRAINED and self.lacks:
            reason = self.lacks.get(host, "was not looked at yet")
        elif wanted.role == "generator" and wanted.device == "cpu" and not self._may_have(name, wanted.num_ranks):
            reason = "all cores are taken"
        return f" ({reason})" if reason else ""

    def _generators_at(self, name: str) -> list[Assignment]:
        return [one for one in self._assigned.at(name).values() if one.wanted.role == "generator"]

    def _free_devices(self, name: str) -> tuple[int, ...]:
        taken = {device for one in self._assigned.at(name).values() for device in one.devices[name]}
        return tuple(device for device in range(self._here[name].inventory.gpus) if device not in taken)

    def _may_have(self, name: str, num_ranks: int) -> bool:
        """Returns whether a host has enough cores for another CPU generator, unless the settings fix the number of
        generators. A host without generators always takes one."""
        if self._config.generator.replicas:
            return True
        used = sum(max(one.wanted.threads, 1) * one.ranks[name] for one in self._assigned.at(name).values())
        threads = used + self._config.generator.threads * num_ranks
        return not self._generators_at(name) or threads <= self._here[name].inventory.cores


def imagined(config: RunConfig, names: Sequence[str] = ()) -> tuple[HostPlacer, int]:
    """Places executors on imagined hosts. Returns the placement and the smallest number of GPUs per host that suffices.

    Args:
        names: names of the hosts. Empty means `cluster.num_hosts` hosts, named to match `cluster.place`.

    Raises:
        ConfigError: no number of GPUs is sufficient.
    """
    wanted = [name for patterns in config.cluster.place.model_dump().values() for name in patterns]
    fitting = [re.sub(r"[*?]|\[.*?\]", "1", name) for name in wanted]
    others = [f"host-{i + 1}" for i in range(config.cluster.num_hosts)]
    all_names = list(dict.fromkeys([*fitting, *others]))[: max(config.cluster.num_hosts, len(set(fitting)))]
    reason: NoRoom | None = None
    for gpus in range(MAX_GPUS + 1):
        has = SimpleNamespace(gpus=gpus, cores=1)
        hosts = {name: SimpleNamespace(inventory=has, is_leaving=False) for name in names or all_names}
        try:
            return HostPlacer(config, cast(Mapping[str, Host], hosts)), gpus
        except NoRoom as error:
            reason = error
    assert reason is not None
    raise reason
