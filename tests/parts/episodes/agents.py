"""Agents that misbehave; what each does is the prompt of its task."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from llamarl.parts.episodes.environments._base import Task
from llamarl.types import Outcome, RewardResult


def _post(base_url: str, api_key: str, text: str, **more: Any) -> str:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/completions", json.dumps({"prompt": text} | more).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.loads(reply.read())["choices"][0]["text"]


async def run(task: Task, base_url: str, api_key: str) -> Any:
    what, text = task.prompt, f"{task.answer}:"
    if what == "silent":
        return 1.0
    if what == "gives up":
        where = urlsplit(base_url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        body = json.dumps({"prompt": "lost:"}).encode()
        head = f"POST {where.path}/completions HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await asyncio.sleep(0.5)
        writer.close()
        await asyncio.sleep(0.5)
    for _ in range(task.metadata.get("calls", 1)):
        text += await asyncio.to_thread(_post, base_url, api_key, text) + "!"
    if what == "raise":
        raise KeyError("no such thing")
    if what == "exit":
        os._exit(3)
    if what == "stuck":
        time.sleep(1e6)
    if what == "slow":
        await asyncio.sleep(1e6)
    if what == "stranger":
        await asyncio.to_thread(_post, base_url, "sk-guessed", text)
    if what == "leaves":
        asyncio.get_running_loop().run_in_executor(None, _post, base_url, api_key, "unanswered")
        await asyncio.sleep(0.5)
    known = {
        "result": RewardResult(outcome=Outcome.WRONG, value=-1.0, reason="as it says"),
        "nothing": None,
        "nan": float("nan"),
        "huge": 1e308,
        "text": "1.0",
    }
    return known.get(what, 0.5)


def not_async(task: Task, base_url: str, api_key: str) -> float:
    return 1.0


async def unhurried(task: Task, base_url: str, api_key: str) -> Any:
    """So that a run that others only look at leaves them the processor."""
    await asyncio.sleep(0.3)
    return await run(task, base_url, api_key)


async def forgetful(task: Task, base_url: str, api_key: str) -> float:
    """Asks twice, and the second time without what was said before."""
    for text in (task.answer, "again:"):
        await asyncio.to_thread(_post, base_url, api_key, text, max_tokens=12)
    return 0.5
