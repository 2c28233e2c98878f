"""`open_cluster`: opens the backend of a setting. Each backend is imported only if it is used."""

from __future__ import annotations

import os
from pathlib import Path

from llamarl.cluster.api import Cluster
from llamarl.cluster.engine_files import log_env, own_temporary_folder
from llamarl.config.cluster import ClusterConfig, lack_of_monarch
from llamarl.config.errors import ConfigError
from llamarl.config.ref import part


def check_cluster(settings: ClusterConfig) -> None:
    """Checks, before anything is started, that this machine has what `settings` require. Raises ConfigError."""
    if settings.kind in ("monarch", "hosts") and (lack := lack_of_monarch()):
        where = "" if settings.kind == "monarch" else " on one machine"
        raise ConfigError(f"cluster.kind = {settings.kind!r}: {lack}, or set cluster.kind = 'processes'{where}")
    if settings.kind == "hosts":
        part("hosts", "check")(settings)


def open_cluster(settings: ClusterConfig, log_folder: Path | None = None) -> Cluster:
    """Opens the cluster of `settings` on this machine.

    Args:
        log_folder: folder for the standard output and error of each rank, in `<executor>.log`, or
            `<executor>.<rank>.log` for several ranks. None means those of this process.

    Raises:
        ConfigError: this kind needs something that is missing.
    """
    if settings.kind == "inline":
        from llamarl.cluster.inline import InlineCluster

        return InlineCluster(log_folder)
    if settings.kind == "processes":
        own_temporary_folder()
        from llamarl.cluster.processes import ProcessCluster

        return ProcessCluster(log_folder)
    prepare_monarch(log_folder)
    from llamarl.cluster.monarch import MonarchCluster

    return MonarchCluster(log_folder)


def prepare_monarch(log_folder: Path | None) -> None:
    """Sets Monarch's environment variables, which it reads when it is imported."""
    own_temporary_folder()
    os.environ.update(log_env(log_folder))
