"""`HostMachines`: the hosts of a run, from connecting to leaving."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llamarl.cluster.api import Cluster, ExecutorHandle
from llamarl.cluster.open import prepare_monarch
from llamarl.config import ConfigError, RunConfig
from llamarl.config.cluster import ClusterConfig
from llamarl.controller.controller import Controller
from llamarl.controller.supervision import Interrupted, Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.net.reasons import plain
from llamarl.parts.hosts.certificates import CONTROLLER, check_controller, monarch_env
from llamarl.parts.hosts.heartbeat import beat
from llamarl.parts.hosts.hosting import HostPlacer
from llamarl.parts.hosts.hosts import Elastic, gathered, look_at
from llamarl.parts.hosts.registry import Host, Registry


def check(settings: ClusterConfig) -> None:
    """Raises ConfigError if hosts cannot connect here."""
    address, _, port = settings.listen.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
        socket.create_server(place, family=family).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.listen = {settings.listen!r}: {plain(error)}; name an address and a free port of this machine"
        ) from None
    check_controller(Path(settings.pki), settings.listen)


def open_registry(settings: ClusterConfig, log_folder: Path | None, tell: Callable[[str], None]) -> Registry:
    """Returns a registry for the hosts of a run. It does not listen yet.

    Args:
        tell: called with sentences about hosts that joined, were refused, or left.

    Raises:
        ConfigError: the controller has no certificate, or this machine does not have the address.
    """
    try:
        with socket.socket() as probe:
            probe.bind((settings.listen.rpartition(":")[0], 0))
    except OSError as error:
        cause = f"cluster.listen = {settings.listen!r}: {plain(error)}"
        raise ConfigError(f"{cause}; name an address of this machine") from None
    return Registry(Path(settings.pki), log_folder, tell)


class HostMachines:
    """The machines of one run."""

    hosts_may_join = True

    def __init__(
        self, config: RunConfig, logs: Path, folder: Path, tell: Callable[[str], None], only: str, *, resume: bool
    ) -> None:
        """Raises ConfigError."""
        self._config, self._logs, self._folder, self._only = config, logs, folder, only
        self._resume = resume
        self._registry = open_registry(config.cluster, logs, tell)
        self._hosting: HostPlacer | None = None

    def open(self) -> Cluster:
        prepare_monarch(self._logs)
        from llamarl.parts.hosts.cluster import HostsCluster

        settings = self._config.cluster
        env = monarch_env(Path(settings.pki), CONTROLLER)
        return HostsCluster(self._registry, settings.listen.rpartition(":")[0], env)

    async def places(self, tell: Callable[[str], None]) -> HostPlacer:
        self._beating = asyncio.create_task(beat())
        self._hosting = await gathered(
            self._config, self._registry, self._folder, tell, self._only, resume=self._resume
        )
        return self._hosting

    def follow(self, controller: Controller, telemetry: Telemetry, supervisor: Supervisor) -> None:
        assert self._hosting is not None, "places come first"
        look = partial(look_at, self._config, self._hosting, self._folder)
        Elastic(self._registry, self._hosting, controller, telemetry, supervisor, look, self._config.cluster)

    def end_with(self, handle: ExecutorHandle, supervisor: Supervisor) -> None:
        let_leave(self._registry, handle, supervisor)


def let_leave(registry: Registry, handle: ExecutorHandle, supervisor: Supervisor) -> None:
    """Releases hosts that ask to leave. If one of them has executors, ends the run with a checkpoint."""

    def leaves(host: Host) -> None:
        if host.name in handle.hosts:
            supervisor.fail(Interrupted(f"ended, as host {host.name} leaves, which runs {handle.name}"))
        else:
            registry.dismiss(host, "nothing runs there")

    registry.leaves = leaves
    for host in [host for host in registry.hosts.values() if host.is_leaving]:
        leaves(host)
