"""`Machines`: where a run computes, this machine or the hosts that a part waits for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from llamarl.cluster.api import Cluster, ExecutorHandle
from llamarl.cluster.open import open_cluster
from llamarl.config import RunConfig
from llamarl.config.ref import part
from llamarl.controller.controller import Controller
from llamarl.controller.supervision import Supervisor
from llamarl.controller.telemetry import Telemetry
from llamarl.run.placement import LocalPlacer, Placer


class Machines(Protocol):
    """One run's, by `cluster.kind`."""

    hosts_may_join: bool
    """There may be places later that are not there now."""

    def open(self) -> Cluster:
        """Once. Raises ConfigError: something is missing that this kind needs."""
        ...

    async def places(self, tell: Callable[[str], None]) -> Placer:
        """Places where executors are started, once all machines are there. Raises ConfigError."""
        ...

    def follow(self, controller: Controller, telemetry: Telemetry, supervisor: Supervisor) -> None:
        """Lets generators come and go with their machines from here on."""

    def end_with(self, handle: ExecutorHandle, supervisor: Supervisor) -> None:
        """Ends the run, with a checkpoint, when the machine of this executor leaves."""


class ThisMachine:
    """Stays as it is."""

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
    """
    Args:
        folder: of the run, which trainer and critic write checkpoints to.
        placer: of this machine; None with several hosts.
        tell: gets a sentence for people: who came, was refused, left.
        only: the one role that there is; empty: all that the config asks for.
        resume: the run goes on, with as few hosts as it may.

    Raises:
        ConfigError: hosts cannot call here.
    """
    if placer is None:
        return part("hosts", "HostMachines")(config, logs, folder, tell, only, resume=resume)
    return ThisMachine(config, logs, placer)
