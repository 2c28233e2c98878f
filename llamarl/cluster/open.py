"""`open_cluster`: the backend that a setting names. Each is imported only where it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from llamarl.cluster.api import Cluster
from llamarl.config.errors import ConfigError


def open_cluster(kind: Literal["monarch", "inline"], log_folder: Path | None = None) -> Cluster:
    """The cluster named by the setting `cluster.kind`.

    With `log_folder`, the standard output and error of each rank go to `<log_folder>/<executor>.log`
    (`<executor>.<rank>.log` above one rank). Raises ConfigError.
    """
    if kind == "inline":
        from llamarl.cluster.inline import InlineCluster

        return InlineCluster()
    if kind == "monarch":
        from llamarl.cluster.monarch import MonarchCluster

        return MonarchCluster(log_folder)
    raise ConfigError(f"cluster.kind = {kind!r} is unknown; use 'monarch' or 'inline'")
