"""Worker process of environments whose `reply` is a coroutine: one JSON line for each episode, in and out. Many
episodes wait at the same time. No torch."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable
from inspect import isawaitable
from typing import Any, cast

from llamarl.parts.episodes.environments._worker import as_end, as_item, close, close_all, opened
from llamarl.parts.episodes.line_worker import limit_this_process, serve

MAX_REASON_CHARS = 200


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
            if item.get("is_over"):
                judged = environment.ended(task, turns)
                said = as_end(await judged if isawaitable(judged) else judged)
            else:
                said = as_item(await cast("Awaitable[Any]", environment.reply(task, turns)))
    except Exception as error:  # an environment's exception ends its episode
        reason = f"environment: {type(error).__name__}: {error}"[:MAX_REASON_CHARS]
        said = {"error": f"environment took over {item['step_s']:g} s" if limit.expired() else reason}
    return said | {"seconds": time.monotonic() - start_s}


async def main() -> None:
    """Answers until the parent closes the stream, then closes the states of all episodes."""
    await serve(answer)
    close_all()


if __name__ == "__main__":
    limit_this_process(int(sys.argv[1]), int(sys.argv[2]))
    asyncio.run(main())
