"""What the tests of all clusters share. No torch in any worker."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from llamarl.cluster import fork_server
from llamarl.cluster.api import (
    Cluster,
    ExecutorSpec,
)
from llamarl.cluster.fork_server import ForkServer
from llamarl.cluster.launcher import SERVER
from llamarl.cluster.open import open_cluster
from llamarl.config.cluster import ClusterConfig

Kind = Literal["monarch", "inline", "forked", "processes", "forked processes"]
"""Clusters; in `forked` ones, which else are Monarch's, a server forks the ranks."""
HERE = Path(__file__).parent
SPAWN_S = 240.0
CALL_S = 240.0


def echo(name: str = "echo", target: str = "executors:Echo", **options: Any) -> ExecutorSpec:
    return ExecutorSpec(name=name, target=target, options=options, code_paths=(str(HERE),))


@contextmanager
def forking(*light: str) -> Iterator[ForkServer]:
    """A server of this process that has imported the executors of these tests."""
    sys.path.insert(0, str(HERE))
    try:
        server = ForkServer([["json", *light], ["executors"]])
    finally:
        sys.path.remove(str(HERE))
    os.environ[SERVER] = server.place
    fork_server._shared.append(server)
    try:
        yield server
    finally:
        fork_server.end()


def run(main: Callable[[Cluster], Awaitable[None]], kind: Kind, log_folder: Path | None = None) -> None:
    config = ClusterConfig(kind="monarch" if kind == "forked" else kind.removeprefix("forked "))

    async def within() -> None:
        async with asyncio.timeout(500.0):
            async with open_cluster(config, log_folder) as cluster:
                await main(cluster)

    with forking() if "forked" in kind else nullcontext():
        asyncio.run(within())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until the condition holds; fails after `timeout_s`."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - start_s
