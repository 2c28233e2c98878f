"""`open_cluster`: the backend that a setting names. Each is imported only where it is used."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path

from llamarl.cluster.api import Cluster
from llamarl.cluster.engine_files import log_env, own_temporary_folder
from llamarl.config.cluster import ClusterConfig
from llamarl.config.errors import ConfigError
from llamarl.parts.hosts.certificates import CONTROLLER, monarch_env, server_context
from llamarl.parts.hosts.registry import Registry


def check_cluster(settings: ClusterConfig) -> None:
    """Whether this machine has what `settings` ask for, before anything is started. Raises ConfigError."""
    if settings.kind != "inline" and importlib.util.find_spec("monarch") is None:
        raise ConfigError(
            f"cluster.kind = {settings.kind!r} needs Monarch, which is not installed; pip install "
            "'torchmonarch>=0.7,<0.8', or set cluster.kind = 'inline'"
        )
    if settings.kind == "hosts":
        server_context(Path(settings.pki), CONTROLLER)
        address, _, port = settings.listen.rpartition(":")
        try:
            family, _, _, _, place = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
            socket.create_server(place, family=family).close()
        except OSError as error:
            raise ConfigError(
                f"cluster.listen = {settings.listen!r}: {error.strerror}; name a free port here"
            ) from None


def open_cluster(settings: ClusterConfig, log_folder: Path | None = None, registry: Registry | None = None) -> Cluster:
    """The cluster that `settings` ask for.

    With `log_folder`, the standard output and error of each rank go to `<log_folder>/<executor>.log`
    (`<executor>.<rank>.log` above one rank).

    Args:
        registry: where hosts call, for several.

    Raises:
        ConfigError: something is missing that this kind needs.
    """
    if settings.kind == "inline":
        from llamarl.cluster.inline import InlineCluster

        return InlineCluster()
    own_temporary_folder()
    os.environ.update(log_env(log_folder))  # before Monarch is imported: it looks then
    from llamarl.cluster.monarch import HostsCluster, MonarchCluster

    if registry is None:
        return MonarchCluster(log_folder)
    return HostsCluster(registry, settings.listen.rpartition(":")[0], monarch_env(Path(settings.pki), CONTROLLER))


def open_registry(settings: ClusterConfig, log_folder: Path | None, tell: Callable[[str], None]) -> Registry | None:
    """Where the hosts of a run call, which does not listen yet; None: there is one machine.

    Args:
        tell: gets a sentence for people: who came, was refused, left.

    Raises:
        ConfigError: the controller has no certificate, or this machine does not have the address.
    """
    if settings.kind != "hosts":
        return None
    try:
        with socket.socket() as probe:
            probe.bind((settings.listen.rpartition(":")[0], 0))
    except OSError as error:
        cause = f"cluster.listen = {settings.listen!r}: {error.strerror}"
        raise ConfigError(f"{cause}; name an address of this machine") from None
    return Registry(Path(settings.pki), log_folder, tell)
