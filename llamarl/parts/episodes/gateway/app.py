"""The endpoint over HTTP. Imports starlette and uvicorn only when the server starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from llamarl.parts.episodes.gateway.endpoint import CHARS_PER_TOKEN, Endpoint
from llamarl.parts.episodes.gateway.protocol import TOO_LONG, CallRefused, parsed
from llamarl.parts.episodes.gateway.session import Session

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY_BYTES, MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN = 1 << 24, 1 << 20, 6 * CHARS_PER_TOKEN
"""Limit of a request body in bytes: the maximum, or the minimum plus a number per token of the context, which covers
any JSON encoding. A larger body is refused before it is read."""
EPISODE_HEADER = "x-llamarl-episode"
"""Header with the key of an episode, for clients that authorize themselves otherwise."""
GONE = 499
"""Status of a call whose client has disconnected."""
BODY_S = 60
"""Maximum seconds to receive a body."""

SessionOf = Callable[[str], tuple[Endpoint, Session]]
"""Returns the endpoint and session of a key. Raises CallRefused."""


def build_app(session_of: SessionOf, metrics: Callable[[], Mapping[str, float]] = dict) -> Starlette:
    """Returns the application.

    Args:
        metrics: returns counters by name.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    paths = {
        "/v1/chat/completions": ("POST", partial(_answered, session_of, Endpoint.chat)),
        "/v1/completions": ("POST", partial(_answered, session_of, Endpoint.complete)),
        "/v1/models": ("GET", partial(_models, session_of)),
        "/v1/models/{name:path}": ("GET", partial(_models, session_of)),
        "/metrics": ("GET", partial(_metrics, session_of, metrics)),
        "/health": ("GET", _health),
    }
    known = ", ".join(f"{method} {path}" for path, (method, _) in paths.items())
    routes = [Route(path, partial(_handled, call), methods=[method]) for path, (method, call) in paths.items()]
    unknown = partial(_unknown, known)
    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


async def _handled(call: Callable[[Request], Awaitable[Any]], request: Request) -> Response:
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response

    try:
        found = await call(request)
        return found if isinstance(found, Response) else JSONResponse(found)
    except CallRefused as refused:
        return JSONResponse(refused.body, refused.status)
    except ClientDisconnect:
        return Response(status_code=GONE)


async def _answered(session_of: SessionOf, call: Callable[..., Any], request: Request) -> Any:
    """Answers a call. A client that disconnects cancels it."""
    from starlette.responses import Response, StreamingResponse

    endpoint, session = session_of(_key(request))
    try:
        body = await _body(request, endpoint)
    except CallRefused as refused:
        session.is_full |= refused.code == TOO_LONG
        raise
    loop, events = asyncio.get_running_loop(), asyncio.Queue[bytes]()
    tell = partial(loop.call_soon_threadsafe, events.put_nowait) if body.get("stream") else None
    answer = asyncio.create_task(call(endpoint, session, body, tell))
    answer.add_done_callback(lambda _: events.put_nowait(b""))
    begun, gone = asyncio.create_task(events.get()), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((begun, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not begun.done():
            answer.cancel()
            begun.cancel()
    if not begun.done():
        return Response(status_code=GONE)
    if first := begun.result():
        return StreamingResponse(_rest(first, events, answer), media_type="text/event-stream")
    return answer.result()


async def _left(request: Request) -> None:
    """Returns when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _models(session_of: SessionOf, request: Request) -> Any:
    endpoint, name = session_of(_key(request))[0], request.path_params.get("name", "")
    endpoint.check_model(name)
    return endpoint.models()["data"][0] if name else endpoint.models()


async def _metrics(session_of: SessionOf, metrics: Callable[[], Mapping[str, float]], request: Request) -> Any:
    """Returns metrics in Prometheus text format."""
    from starlette.responses import PlainTextResponse

    session_of(_key(request))
    lines = (f"# TYPE llamarl_{name} gauge\nllamarl_{name} {value!r}\n" for name, value in metrics().items())
    return PlainTextResponse("".join(lines))


async def _health(_: Request) -> Any:
    return {}


async def _unknown(known: str, request: Request, error: HTTPException) -> Response:
    from starlette.responses import JSONResponse

    said = f"{request.method} {request.url.path} is not there; these are: {known}"
    return JSONResponse(CallRefused(error.status_code, said).body, error.status_code, error.headers)


async def _rest(event: bytes, events: asyncio.Queue[bytes], answer: asyncio.Task[Any]) -> AsyncIterator[bytes]:
    """Yields events from the first one on, as they arrive. A client that disconnects cancels the call."""
    try:
        while event:
            yield event
            event = await events.get()
        await answer
    except CallRefused as refused:
        yield b"data: " + json.dumps(refused.body).encode() + b"\n\n"
    finally:
        answer.cancel()


def _key(request: Request) -> str:
    if key := request.headers.get(EPISODE_HEADER):
        return key
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _body(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    """Returns the parsed body. Raises CallRefused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise CallRefused(415, f"Content-Type = {kind!r:.100}; it must be application/json")
    data, limit = bytearray(), min(MAX_BODY_BYTES, MIN_BODY_BYTES + BODY_BYTES_PER_TOKEN * endpoint.context)
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > limit:
                    said = f"the body has more than {limit} bytes, and the context {endpoint.context} tokens"
                    raise CallRefused(413, said, code=TOO_LONG)
    except TimeoutError:
        raise CallRefused(408, f"the body took over {BODY_S} s") from None
    return parsed(data)
