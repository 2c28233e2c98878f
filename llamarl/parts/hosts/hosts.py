"""Waits for the hosts of a run, checks them, and handles hosts that join or ask to leave."""

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
from llamarl.run.placement import model_paths

WIRE_BYTES = 256 << 20
"""Bytes of a bandwidth measurement."""
PORTS = "32768 to 60999 (net.ipv4.ip_local_port_range)"
"""Default range of ephemeral ports."""
FETCH_S = 6 * 3600.0
"""Maximum seconds for a host to fetch models of the Hub: a terabyte at 50 MB/s. The fetch gives up much earlier without
progress."""
RETURN_S = 10.0
"""Seconds to wait for further hosts when a run resumes and `cluster.min_hosts` are connected. Hosts that lost the
controller reconnect within this time."""
LOOK_S = 10.0
"""Maximum seconds for a host to check for files. A network file system may be slow."""


async def gathered(
    config: RunConfig,
    registry: Registry,
    folder: Path,
    tell: Callable[[str], None],
    only: str = "",
    *,
    resume: bool = False,
) -> HostPlacer:
    """Waits for the hosts. Returns the placement, after every host has been checked for the files that it needs.

    Args:
        folder: folder of the run, to which trainer and critic write checkpoints.
        tell: called with a line for each host and each executor.
        only: as for `HostPlacer`.
        resume: the run is resumed; with `cluster.min_hosts`, waits only briefly for further hosts.

    Raises:
        ConfigError: too few hosts connected, a host lacks a file, or an executor has no place.
    """
    settings = config.cluster
    place = await registry.open(settings.listen)
    fewest, patience_s = settings.fewest_hosts, RETURN_S if resume else settings.timeout_s
    least = f", and going on with {fewest}" if fewest < settings.num_hosts else ""
    tell(f"waiting at {place} for hosts to call, {settings.num_hosts} in all{least}")
    await registry.until(settings.num_hosts, settings.timeout_s, fewest, patience_s)
    registry.leaves = lambda host: None  # the later executors decide
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
    """Returns a sentence about generator hosts with a weights address that the trainer's hosts do not use. Empty means
    none."""
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
    """Waits for the hosts of a run, prints the placement, and measures the bandwidth from each trainer host to each
    generator host. Starts nothing.

    Raises:
        ConfigError: as for `gathered`, or a host cannot reach another.
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
    """Returns the folder, or its nearest existing parent."""
    return next(one for one in (folder, *folder.parents) if one.is_dir())


async def wire(writer: Host, reader: Host) -> tuple[float, str]:
    """Returns bytes per second from a trainer's host to a generator's host, connected as in a run, or an error. Raises
    ConfigError if a host does not answer."""
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
    """Checks whether a host has the files of its executors, and the files that trainer and critic would need there.

    Raises:
        ConfigError: a file is missing, or the run folder is not the same, for an executor on the host.
    """
    executors = hosting.on_host(host.name)
    models = [config.model.path, *(path for _, _, path in model_paths(config))]
    here = [Path(path).absolute() for path in models if Path(path).exists()]  # a warm start may create the rest
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
    """Returns the Hub models that executors of a run read, as `owner/name@commit`. Raises ConfigError."""
    names = (one.name for one in named(config) if one.kind == "model")
    return sorted({str(name) for name in names if name is not None and name.is_pinned})


async def fetch(host: Host, models: Sequence[str]) -> None:
    """Makes a host fetch models for its executors. Raises ConfigError if it fails or disconnects."""
    try:
        found = await host.ask("fetch", FETCH_S, names=list(models))
    except BROKEN as error:
        raise ConfigError(f"host {host.name} has not fetched {', '.join(models)}: {error}") from None
    if found["failed"]:
        raise ConfigError(f"host {host.name}: {found['failed']}")


@contextmanager
def _token(folder: Path) -> Iterator[str]:
    """Creates a file in the run folder whose name equals its content. A host that can read it sees the same folder."""
    token = f".seen-{secrets.token_hex(8)}"
    (folder / token).write_text(token)
    try:
        yield token
    finally:
        (folder / token).unlink(missing_ok=True)


class Elastic:
    """Adds and removes generators as hosts join and leave."""

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
        """`look` checks whether trainer and critic may run on a host."""
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
        controller.recovery.fill(sys.maxsize)  # on hosts that joined meanwhile

    def _joined(self, host: Host) -> None:
        self._supervisor.start(self._looked(host), f"look at host {host.name}")
        if self._hosting.models:
            self._supervisor.start(self._supply(host), f"models for host {host.name}")
        else:
            self._fill(host)

    async def _looked(self, host: Host) -> None:
        """Offers a host to trainer and critic for copies of their state, and as a place to restart if it has the
        files."""
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
        """Allows executors on a host once it has the models."""
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
        if host not in self._leaving:  # a host that asked during startup is reported twice
            self._leaving.add(host)
            self._supervisor.start(self._empty(host), f"leave of host {host.name}")

    async def _empty(self, host: Host) -> None:
        """Moves the executors of a host to others and releases it. If that is impossible, ends the run with a
        checkpoint."""
        recovery, executors = self._controller.recovery, self._hosting.on_host(host.name)
        fixed = [name for name in executors if role_of(name) != "generator"]
        if fixed and (reason := self._hosting.can_not_move(fixed)):
            ended = f"ended, as host {host.name} leaves, which runs {', '.join(fixed)}: {reason}"
            self._supervisor.fail(Interrupted(ended))
            return
        executors = [name for name in executors if name not in fixed]  # these restart elsewhere when the host leaves
        for name in executors:
            self._hosting.leave(name)
        recovery.fill(len(executors))
        await recovery.until_others(executors)
        # Executors that are still starting there end with the host. They may have started while another host left.
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
