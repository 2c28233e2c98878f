"""Worker process of environments whose `reply` is a coroutine: one JSON line for each episode, in and out. Many
episodes wait at the same time. No torch."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable
from typing import Any, cast

from llamarl.child import stream_to_parent
from llamarl.parts.episodes.environments._worker import as_item, close, close_all, opened

MAX_LINE_BYTES = 1 << 28
MAX_REASON_CHARS = 200
_PR_SET_PDEATHSIG = 1


async def answer(item: dict[str, Any]) -> dict[str, Any]:
    """Returns the reply to an item in the form of `_worker.reply`, or `error`; `seconds` is its time.

    An item with `ended` only closes the state of that episode.
    """
    start_s, limit = time.monotonic(), asyncio.timeout(item["step_s"])
    try:
        if "ended" in item:
            close(item["ended"])
            return {"end": True}
        environment, task, turns = opened(item)
        async with limit:
            said = as_item(await cast("Awaitable[Any]", environment.reply(task, turns)))
    except Exception as error:  # an environment's exception ends its episode
        reason = f"environment: {type(error).__name__}: {error}"[:MAX_REASON_CHARS]
        said = {"error": f"environment took over {item['step_s']:g} s" if limit.expired() else reason}
    return said | {"seconds": time.monotonic() - start_s}


async def serve(stream: socket.socket) -> None:
    """Answers until the parent closes the stream, then closes the states of all episodes."""
    reader, writer = await asyncio.open_connection(sock=stream, limit=MAX_LINE_BYTES)
    running = set[asyncio.Task[None]]()

    async def run(item: dict[str, Any]) -> None:
        said = await answer(item)
        writer.write(json.dumps({"number": item["number"]} | said).encode() + b"\n")
        await writer.drain()

    while line := await reader.readline():
        task = asyncio.create_task(run(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    close_all()


if __name__ == "__main__":
    memory_bytes, parent = int(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    asyncio.run(serve(stream_to_parent()))
