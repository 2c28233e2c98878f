"""Asks an app in this process, as a server does, so that a client can leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any, path: str, body: Any = None, *, method: str = "POST", leaves: asyncio.Event | None = None, **headers: str
) -> Answer:
    """
    Args:
        body: bytes, or what JSON says.
        leaves: when the client goes.
        headers: with `_` for `-`.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    said = {"host": "127.0.0.1:8000", "content-type": "application/json", "authorization": "Bearer k"}
    said |= {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1),
        "root_path": "", "asgi": {"version": "3.0", "spec_version": "2.3"},
        "headers": [(name.encode(), value.encode()) for name, value in said.items()], "state": {"proved": lambda: None},
    }  # fmt: skip
    parts, sent, over = [data], list[dict[str, Any]](), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await (leaves or over).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            over.set()

    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(one.get("body", b"") for one in sent[1:]))
