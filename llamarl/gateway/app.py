"""The endpoint over HTTP: starlette and uvicorn, which are imported here and only when it is opened."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llamarl.config import ConfigError
from llamarl.gateway.endpoint import Endpoint
from llamarl.gateway.protocol import Refused
from llamarl.gateway.session import Session
from llamarl.net.entrance import Entrance, Proved, Serve

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from uvicorn import Server

MAX_BODY_BYTES = 1 << 24
"""A larger one is refused before it is read."""
MAX_CONNECTIONS = 4096
BODY_S = 60
"""For all of a body to arrive."""
STOP_S, KEEP_ALIVE_S = 2, 3600
"""Clients reuse their connections, and one that is closed under a call fails it."""

SessionOf = Callable[[str], tuple[Endpoint, Session]]
"""Who a key is for. Raises Refused."""


def serving(app: Starlette) -> Server:
    """What runs `app` by `serve(sockets=[...])`, until `should_exit`."""
    import uvicorn

    class Serving(uvicorn.Server):
        """Its connections come by entrances."""

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
        _proving(app), log_level="warning", access_log=False, ws="none", lifespan="off", proxy_headers=False,
        server_header=False, limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    return Serving(config)


def _proving(app: Starlette) -> Callable[..., Awaitable[None]]:
    """Who has sent a request has proved enough: it is refused at once, and hung up on, or may stay."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def told(message: Any) -> None:
            if message.get("status") in (401, 404):
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        scope["state"]["proved"]()
        await app(scope, receive, told)

    return answer


def listening(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port {port} cannot be; choose one up to 65535, or 0 for any that is free")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)  # without it asyncio leaves Nagle on: 40 ms an answer
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port or host") from None
    return opened


def build_app(session_of: SessionOf) -> Starlette:
    """Raises ConfigError: starlette or uvicorn is not installed."""
    try:
        import uvicorn  # noqa: F401
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError(f"an endpoint needs starlette and uvicorn ({error}): pip install 'llamarl[serve]'") from None

    def answering(call: Callable[..., Any]) -> Any:
        async def handle(request: Request) -> Response:
            try:
                endpoint, session = session_of(_key(request))
                body = await _body(request)
                if not body.get("stream"):
                    return JSONResponse(await call(endpoint, session, body))
                events = asyncio.Queue[bytes]()
                answer = asyncio.create_task(call(endpoint, session, body, events.put_nowait))
                answer.add_done_callback(lambda _: events.put_nowait(b""))
                first = await events.get() or answer.result()
                return StreamingResponse(_rest(first, events, answer), media_type="text/event-stream")
            except Refused as refused:
                return JSONResponse(refused.body, refused.status)

        return handle

    async def models(request: Request) -> Response:
        try:
            return JSONResponse(session_of(_key(request))[0].models())
        except Refused as refused:
            return JSONResponse(refused.body, refused.status)

    async def unknown(request: Request, _: Exception) -> Response:
        known = "/v1/chat/completions, /v1/completions and /v1/models"
        return JSONResponse(Refused(404, f"{request.url.path} is not there; {known} are").body, 404)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", answering(Endpoint.chat), methods=["POST"]),
            Route("/v1/completions", answering(Endpoint.complete), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
        ],
        exception_handlers={404: unknown},
    )


async def _rest(event: bytes, events: asyncio.Queue[bytes], answer: asyncio.Task[Any]) -> AsyncIterator[bytes]:
    """Events, from the first one on, as they come. A client that leaves ends its call."""
    try:
        while event:
            yield event
            event = await events.get()
        await answer
    except Refused as refused:
        yield b"data: " + json.dumps(refused.body).encode() + b"\n\n"
    finally:
        answer.cancel()


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _body(request: Request) -> dict[str, Any]:
    """Raises Refused."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise Refused(408, f"the body took over {BODY_S} s") from None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is no JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    return body
