"""The endpoint over HTTP, without a port."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from llamarl.gateway.endpoint import Endpoint
from llamarl.gateway.protocol import Refused
from llamarl.gateway.session import Session

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
from starlette.testclient import TestClient

from llamarl.gateway import app as module
from llamarl.gateway.app import build_app

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture
def client(scripted: Callable[..., Any]) -> TestClient:
    _, endpoint, session = scripted("one", "two", "three")

    def session_of(key: str) -> tuple[Endpoint, Session]:
        if key != "right":
            raise Refused(401, "wrong key", "authentication_error")
        return endpoint, session

    return TestClient(build_app(session_of), headers={"Authorization": "Bearer right"})


def pieces(text: str) -> list[Any]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


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


@pytest.mark.parametrize(
    ("path", "more", "status", "said"),
    [
        ("completions", {"headers": {"Authorization": "Bearer wrong"}, "json": {}}, 401, "wrong key"),
        ("completions", {"headers": {"Authorization": "Basic right"}, "json": {}}, 401, "wrong key"),
        ("completions", {"json": {"prompt": "x", "stream": True, "n": 2}}, 400, "n = 2"),
        ("completions", {"content": b"{"}, 400, "no JSON"),
        ("completions", {"content": b"[" * 100_000}, 400, "no JSON"),
        ("completions", {"content": b"[1]"}, 400, "no JSON object"),
        ("completions", {"content": b"x" * 2000}, 413, "more than 1000 bytes"),
        ("embeddings", {"json": {}}, 404, "/v1/embeddings is not there"),
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
