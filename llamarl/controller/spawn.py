"""Starts executors side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, RemoteError
from llamarl.config import ConfigError


async def spawn_all(cluster: Cluster, specs: Sequence[ExecutorSpec], timeout_s: float) -> list[ExecutorHandle]:
    """All executors, in the order of `specs`.

    Raises:
        ConfigError: a mistake of the user that only an executor could see, such as damaged weights.
        ExecutorError: one of them did not start.
    """
    try:
        return await asyncio.gather(*(cluster.spawn(spec, timeout_s) for spec in specs))
    except RemoteError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise
