"""Tokens per second of episodes over the gateway, and of the same requests given to the engine directly.

As in a run, the engine, the gateway and the agents are in processes of their own; what stands between the first two is
a pipe here, and the controller there. Agents speak HTTP by hand, as a client of many layers would be measured instead.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from llamarl.parts.episodes.environments._base import Task
    from llamarl.types import GenerationRequest, Prompt

WAIT_S = 120.0


@cache
def _idle() -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections of this worker that nobody uses."""
    return []


async def ask(task: Task, base_url: str, api_key: str) -> float:
    """An episode of one call."""
    where = urlsplit(base_url)
    reader, writer = _idle().pop() if _idle() else await asyncio.open_connection(where.hostname, where.port)
    body = json.dumps({"prompt": task.prompt}).encode()
    head = f"POST {where.path}/completions HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    said = json.loads(await reader.readexactly(int(answer.partition("content-length: ")[2].split("\r\n")[0])))
    _idle().append((reader, writer))
    return float(said["usage"]["completion_tokens"])


def _generate(pipe: Connection, model: str, concurrent: int) -> None:
    """The engine's process: lists of requests come, lists of rollouts go, and None ends it."""
    import torch

    from llamarl.data.tokenizer import Tokenizer
    from llamarl.generation.engine import Engine, EngineSettings
    from llamarl.generation.model import load_generator_model

    torch.set_num_threads(1)
    engine = Engine(
        load_generator_model(model, "float32", torch.device("cpu")),
        EngineSettings(max_running=concurrent, prefill_tokens=2048, kv_bytes=None),
        decode=Tokenizer(model).decode,
    )
    while True:
        while pipe.poll() or not engine.has_work:
            requests, released = pipe.recv()
            if requests is None:
                return
            engine.release(released)
            engine.submit(requests)
        if done := engine.step():
            pipe.send(done)


class Rig:
    """Engine, gateway and agents; `close` ends them."""

    def __init__(self, model: str, concurrent: int, max_new_tokens: int) -> None:
        from llamarl.config.schema import RolloutConfig
        from llamarl.parts.episodes.executors.gateway import GatewayExecutor

        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_generate, args=(theirs, model, concurrent), daemon=True)
        self._process.start()
        config = RolloutConfig.model_validate(
            {"agent": {"name": "_gateway:ask", "workers": 1}, "max_new_tokens": max_new_tokens}
        )
        self._gateway, self._concurrent = GatewayExecutor(model, config), concurrent

    def direct(self, requests: list[GenerationRequest]) -> float:
        """Tokens per second."""
        start_s, tokens, left = time.perf_counter(), 0, len(requests)
        self._pipe.send((requests, []))
        while left:
            done = self._received()
            tokens, left = tokens + sum(one.num_tokens for one in done), left - len(done)
        return tokens / (time.perf_counter() - start_s)

    def over_gateway(self, requests: list[GenerationRequest], prompts: list[Prompt], attempt: int) -> float:
        """Tokens per second of as many episodes, `concurrent` at a time."""
        from llamarl.parts.episodes.gateway.news import AgentTask

        tasks = [
            AgentTask(n, 0, prompt, request.sampling, attempt)
            for n, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
        over, calls = threading.Event(), list[int]()
        relay = threading.Thread(target=self._relay, args=(over,), daemon=True)
        start_s, tokens, left = time.perf_counter(), 0.0, len(tasks)
        relay.start()
        self._gateway.submit(tasks[: self._concurrent])
        del tasks[: self._concurrent]
        while left:
            news = self._gateway.collect().result(WAIT_S)
            calls += [call.request.group_id for call in news.calls]
            if news.calls:
                self._pipe.send(([call.request for call in news.calls], []))
            assert all(end.result and end.result.value > 0 for end in news.ends), news.ends
            tokens, left = tokens + sum(end.result.value for end in news.ends if end.result), left - len(news.ends)
            self._gateway.submit(tasks[: len(news.ends)])
            del tasks[: len(news.ends)]
        seconds = time.perf_counter() - start_s
        over.set()
        relay.join()
        self._pipe.send(([], [(call, 0) for call in calls]))
        return tokens / seconds

    def close(self) -> None:
        self._gateway.close()
        self._pipe.send((None, []))
        self._process.join()

    def _relay(self, over: threading.Event) -> None:
        while not over.is_set():
            if self._pipe.poll(0.05):
                self._gateway.answer(self._pipe.recv())

    def _received(self) -> list:
        assert self._pipe.poll(WAIT_S), "the engine is silent"
        return self._pipe.recv()


def measure(
    model: str, requests: list[GenerationRequest], prompts: list[Prompt], concurrent: int, rounds: int
) -> list[dict[str, float]]:
    """Tokens per second, both ways, of each round. Greedy, so that both write the same."""
    requests = [replace(one, sampling=replace(one.sampling, temperature=0.0), group_size=1) for one in requests]
    rig = Rig(model, concurrent, requests[0].sampling.max_new_tokens)
    rig.direct(requests)
    rig.over_gateway(requests, prompts, -1)
    found = [{"direct": rig.direct(requests), "gateway": rig.over_gateway(requests, prompts, n)} for n in range(rounds)]
    rig.close()
    return found
