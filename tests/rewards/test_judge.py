"""A judge behind an endpoint: what it says counts, and whatever goes wrong with it judges nothing."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llamarl.config import ConfigError, Ref, build
from llamarl.rewards import judge as module
from llamarl.rewards.judge import Judge
from llamarl.types import Outcome, RewardItem
from tests.nightly import nightly


class Server(ThreadingHTTPServer):
    """Answers by what the question holds, and counts how often it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.seen = Counter[str](), list[dict[str, Any]]()
        self.now = self.most = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        what = body["messages"][0]["content"].split()[-1]
        with self.server.lock:
            self.server.asked[what] += 1
            self.server.seen.append(body | {"key": self.headers["authorization"], "path": self.path})
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        time.sleep(60 if what == "late" else 0.05)
        with self.server.lock:
            self.server.now -= 1
        times = self.server.asked[what]
        status = {"refused": 400, "down": 503}.get(what, 503 if what == "shaky" and times < 3 else 200)
        text = {"silent": "I would rather not.", "much": "Grade: 11", "twice": "Grade: 1\nGrade: 9"}.get(
            what, "Grade: 7.5"
        )
        data = json.dumps({"choices": [{"message": {"content": None if what == "null" else text}}]}).encode()
        data = b"<html>" if what == "html" else data
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def judge(server: Server) -> Iterator[Judge]:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    made = Judge(base_url=url, model="m", prompt="{level} {response}", call_s=2.0, batch_s=6.0, concurrency=4)
    yield made
    made.close()


def items(*responses: str) -> list[RewardItem]:
    return [RewardItem(prompt="p {response}", response=one, answer="a", metadata={"level": 3}) for one in responses]


@nightly("a judge in real time; by day its words count in each way")
def test_what_it_says_counts_and_what_goes_wrong_is_invalid(judge: Judge, server: Server) -> None:
    said = ["good", "twice", "silent", "much", "refused", "down", "shaky", "null", "html", "late"]
    found = dict(zip(said, judge.score(items(*said)), strict=True))
    assert {what: one.value for what, one in found.items() if one.outcome is Outcome.SCORE} == {
        "good": 0.75, "twice": 0.9, "shaky": 0.75
    }  # fmt: skip
    for what, reason in {
        "silent": "no grade: 'I would rather not.'", "much": "no grade: 'Grade: 11'", "refused": "HTTP Error 400",
        "down": "HTTP Error 503", "null": "the content is None", "html": "otherwise than the protocol says",
        "late": "the judge",
    }.items():  # fmt: skip
        assert found[what].outcome is Outcome.INVALID and reason in found[what].reason, found[what]
    assert (server.asked["down"], server.asked["shaky"], server.asked["refused"]) == (3, 3, 1)


def test_equal_questions_are_asked_once_and_calls_are_bounded(judge: Judge, server: Server) -> None:
    many = [f"r{n % 10}" for n in range(40)]
    assert [one.value for one in judge.score(items(*many))] == [0.75] * 40
    judge.score(items(*many))
    assert set(server.asked.values()) == {1} and len(server.asked) == 10 and 1 < server.most <= 4
    judge.cache = 3
    judge.score(items(*many))
    assert len(judge._known) == 3
    judge.score(items("silent"))
    judge.score(items("silent"))
    assert server.asked["silent"] == 2, "what was not judged is asked again"


def test_the_question_has_its_fields_once(judge: Judge, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMARL_JUDGE_API_KEY", "secret")
    judge.prompt = "{prompt} {level} {response}"
    judge.score(items("{answer} x"))
    (body,) = server.seen
    assert body["messages"][0]["content"] == "p {response} 3 {answer} x"
    assert body["key"] == "Bearer secret" and body["path"] == "/v1/chat/completions" and body["temperature"] == 0
    judge.prompt = "{nowhere}"
    (found,) = judge.score(items("x"))
    assert found.outcome is Outcome.INVALID and "lacks a field" in found.reason


def test_nobody_there_is_invalid_within_its_time(server: Server) -> None:
    server.server_close()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    made = Judge(base_url=url, model="m", batch_s=200.0)
    start_s = time.monotonic()
    (found,) = made.score(items("x"))
    made.close()
    assert found.outcome is Outcome.INVALID and "refused" in found.reason and time.monotonic() - start_s < 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "grade"}, "has 0 groups"),
        ({"base_url": "here"}, "http://"),
    ],
)
def test_mistakes_are_told(options: dict[str, Any], said: str) -> None:
    ref = Ref.model_validate({"name": "judge", "base_url": "http://x", "model": "m"} | options)
    with pytest.raises(ConfigError, match=said):
        build(ref, "llamarl.rewards", "reward.parts")
