"""`llamarl serve`: other programs' calls join the engine's batch; keys, addresses and the end of it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest

from llamarl.cli.generate import open_engine
from llamarl.cli.serve import EngineThread
from llamarl.config.schema import GeneratorConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.types import Rollout, SamplingParams
from tests.cli.test_generate import LLAMARL
from tests.end_to_end.tiny import ROOT, environment, llamarl_here
from tests.nightly import nightly

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


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
        assert found, line + process.communicate(timeout=10)[1]
        yield found[1]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130 and "Traceback" not in errors, errors
    finally:
        process.kill()
        process.communicate()


def post(url: str, key: str = "k", **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


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


def test_the_newest_checkpoint_of_a_run(toml: Path, tmp_path: Path) -> None:
    """As docs/agents.md has it: `llamarl serve RUN`; what answers has learnt."""
    done = llamarl_here(
        "train", toml, "--cluster.kind", "inline", "--screen.kind", "none", "--trainer.learning_rate", 1
    )
    assert done.returncode == 0, done.stderr
    (run,) = (path.parent for path in (tmp_path / "runs").glob("*/checkpoints"))
    folder = tmp_path / "exported"
    done = llamarl_here("export", run, folder)
    assert done.returncode == 0, done.stderr
    said = list[Any]()
    body: dict[str, Any] = {"prompt": "Ann has 3", "max_tokens": 9, "temperature": 0, "logprobs": 0}
    for path, name in ((run, run.name), (folder, "exported")):
        with served(path) as url:
            with urllib.request.urlopen(f"{url}/models", timeout=60) as reply:
                assert [one["id"] for one in json.loads(reply.read())["data"]] == [name]
            said.append(post(f"{url}/completions", **body)["choices"])
    assert said[0] == said[1]


def test_a_call_that_nobody_waits_for_gives_its_place_back(model: Path) -> None:
    engine = open_engine(str(model), GeneratorConfig(max_running=1), Tokenizer(model))
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

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert heard[0] < 50 and heard == sorted(heard)


def test_mistakes_are_told(model: Path) -> None:
    for arguments, said in (
        ([model, "--host", "0.0.0.0"], "give a key by --api-key"),
        ([model, "--port", "99999"], "port 99999"),
        ([model / "none"], "none"),
        ([model, "--max-running", "0"], "--max-running 0"),
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
                _ask(client)
            other = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
            with other, pytest.raises(openai.AuthenticationError):
                other.models.list()
    finally:
        (model / "chat_template.jinja").unlink()


def _ask(client: Any) -> None:
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
