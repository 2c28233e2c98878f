"""The endpoint over HTTP, without a port."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llamarl.data.tokenizer import Tokenizer
from llamarl.net import entrance
from llamarl.net.entrance import MAX_UNPROVED
from llamarl.parts.episodes.gateway import app as module
from llamarl.parts.episodes.gateway.app import build_app
from llamarl.parts.episodes.gateway.endpoint import Endpoint
from llamarl.parts.episodes.gateway.protocol import CallRefused
from llamarl.parts.episodes.gateway.session import Session
from llamarl.run.web import listening, serving
from llamarl.types import OBSERVED, Rollout
from tests.data.test_chat import TEMPLATES
from tests.parts.episodes.gateway.asgi import ask
from tests.parts.episodes.gateway.conftest import tool_schema

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
def client(scripted: Callable[..., Any]) -> TestClient:
    _, endpoint, session = scripted("one", "two", "three")

    def session_of(key: str) -> tuple[Endpoint, Session]:
        if key != "right":
            raise CallRefused(401, "wrong key", "authentication_error")
        return endpoint, session

    return TestClient(build_app(session_of), headers={"Authorization": "Bearer right"})


def pieces(text: str) -> list[Any]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_answers_leave_at_once() -> None:
    """Of two writes, headers and body, Nagle's algorithm would hold the second for 40 ms."""

    async def main() -> int:
        found = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened = writer.get_extra_info("socket")
            found.set_result(opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        opened = listening("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=opened):
            _, writer = await asyncio.open_connection(*opened.getsockname())
            writer.close()
            return await found

    assert asyncio.run(main()) == 1


def test_answers_and_streams(client: TestClient) -> None:
    found = client.post("/v1/completions", json={"prompt": "x"})
    assert found.status_code == 200 and found.json()["choices"][0]["text"] == "one"
    streamed = client.post("/v1/chat/completions", json=CHAT | {"stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *some, end, usage = pieces(streamed.text)
    deltas = [one["choices"][0]["delta"] for one in some]
    assert {one["object"] for one in some} == {"chat.completion.chunk"} and len({one["id"] for one in some}) == 1
    assert len(some) > 2 and "".join(one["content"] for one in deltas) == "two"
    assert [one.get("role") for one in deltas] == ["assistant"] + [None] * (len(some) - 1)
    assert end["choices"][0] == {"index": 0, "finish_reason": "stop", "logprobs": None, "delta": {}}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 1
    *some, end = pieces(client.post("/v1/completions", json={"prompt": "x", "stream": True}).text)
    assert "".join(one["choices"][0]["text"] for one in some) == "three" and len(some) > 2
    assert end["choices"][0]["finish_reason"] == "stop"
    assert client.get("/v1/models").json()["data"][0]["id"] == "m"


AS_JSON = {"headers": {"Content-Type": "application/json"}}


@pytest.mark.parametrize(
    ("path", "more", "status", "said"),
    [
        ("completions", {"headers": {"Authorization": "Bearer wrong"}, "json": {}}, 401, "wrong key"),
        ("completions", {"headers": {"Authorization": "Basic right"}, "json": {}}, 401, "wrong key"),
        ("completions", {"json": {"prompt": "x", "stream": True, "n": 0}}, 400, "n = 0"),
        ("completions", AS_JSON | {"content": b"{"}, 400, "not JSON"),
        ("completions", AS_JSON | {"content": b"[" * 100_000}, 400, "not JSON"),
        ("completions", AS_JSON | {"content": b"[1]"}, 400, "not a JSON object"),
        ("completions", AS_JSON | {"content": b"x" * 2000}, 413, "more than 1000 bytes"),
        ("completions", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "must be application/json"),
        ("completions", {"json": {"prompt": "x", "model": "other"}}, 404, "there is no model 'other'; this is 'm'"),
        ("chat/completions", {"json": CHAT | {"model": "other"}}, 404, "there is no model 'other'; this is 'm'"),
        ("embeddings", {"json": {}}, 404, "/v1/embeddings is not there"),
        ("models", {"json": {}}, 405, "POST /v1/models is not there; these are: POST /v1/chat/completions"),
    ],
)
def test_errors_are_in_the_shape_that_clients_read(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any], status: int, said: str
) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000 if status == 413 else 1 << 20)
    found = client.post(f"/v1/{path}", **more)
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert said in error["message"] and error.keys() == {"message", "type", "param", "code"}


def test_a_body_that_is_too_long_fills_its_session(
    scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a prompt over the context does: the agent is cut short, not at fault."""
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
    _, endpoint, session = scripted("x")
    client = TestClient(build_app(lambda key: (endpoint, session)), headers={"Authorization": "Bearer k"})
    assert client.post("/v1/completions", json={"prompt": "x", "n": 0}).status_code == 400 and not session.is_full
    found = client.post("/v1/completions", json={"prompt": "x" * 2000})
    assert found.status_code == 413 and found.json()["error"]["code"] == "context_length_exceeded" and session.is_full


CALLS = {
    "qwen": 'let me see\n<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 5}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 17, "b": 5}}',
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("family", CALLS)
def test_tools_with_the_package_openai(
    scripted: Callable[..., Any], tokenizer: Tokenizer, tmp_path: Path, family: str, streams: bool
) -> None:
    """A whole conversation of a chat model with a tool: one sequence, of the very tokens that were sampled."""
    openai = pytest.importorskip("openai", reason="the package `openai` is not installed")
    folder = Path(shutil.copytree(tokenizer.folder, tmp_path / family))
    template = TEMPLATES[family].replace("<|im_end|>", "<|endoftext|>").replace("<|eot_id|>", "<|endoftext|>")
    (folder / "chat_template.jinja").write_text(template)
    _, endpoint, session = scripted(CALLS[family], "it is 22", of=(of := Tokenizer(folder)))
    client = TestClient(build_app(lambda key: (endpoint, session)))
    ask = openai.OpenAI(base_url="http://testserver/v1", api_key="k", http_client=client).chat.completions
    tools = [tool_schema("add")]
    history: list[Any] = [{"role": "user", "content": "17+5"}]
    if streams:
        chunks = [one.choices[0] for one in ask.create(model="m", messages=history, tools=tools, stream=True)]
        (call,) = [call for one in chunks for call in one.delta.tool_calls or []]
        text = "".join(one.delta.content or "" for one in chunks) or None
        assert chunks[-1].finish_reason == "tool_calls"
    else:
        (choice,) = ask.create(model="m", messages=history, tools=tools).choices
        (call,), text = choice.message.tool_calls, choice.message.content
        assert choice.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"a": 17, "b": 5} and call.function.name == "add"
    assert text == ("let me see" if family == "qwen" else None)
    called = {"id": call.id, "type": "function", "function": call.function.model_dump()}
    history += [
        {"role": "assistant", "content": text, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.id, "content": "22"},
    ]
    (choice,) = ask.create(model="m", messages=history, tools=tools).choices
    assert choice.message.content == "it is 22" and choice.finish_reason == "stop"
    columns = session.columns()
    assert set(columns["sequence"]) == {0} and session.num_calls == 2
    whole = of.decode(columns["token_ids"], skip_special=False)
    observed = of.after_turn([{"role": "tool", "content": "22"}], without_stop=False, tools=tools)
    assert whole.endswith(f"{CALLS[family]}{observed}it is 22<|endoftext|>") and "22" in observed
    assert (columns["policy_versions"] != OBSERVED).sum() == session.num_sampled


def app_of(endpoint: Endpoint, session: Session) -> Any:
    return build_app(lambda key: (endpoint, session), lambda: {"running": 3, "kv_use": 0.5})


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_its_call(scripted: Callable[..., Any], streams: bool) -> None:
    """And the turn that it did not see is in no sequence."""
    _, endpoint, session = scripted()
    ends = list[str]()

    async def main() -> int:
        begun, leaves = asyncio.Event(), asyncio.Event()

        async def generate(*_: Any) -> Rollout:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise
            raise AssertionError

        app = app_of(replace(endpoint, generate=generate), session)
        call = asyncio.create_task(ask(app, "/v1/completions", {"prompt": "x", "stream": streams}, leaves=leaves))
        await begun.wait()
        leaves.set()
        return (await call).status

    assert asyncio.run(asyncio.wait_for(main(), 240)) == 499
    assert ends == ["cancelled"] and not session.num_calls


def test_a_body_that_breaks_off_is_nobodys_error(scripted: Callable[..., Any]) -> None:
    _, endpoint, session = scripted()
    sent = list[Any]()

    async def main() -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [AS_SENT], "query_string": b""}
        await app_of(endpoint, session)(scope, receive, send)

    asyncio.run(main())
    assert sent[0]["status"] == 499


AS_SENT = b"content-type", b"application/json"


def test_health_metrics_and_the_model(scripted: Callable[..., Any]) -> None:
    _, endpoint, session = scripted()

    def session_of(key: str) -> tuple[Endpoint, Session]:
        if key != "right":
            raise CallRefused(401, "wrong key", "authentication_error")
        return endpoint, session

    client = TestClient(build_app(session_of, lambda: {"running": 3, "kv_use": 0.5}))
    right = {"Authorization": "Bearer right"}
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == client.get("/v1/models/m").status_code == 401
    lines = client.get("/metrics", headers=right).text.splitlines()
    assert lines[:2] == ["# TYPE llamarl_running gauge", "llamarl_running 3"] and lines[3] == "llamarl_kv_use 0.5"
    assert client.get("/v1/models/m", headers=right).json()["id"] == "m"
    found = client.get("/v1/models/other/one", headers=right)
    assert found.status_code == 404 and found.json()["error"]["code"] == "model_not_found"
    assert found.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({}, 200, ""),
        ({"host": "localhost"}, 200, ""),
        ({"host": "[::1]:9"}, 200, ""),
        ({"origin": "http://127.0.0.1:8000"}, 200, ""),
        ({"host": "evil.example:8000"}, 403, "Host 'evil.example:8000', Origin ''"),
        ({"host": "127.0.0.1.evil.example"}, 403, "this server only answers"),
        ({"origin": "https://evil.example"}, 403, "Origin 'https://evil.example': this server only answers"),
        ({"origin": "http://127.0.0.1:9000"}, 403, "only answers requests for"),
        ({"origin": "null"}, 403, "only answers requests for"),
    ],
)
def test_pages_of_the_web_cannot_ask(
    scripted: Callable[..., Any], headers: dict[str, str], status: int, said: str
) -> None:
    """Whoever is at this machine may, without a key; a browser lets any page send what it likes to the loopback."""
    policy, endpoint, session = scripted("x", "x")
    guarded, open_to_all = (serving(app_of(endpoint, session), *hosts).config.app for hosts in ((), [()]))
    found = asyncio.run(ask(guarded, "/v1/completions", {"prompt": "x"}, **headers))
    assert found.status == status and said in found.body.decode() and len(policy.prompts) == (status == 200)
    if status == 403:
        assert found.json["error"].keys() == {"message", "type", "param", "code"}
        assert asyncio.run(ask(open_to_all, "/v1/completions", {"prompt": "x"}, **headers)).status == 200


def test_silent_connections_keep_nobody_from_an_answer(
    scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that have sent no request the oldest goes for the newest; who is refused is hung up on."""
    _, endpoint, session = scripted("one")
    monkeypatch.setattr(entrance, "max_unauthenticated", lambda: MAX_UNPROVED)

    def session_of(key: str) -> tuple[Endpoint, Session]:
        if key != "right":
            raise CallRefused(401, "wrong key", "authentication_error")
        return endpoint, session

    async def asked(place: tuple[str, int], key: str, connection: str = "close", path: str = "/v1/models") -> str:
        reader, writer = await asyncio.open_connection(*place)
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: {connection}"
        writer.write(f"{head}\r\n\r\n".encode())
        answer = (await asyncio.wait_for(reader.read(), 240.0)).decode()
        writer.close()
        return answer.partition("\r\n")[0]

    async def main() -> None:
        opened, server = listening("127.0.0.1", 0), serving(build_app(session_of))
        place = opened.getsockname()
        task = asyncio.create_task(server.serve([opened]))
        silent = [await asyncio.open_connection(*place) for _ in range(2 * MAX_UNPROVED)]
        for _, writer in silent:
            writer.write(b"G")
        for reader, _ in silent[:MAX_UNPROVED]:
            with suppress(ConnectionError):
                assert not await asyncio.wait_for(reader.read(), 240.0)
        assert await asked(place, "right") == "HTTP/1.1 200 OK"
        assert await asked(place, "wrong", "keep-alive") == "HTTP/1.1 401 Unauthorized"
        assert await asked(place, "", "keep-alive", "/health") == "HTTP/1.1 200 OK", "who shows no key may not stay"
        for _, writer in silent:
            writer.close()
        server.should_exit = True
        await asyncio.wait_for(task, 240.0)
        while opened.fileno() >= 0:  # its thread closes it
            await asyncio.sleep(0.001)

    asyncio.run(main())
