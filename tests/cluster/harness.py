"""What the tests of all clusters share. No torch in any worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from llamarl.cluster.api import (
    Cluster,
    ExecutorSpec,
)
from llamarl.cluster.open import open_cluster
from llamarl.config.cluster import ClusterConfig

Kind = Literal["monarch", "inline"]
HERE = Path(__file__).parent
SPAWN_S = 240.0
CALL_S = 240.0


def echo(name: str = "echo", target: str = "executors:Echo", **options: Any) -> ExecutorSpec:
    return ExecutorSpec(name=name, target=target, options=options, code_paths=(str(HERE),))


def run(main: Callable[[Cluster], Awaitable[None]], kind: Kind, log_folder: Path | None = None) -> None:
    async def within() -> None:
        async with asyncio.timeout(500.0):
            async with open_cluster(ClusterConfig(kind=kind), log_folder) as cluster:
                await main(cluster)

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
