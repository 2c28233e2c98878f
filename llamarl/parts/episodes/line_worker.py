"""A worker process that answers many items at the same time: one JSON line each, in and out. No torch."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from llamarl.child import stream_to_parent

MAX_LINE_BYTES = 1 << 28
_PR_SET_PDEATHSIG = 1


def limit_this_process(memory_bytes: int, parent: int) -> None:
    """Bounds the memory of this process, and ends it with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


async def serve(answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
    """Answers items by their `number` until the parent closes the stream."""
    reader, writer = await asyncio.open_connection(sock=stream_to_parent(), limit=MAX_LINE_BYTES)
    running = set[asyncio.Task[None]]()

    async def run(item: dict[str, Any]) -> None:
        said = await answer(item)
        writer.write(json.dumps({"number": item["number"]} | said).encode() + b"\n")
        await writer.drain()

    while line := await reader.readline():
        task = asyncio.create_task(run(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
