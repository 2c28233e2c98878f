"""`open_cluster`: the backend that a setting names. Each is imported only where it is used."""

from __future__ import annotations

import os
from pathlib import Path

from llamarl.cluster.api import Cluster
from llamarl.cluster.engine_files import log_env, own_temporary_folder
from llamarl.config.cluster import ClusterConfig, lack_of_monarch
from llamarl.config.errors import ConfigError
from llamarl.config.ref import part


def check_cluster(settings: ClusterConfig) -> None:
    """Whether this machine has what `settings` ask for, before anything is started. Raises ConfigError."""
    if settings.kind != "inline" and (lack := lack_of_monarch()):
        raise ConfigError(f"cluster.kind = {settings.kind!r}: {lack}, or set cluster.kind = 'inline'")
    if settings.kind == "hosts":
        part("hosts", "check")(settings)


def open_cluster(settings: ClusterConfig, log_folder: Path | None = None) -> Cluster:
    """The cluster on this machine that `settings` ask for.

    With `log_folder`, the standard output and error of each rank go to `<log_folder>/<executor>.log`
    (`<executor>.<rank>.log` above one rank).

    Raises:
        ConfigError: something is missing that this kind needs.
    """
    if settings.kind == "inline":
        from llamarl.cluster.inline import InlineCluster

        return InlineCluster(log_folder)
    prepare_monarch(log_folder)
    from llamarl.cluster.monarch import MonarchCluster

    return MonarchCluster(log_folder)


def prepare_monarch(log_folder: Path | None) -> None:
    """Before it is imported: it looks at the environment then."""
    own_temporary_folder()
    os.environ.update(log_env(log_folder))
