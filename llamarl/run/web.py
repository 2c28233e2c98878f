"""Serves a page or an endpoint over HTTP with uvicorn, which is imported only when needed."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llamarl.config import ConfigError
from llamarl.net.entrance import Entrance, Proved, Serve, defer_accept

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn import Server

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 4096
STOP_S, KEEP_ALIVE_S = 2, 3600
"""Clients reuse their connections, and a connection that is closed during a call fails it."""


def serving(app: ASGIApp, hosts: Sequence[str] = LOOPBACK) -> Server:
    """Returns a server that runs `app` with `serve(sockets=[...])` until `should_exit`.

    Args:
        hosts: host names that requests may use. Empty means any.
    """
    import uvicorn

    class EntranceServer(uvicorn.Server):
        """Accepts connections through entrances."""

        entrances: Sequence[Entrance] = ()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])
            self.entrances = [Entrance(one, self._on(asyncio.get_running_loop())) for one in sockets or ()]

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for entrance in self.entrances:
                entrance.close()
            await super().shutdown()

        def _on(self, loop: asyncio.AbstractEventLoop) -> Serve:
            protocol: Any = self.config.http_protocol_class

            class Protocol(protocol):
                def connection_lost(self, exc: Exception | None) -> None:
                    self.app_state["proved"]()
                    super().connection_lost(exc)

            def begin(accepted: socket.socket, proved: Proved) -> None:
                made = partial(Protocol, self.config, self.server_state, {"proved": proved})
                asyncio.run_coroutine_threadsafe(loop.connect_accepted_socket(made, accepted), loop)

            return begin

    config = uvicorn.Config(
        _proving(_own_pages_only(app, hosts) if hosts else app), log_level="warning", access_log=False, ws="none",
        lifespan="off", proxy_headers=False, server_header=False, limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=STOP_S, timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    return EntranceServer(config)


def _proving(app: ASGIApp) -> Callable[..., Awaitable[None]]:
    """Marks a connection as proved once it has sent a request. Requests without a valid key close the connection."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def told(message: Any) -> None:
            is_known = message.get("status") not in (401, 403, 404, 405) and scope["path"] != "/health"
            if "headers" in message and not is_known:  # the client has not shown a key
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        scope["state"]["proved"]()
        await app(scope, receive, told)

    return answer


def _own_pages_only(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
    """Refuses requests from foreign pages: a browser lets any web page call the loopback, also by a name that resolves
    to it. Both show in the request's headers."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import JSONResponse

        said = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = said.get(b"host", hosts[0]), said.get(b"origin", "")
        is_own = re.sub(r":\d*$", "", host).strip("[]").lower() in hosts and origin in ("", f"http://{host}")
        why = f"Host {host!r:.100}, Origin {origin!r:.100}: this server only answers requests for {hosts}"
        error = {"message": why, "type": "permission_error", "param": None, "code": None}
        await (app if is_own else JSONResponse({"error": error}, 403))(scope, receive, send)

    return guarded


def listening(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises ConfigError."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port {port} is not valid; choose one up to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)  # asyncio's own leaves Nagle on: 40 ms per answer
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(MAX_CONNECTIONS)
        defer_accept(opened)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port or host") from None
    return opened
