"""The hosts of a run: waiting for them, looking at them, and what follows when one comes or asks to leave."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from llamarl.cluster.api import ExecutorError, port
from llamarl.config import ConfigError, RunConfig
from llamarl.config.cluster import ClusterConfig
from llamarl.controller.controller import Controller
from llamarl.controller.ports import OptimizingPort
from llamarl.controller.supervision import Interrupted, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.observability.report import role_of
from llamarl.parts.hosts.certificates import check_controller
from llamarl.parts.hosts.home import BLAST_S, BROKEN
from llamarl.parts.hosts.hosting import HostPlacer
from llamarl.parts.hosts.registry import Host, Registry
from llamarl.run.hub_pins import named
from llamarl.run.placement import models_in_use

WIRE_BYTES = 256 << 20
"""Bytes that are sent to measure a wire."""
PORTS = "32768 to 60999 (net.ipv4.ip_local_port_range)"
"""Ports that the system gives away, unless it was changed."""
FETCH_S = 6 * 3600.0
"""Longest wait in seconds for a host to fetch the models of the Hub: a terabyte at 50 MB/s. It gives up much earlier
when nothing comes."""
RETURN_S = 10.0
"""Seconds without another host after which a run that goes on has waited enough, once `cluster.min_hosts` are here: one
that has lost the controller calls again within them."""
LOOK_S = 10.0
"""Longest wait in seconds for a host to look for files; a network file system may be slow."""


async def gathered(
    config: RunConfig,
    registry: Registry,
    folder: Path,
    tell: Callable[[str], None],
    only: str = "",
    *,
    resume: bool = False,
) -> HostPlacer:
    """Waits for the hosts; who runs where, once each has been found to see the files that it needs.

    Args:
        folder: of the run, which trainer and critic write checkpoints to.
        tell: gets a line for people, for each host and each executor.
        only: as for `HostPlacer`.
        resume: the run goes on; with `cluster.min_hosts`, soon.

    Raises:
        ConfigError: too few came, one lacks a file, or an executor has no place.
    """
    settings = config.cluster
    place = await registry.open(settings.listen)
    fewest, patience_s = settings.fewest_hosts, RETURN_S if resume else settings.timeout_s
    least = f", and going on with {fewest}" if fewest < settings.num_hosts else ""
    tell(f"waiting at {place} for hosts to call, {settings.num_hosts} in all{least}")
    await registry.until(settings.num_hosts, settings.timeout_s, fewest, patience_s)
    registry.leaves = lambda host: None  # what is about to start there decides
    hosting = HostPlacer(config, registry.hosts, only)
    hosts = list(registry.hosts.values())
    await asyncio.gather(*(look_at(config, hosting, folder, host) for host in hosts))
    if models := of_hub(config):
        tell(f"hosts fetch {', '.join(models)}, unless they have it")
        await asyncio.gather(*(fetch(host, models) for host in hosts))
        hosting.models, hosting.ready = models, set(hosts)
    for line in (*(host.describe() for host in hosts), *hosting.table(), *hosting.crowded()):
        tell(line)
    if idle := [host.name for host in hosts if not hosting.on_host(host.name)]:
        tell(f"nothing runs on {', '.join(idle)} until another host is lost or leaves")
    if text := unused_addresses(hosting, registry.hosts):
        registry.tell(text)
    return hosting


def unused_addresses(hosting: HostPlacer, hosts: Mapping[str, Host]) -> str:
    """A sentence about generators' hosts whose address for weights the trainer's do not take; empty: they do."""
    learning, serving = hosting.hosts_of("trainer"), hosting.hosts_of("generator")
    own = {name: host.inventory.has_own_wire for name, host in sorted(dict(hosts).items())}
    lack = [name for name in own if name in learning and not own[name]]
    have = [name for name in own if name in serving - learning and own[name]]
    if not (lack and have):
        return ""
    return (
        f"--weights-address of {', '.join(have)}: the trainer's weights do not take it, as generators connect to "
        f"{', '.join(lack)}, which has none; start `llamarl host` there with one too, or leave it out"
    )


def inspect(config: RunConfig, tell: Callable[[str], None]) -> None:
    """Waits for the hosts of a run, says who would be where, and how fast weights would go from each trainer host to
    each generator host; nothing is started.

    Raises:
        ConfigError: as `gathered`, or hosts cannot reach others.
    """
    asyncio.run(_inspect(config, tell))


async def _inspect(config: RunConfig, tell: Callable[[str], None]) -> None:
    check_controller(Path(config.cluster.pki), config.cluster.listen)
    registry = Registry(Path(config.cluster.pki), None, tell)
    try:
        with TemporaryDirectory(dir=_existing(Path(config.output).absolute())) as folder:
            hosting = await gathered(config, registry, Path(folder), tell)
        writers, readers = (sorted(hosting.hosts_of(role)) for role in ("trainer", "generator"))
        faults = list[str]()
        for writer, reader in product(writers, readers):
            if writer != reader:
                speed, fault = await wire(registry.hosts[writer], registry.hosts[reader])
                if fault:
                    faults.append(fault)
                else:
                    tell(f"{writer} to {reader}: {speed / 1e9:.2f} GB/s by one stream")
        if faults:
            raise ConfigError("\n".join(faults))
    finally:
        await registry.close()


def _existing(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())


async def wire(writer: Host, reader: Host) -> tuple[float, str]:
    """Bytes per second from a trainer's host to a generator's, which connects to it as in a run; or why not, in a
    sentence. Raises ConfigError: one of them does not answer."""
    wanted = {"num_bytes": WIRE_BYTES, "secret": secrets.token_hex(16)}
    address = writer.inventory.weights_address
    try:
        port = (await writer.ask("offer", **wanted))["port"]
        found = await reader.ask("pull", 2 * BLAST_S, address=address, port=port, **wanted)
    except BROKEN as error:
        raise ConfigError(f"the wire from host {writer.name} to {reader.name} could not be measured: {error}") from None
    if "failed" not in found:
        return found["bytes_per_s"], ""
    what = f"host {writer.name}" + "'s --weights-address" * writer.inventory.has_own_wire
    return 0.0, (
        f"host {reader.name} cannot reach {address}:{port} ({what}), from where its generators get weights: "
        f"{found['failed']}; let it through to ports {PORTS} there, or start `llamarl host` on {writer.name} with a "
        f"--weights-address that {reader.name} reaches"
    )


async def look_at(config: RunConfig, hosting: HostPlacer, folder: Path, host: Host) -> None:
    """Looks whether a host has what those need that are there, and what trainer and critic would need that come there.

    Raises:
        ConfigError: a file is not there, or the folder of the run is another one, for an executor that is there.
    """
    executors = hosting.on_host(host.name)
    models = [config.model.path, *(one.path for one in models_in_use(config).values() if one.path)]
    here = [Path(path).absolute() for path in models if Path(path).exists()]  # a warm start may be to come
    writers = [name for name in executors if name in ("trainer", "critic")]
    shared = str(folder.absolute())
    try:
        with _token(folder) as token:
            found = await host.ask("look", LOOK_S, paths=list(map(str, here)), folder=shared, token=token)
    except BROKEN as error:
        raise ConfigError(f"host {host.name} could not be looked at: {error}") from None
    lacks = [f"lacks {', '.join(found['missing'])}"] if found["missing"] else []
    lacks += [f"does not see the run's folder {shared}: {found['folder']}"] if found["folder"] else []
    hosting.lacks[host] = "; ".join(lacks)
    if found["missing"] and executors:
        raise ConfigError(
            f"host {host.name} has no {', '.join(found['missing'])}; all hosts need the same paths: use a folder that "
            "they share, or the same image"
        )
    if found["folder"] and writers:
        raise ConfigError(
            f"host {host.name} runs {', '.join(writers)}, which writes checkpoints, but "
            f"{shared} there is not the run's folder ({found['folder']}); share it, choose "
            "another --output, or name another host in cluster.place.trainer"
        )


def of_hub(config: RunConfig) -> list[str]:
    """Models of the Hub that executors of a run read, as `owner/name@commit`. Raises ConfigError."""
    names = (one.name for one in named(config) if one.kind == "model")
    return sorted({str(name) for name in names if name is not None and name.is_pinned})


async def fetch(host: Host, models: Sequence[str]) -> None:
    """Lets a host fetch models, once for all of its executors. Raises ConfigError: it cannot, or is lost meanwhile."""
    try:
        found = await host.ask("fetch", FETCH_S, names=list(models))
    except BROKEN as error:
        raise ConfigError(f"host {host.name} has not fetched {', '.join(models)}: {error}") from None
    if found["failed"]:
        raise ConfigError(f"host {host.name}: {found['failed']}")


@contextmanager
def _token(folder: Path) -> Iterator[str]:
    """The name of a file in the run's folder that says the same: who finds it sees that folder."""
    token = f".seen-{secrets.token_hex(8)}"
    (folder / token).write_text(token)
    try:
        yield token
    finally:
        (folder / token).unlink(missing_ok=True)


class Elastic:
    """Generators come and go with their hosts."""

    def __init__(
        self,
        registry: Registry,
        hosting: HostPlacer,
        controller: Controller,
        telemetry: Telemetry,
        supervisor: Supervisor,
        look: Callable[[Host], Awaitable[None]],
        settings: ClusterConfig,
    ) -> None:
        """`look`s whether trainer and critic may come to a host."""
        self._registry, self._hosting, self._look, self._settings = registry, hosting, look, settings
        self._controller, self._telemetry, self._supervisor = controller, telemetry, supervisor
        self._leaving = set[Host]()
        registry.joined, registry.leaves = self._joined, self._leaves
        for host in list(registry.hosts.values()):
            if hosting.lacks.get(host) != "":
                supervisor.start(self._looked(host), f"look at host {host.name}")
            if host.is_leaving:
                self._leaves(host)
            elif hosting.models and host not in hosting.ready:
                self._joined(host)
        controller.recovery.fill(sys.maxsize)  # on hosts that came meanwhile

    def _joined(self, host: Host) -> None:
        self._supervisor.start(self._looked(host), f"look at host {host.name}")
        if self._hosting.models:
            self._supervisor.start(self._supply(host), f"models for host {host.name}")
        else:
            self._fill(host)

    async def _looked(self, host: Host) -> None:
        """Trainer and critic hear of a host that may keep their states, and start there if it has what they need."""
        try:
            await self._look(host)
        except ConfigError as error:
            self._telemetry.warn(f"trainer and critic would not start on host {host.name}: {error}")
        executors = self._controller.executors
        if keepers := self._hosting.keepers():
            for one in (executors.trainer, executors.models.get("critic")):
                if one is not None:
                    await port(OptimizingPort, one, self._settings.timeout_s).choose_keepers(keepers)

    async def _supply(self, host: Host) -> None:
        """Executors may be there once it has the models."""
        try:
            await fetch(host, self._hosting.models)
        except ConfigError as error:
            self._telemetry.warn(f"nothing starts on host {host.name}: {error}")
            return
        self._hosting.ready.add(host)
        self._fill(host)

    def _fill(self, host: Host) -> None:
        number = self._controller.recovery.fill(sys.maxsize)
        follows = f"; {number} generators start" if number else ""
        self._telemetry.warn(f"{host.describe()} has come{follows}")

    def _leaves(self, host: Host) -> None:
        if host not in self._leaving:  # one that asked as this began is told of twice
            self._leaving.add(host)
            self._supervisor.start(self._empty(host), f"leave of host {host.name}")

    async def _empty(self, host: Host) -> None:
        """Others take over what runs there; then it may go. What cannot be taken over ends the run, with a
        checkpoint."""
        recovery, executors = self._controller.recovery, self._hosting.on_host(host.name)
        fixed = [name for name in executors if role_of(name) != "generator"]
        if fixed and (reason := self._hosting.can_not_move(fixed)):
            ended = f"ended, as host {host.name} leaves, which runs {', '.join(fixed)}: {reason}"
            self._supervisor.fail(Interrupted(ended))
            return
        executors = [name for name in executors if name not in fixed]  # these start elsewhere as the host goes
        for name in executors:
            self._hosting.leave(name)
        recovery.fill(len(executors))
        await recovery.until_others(executors)
        # What still starts there ends as the host goes; it may have come up while another one left.
        while here := [one.name for one in recovery.staying if one.name in executors]:
            try:
                await recovery.remove(here[0], self._settings.shutdown_timeout_s)
            except ValueError as error:
                self._supervisor.fail(Interrupted(f"ended, as host {host.name} leaves: {error}"))
                return
            except ExecutorError as error:
                self._telemetry.warn(f"host {host.name} leaves without order: {error}")
        self._telemetry.warn(f"host {host.name} has left; {', '.join([*fixed, *executors]) or 'nothing'} ran there")
        self._registry.dismiss(host, f"host {host.name} has left the run")
