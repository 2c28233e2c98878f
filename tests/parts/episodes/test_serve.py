"""`llamarl serve`: other programs' calls join the engine's batch; keys, addresses and the end of it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

from llamarl.config.schema import GeneratorConfig
from llamarl.data.chat_format import with_chat
from llamarl.data.tokenizer import Tokenizer
from llamarl.executors.generator import open_native
from llamarl.parts.episodes.cli.serve import EngineThread
from llamarl.parts.episodes.gateway.app import build_app
from llamarl.parts.episodes.gateway.endpoint import Endpoint
from llamarl.parts.episodes.gateway.session import Session
from llamarl.types import Rollout, SamplingParams
from tests.end_to_end.tiny import LLAMARL, ROOT, environment, llamarl_here
from tests.nightly import nightly
from tests.parts.episodes.gateway.asgi import ask

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


AS_JSON = {"Content-Type": "application/json"}


@contextmanager
def served(model: Path, *options: str) -> Iterator[str]:
    process = subprocess.Popen(
        [*LLAMARL, "serve", str(model), "--port", "0", *options], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"at (http://127.0.0.1:\d+/v1)", line)
        assert found, line + process.communicate(timeout=240)[1]
        yield found[1]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 130 and "Traceback" not in errors, errors
    finally:
        process.kill()
        process.communicate()


def post(url: str, key: str = "k", **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"} | AS_JSON)
    with urllib.request.urlopen(request, timeout=240) as reply:
        return json.loads(reply.read())


@nightly("starts a server process; test_gateway.py sends calls to an endpoint in this process")
def test_calls_are_answered_side_by_side(model: Path) -> None:
    with served(model, "--api-key", "k", "--name", "tiny") as url:
        with ThreadPoolExecutor(16) as pool:
            calls = [pool.submit(post, f"{url}/completions", prompt=f"Ann {n}", max_tokens=20 + n) for n in range(16)]
            for number, call in enumerate(calls):
                answer = call.result()
                assert answer["model"] == "tiny" and answer["usage"]["completion_tokens"] <= 20 + number
        greedy = [post(f"{url}/completions", prompt="Ann", max_tokens=9, temperature=0) for _ in range(2)]
        assert greedy[0]["choices"] == greedy[1]["choices"]
        for status, body in ((401, {"key": "wrong", "prompt": "x"}), (400, {"prompt": "x " * 500})):
            with pytest.raises(HTTPError) as refused:
                post(f"{url}/completions", **body)
            assert refused.value.code == status and json.loads(refused.value.read())["error"]["message"]
        known = urllib.request.Request(f"{url}/models", headers={"Authorization": "Bearer k", "Host": "gpu-7.example"})
        assert urllib.request.urlopen(known, timeout=240).status == 200  # who has the key may use any name


@nightly("starts a server process; test_gateway.py sends calls to an endpoint in this process")
def test_the_newest_checkpoint_of_a_run(toml: Path, model: Path, tmp_path: Path) -> None:
    """`llamarl serve RUN`, as docs/episodes.md shows it. The model has learnt, and its chat template gets what it got
    in the run."""
    chatty = Path(shutil.copytree(model, tmp_path / "chatty"))
    (chatty / "chat_template.jinja").write_text("{{ tone }}" + TEMPLATE)
    done = llamarl_here(
        "train", toml, "--cluster.kind", "inline", "--screen.kind", "none", "--trainer.learning_rate", 1,
        "--model.path", chatty, "--data.template_arguments", "{tone = 'kindly'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (path.parent for path in (tmp_path / "runs").glob("*/checkpoints"))
    folder = tmp_path / "exported"
    done = llamarl_here("export", run, folder)
    assert done.returncode == 0, done.stderr
    said, prompts = list[Any](), list[int]()
    body: dict[str, Any] = {"prompt": "Ann has 3", "max_tokens": 9, "temperature": 0, "logprobs": 0}
    for path, name in ((run, run.name), (folder, "exported")):
        with served(path) as url:
            with urllib.request.urlopen(f"{url}/models", timeout=240) as reply:
                assert [one["id"] for one in json.loads(reply.read())["data"]] == [name]
            with pytest.raises(HTTPError, match="403"):  # without a key, a page of the web might ask
                urllib.request.urlopen(urllib.request.Request(f"{url}/models", headers={"Host": "evil.example"}))
            said.append(post(f"{url}/completions", **body)["choices"])
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            prompts.append(post(f"{url}/chat/completions", **chat)["usage"]["prompt_tokens"])
    assert said[0] == said[1]
    assert prompts == [len(Tokenizer(model).encode("kindly<user>x<assistant>"))] * 2


def test_a_call_that_nobody_waits_for_gives_its_place_back(model: Path) -> None:
    engine = open_native(str(model), GeneratorConfig(max_running=1)).engine
    serving = EngineThread(engine)
    sampling, heard = SamplingParams(max_new_tokens=100), list[int]()

    async def leave() -> None:
        serving.loop = asyncio.get_running_loop()
        ended = serving.loop.run_in_executor(None, serving.run)
        some = asyncio.Event()

        def more(rollout: Rollout) -> None:
            heard.append(rollout.num_tokens)
            some.set()

        left = asyncio.create_task(serving.generate(np.array([1, 2], np.int32), sampling, more))
        await some.wait()
        left.cancel()
        last = await serving.generate(np.array([1, 3], np.int32), sampling, None)
        assert last.num_tokens == 100 and engine.stats().decode_tokens < 200
        assert not serving._waiting and not serving._watched
        serving.close()
        await ended

    asyncio.run(asyncio.wait_for(leave(), 240))
    assert heard[0] < 50 and heard == sorted(heard)


@asynccontextmanager
async def served_here(model: Path) -> AsyncIterator[Any]:
    """What `llamarl serve` answers by, without a port."""
    tokenizer = with_chat(Tokenizer(model))
    engine = EngineThread(open_native(str(model), GeneratorConfig(max_running=4)).engine)
    engine.loop = asyncio.get_running_loop()
    ended = engine.loop.run_in_executor(None, engine.run)
    endpoint = Endpoint(
        tokenizer=tokenizer, model="tiny", context=256, generate=engine.generate, score=engine.score,
        sampling=SamplingParams(max_new_tokens=256, stop_token_ids=tokenizer.eos_token_ids),
    )  # fmt: skip
    yield build_app(lambda key: (endpoint, Session()), engine.metrics)
    engine.close()
    await ended


ODD = (
    None, True, False, 0, 1, -1, 10**30, 1e300, -0.5, "", "5", "\udfff", "\0", "é" * 9, [], [[]], [None], [1],
    ["a", "b"], [-1], [10**30],
    [1e300], {}, {"": None}, {"type": "text"}, [{"role": "user"}], [{"role": "banana", "content": 1}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\udfff"}'}}]}],
    [{"role": "user", "content": "\ud800"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"a": [1]}}}],
)  # fmt: skip
NAMES = (
    "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream",
    "stream_options", "n", "user", "logprobs", "tools", "tool_choice", "include_stop_str_in_output", "return_token_ids",
    "logit_bias", "response_format", "nobody_knows",
)  # fmt: skip
RAW = (
    b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"prompt": "\\udfff"}', b'{"prompt": "\xff"}', b"[" * 100_000,
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "prompt": 1}',
    b'{"messages": [' + b'{"role": "user", "content": "a"},' * 20_000 + b"{}]}",
    b'{"prompt": [' + b"-1," * 100_000 + b"-1]}", b'{"prompt": "' + b"x" * (1 << 20) + b'"}',
)  # fmt: skip


@pytest.fixture
def chatting(model: Path) -> Iterator[Path]:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    yield model
    (model / "chat_template.jinja").unlink()


@nightly("starts a server process; test_gateway.py sends calls to an endpoint in this process")
def test_whatever_is_sent_is_answered_or_refused(chatting: Path) -> None:
    """In OpenAI's shape, never by an error of the server's; and the others are answered as before."""
    plain: dict[str, Any] = {"max_tokens": 2}
    bodies = list[tuple[str, Any]]()
    for path, good in (
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("completions", {"prompt": "hi"}),
    ):
        bodies += [(path, body) for body in RAW]
        bodies += [(path, plain | good | {name: odd}) for name in NAMES for odd in ODD]
    assert len(bodies) > 1000

    async def main() -> Counter[int]:
        counted = Counter[int]()
        async with served_here(chatting) as app:
            first = await ask(app, "/v1/completions", {"prompt": "hi", "temperature": 0, "max_tokens": 3})
            for path, body in bodies:
                found = await ask(app, f"/v1/{path}", body)
                counted[found.status] += 1
                if found.status != 200:
                    assert 400 <= found.status < 500, (body, found)
                    error = found.json["error"]
                    assert error.keys() == {"message", "type", "param", "code"} and error["message"], body
                    assert len(error["message"]) < 1000, body
            last = await ask(app, "/v1/completions", {"prompt": "hi", "temperature": 0, "max_tokens": 3})
        assert first.status == 200 and first.json["choices"] == last.json["choices"]
        return counted

    counted = asyncio.run(asyncio.wait_for(main(), 300))
    assert counted[200] > 100 and counted[400] > 500 and not counted.keys() - {200, 400, 404}, counted


def test_others_are_answered_while_a_text_is_encoded(chatting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, encode = threading.Event(), threading.Event(), Tokenizer.encode

    def slow(tokenizer: Tokenizer, text: str, **how: Any) -> np.ndarray:
        begun.set()
        assert goes_on.wait(240)
        return encode(tokenizer, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def main() -> None:
        async with served_here(chatting) as app:
            for path, body in (
                ("completions", {"prompt": "hi"}),
                ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                call = asyncio.create_task(ask(app, f"/v1/{path}", body | {"max_tokens": 1}))
                await asyncio.to_thread(begun.wait)
                assert (await ask(app, "/health", method="GET")).status == 200 and not call.done()
                goes_on.set()
                assert (await call).status == 200
                begun.clear()
                goes_on.clear()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_seed_repeats_an_answer(model: Path) -> None:
    async def main() -> None:
        body = {"prompt": "Ann", "max_tokens": 12, "seed": 7, "n": 3}
        async with served_here(model) as app:
            said = [
                [one["text"] for one in (await ask(app, "/v1/completions", body | more)).json["choices"]]
                for more in ({}, {}, {"seed": 8}, {"seed": None}, {"seed": None})
            ]
        assert said[0] == said[1] and len(set(said[0])) == 3
        assert said[0][1:] == said[2][:2] and said[0] != said[3] != said[4]

    asyncio.run(asyncio.wait_for(main(), 240))


def test_mistakes_are_told(model: Path) -> None:
    for arguments, said in (
        ([model, "--host", "0.0.0.0"], "--api-key"),
        ([model, "--port", "99999"], "port 99999"),
        ([model / "none"], "none"),
        ([model, "--max-running", "1"], "--max-running is now --generator.max_running"),
    ):
        done = llamarl_here("serve", *arguments)
        assert done.returncode == 2 and said in done.stderr, done.stderr


@nightly("a server and a client that others wrote")
def test_the_openai_package(model: Path, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="the package `openai` is not installed")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    try:
        with served(model, "--api-key", "k") as url:
            with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client:
                _ask(client, openai.APIStatusError)
            other = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
            with other, pytest.raises(openai.AuthenticationError):
                other.models.list()
    finally:
        (model / "chat_template.jinja").unlink()


def _ask(client: Any, client_error: type[Any]) -> None:
    (name,) = [one.id for one in client.models.list()]
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(
        model=name, messages=messages, max_tokens=8, logprobs=True, temperature=0,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = whole.choices[0]
    assert len(choice.logprobs.content) == whole.usage.completion_tokens == len(choice.token_ids)
    streamed = client.chat.completions.create(
        model=name, messages=messages, max_tokens=8, temperature=0, stream=True, logprobs=True,
        stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
    )  # fmt: skip
    chunks = list(streamed)
    pieces = [one.choices[0] for one in chunks if one.choices]
    assert "".join(one.delta.content or "" for one in pieces) == choice.message.content and len(pieces) > 3
    assert chunks[-1].usage == whole.usage and pieces[-1].finish_reason == choice.finish_reason
    assert [token for one in pieces[:-1] for token in one.token_ids] == choice.token_ids
    assert [token for one in pieces[:-1] for token in one.logprobs.content] == choice.logprobs.content
    completion = client.completions.create(model=name, prompt=whole.prompt_token_ids, max_tokens=8, temperature=0)
    assert completion.choices[0].text == choice.message.content
    several = client.completions.create(model=name, prompt=["Ann has"], max_tokens=8, n=2, seed=3)
    again = client.completions.create(model=name, prompt="Ann has", max_tokens=8, n=2, seed=3)
    assert [one.text for one in several.choices] == [one.text for one in again.choices]
    assert several.choices[0].text != several.choices[1].text and several.usage == again.usage
    pieces = client.completions.create(model=name, prompt="Ann has", max_tokens=8, n=2, seed=3, stream=True)
    texts = ["", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [one.text for one in again.choices] and client.models.retrieve(name).id == name
    for code, param, more in (
        ("context_length_exceeded", None, {"prompt": "Ann has 3 " * 5000}),
        ("model_not_found", "model", {"prompt": "x", "model": "gpt"}),
        (None, "logit_bias", {"prompt": "x", "logit_bias": {"5": 1}}),
        (None, "temperature", {"prompt": "x", "temperature": -1}),
    ):
        with pytest.raises(client_error) as refused:
            client.completions.create(**{"model": name} | more)
        assert (refused.value.code, refused.value.param) == (code, param), refused.value
