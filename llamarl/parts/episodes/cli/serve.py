"""`llamarl serve MODEL|RUN`: serves a checkpoint over OpenAI's protocol."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from llamarl.cli.options import ASKED_HELP, ENGINE, add_settings, command_parser, report_delays
from llamarl.config import ConfigError, resolved
from llamarl.config.ref import part
from llamarl.types import GenerationRequest, Rollout, SamplingParams

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from llamarl.data.tokenizer import Tokenizer
    from llamarl.generation.backend import RolloutEngine
    from llamarl.parts.episodes.gateway.endpoint import Endpoint, More
    from llamarl.parts.episodes.gateway.protocol import Scores
    from llamarl.parts.episodes.gateway.session import Session
    from llamarl.run.models import AskedModel

API_KEY = "LLAMARL_API_KEY"
BASE = {"model": {"path": ""}, "data": {"train": "jsonl"}}
"""Default settings of an engine whose weights never change."""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "serve",
        "Serve a model over an OpenAI-compatible API: /v1/chat/completions, /v1/completions, /v1/models.",
        f"Clients must send the key of --api-key or of the variable {API_KEY}; without one, any key is accepted.",
    )
    parser.add_argument("model", metavar="MODEL|RUN", help=ASKED_HELP)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes any free one (8000)")
    parser.add_argument("--api-key", type=str, metavar="KEY", help="key that clients must send")
    parser.add_argument("--name", help="name of the model for clients (the folder's name)")
    add_settings(parser, BASE, *ENGINE)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    resolved(BASE, options.overrides)  # fails early on a mistake
    key = options.api_key or os.environ.get(API_KEY, "")
    from llamarl.data.chat_format import sample_chat
    from llamarl.data.tokenizer import check_vocabulary
    from llamarl.models.folder import load_shape
    from llamarl.parts.episodes.gateway.app import build_app
    from llamarl.parts.episodes.gateway.endpoint import Endpoint
    from llamarl.parts.episodes.gateway.protocol import CallRefused
    from llamarl.parts.episodes.gateway.session import Session
    from llamarl.run.models import asked_model
    from llamarl.run.web import LOOPBACK, listening

    open_engine = part("answers", "open_engine")
    if not key and options.host not in LOOPBACK:
        raise ConfigError(
            f"--host {options.host} can be reached from other machines; set a key with --api-key or {API_KEY}"
        )
    with ExitStack() as leaving, report_delays("serve", "starting the engine") as told:
        asked = leaving.enter_context(asked_model(options.model, "MODEL", command="llamarl serve"))
        tokenizer, shape = _tokenizer(asked), load_shape(asked.path)
        check_vocabulary(tokenizer, shape.vocab_size)
        sampling = SamplingParams(
            max_new_tokens=shape.max_position_embeddings, stop_token_ids=tokenizer.eos_token_ids,
            seed=secrets.randbits(62),
        )  # fmt: skip
        tables = {"generator": asked.settings.get("generator", {}), "model": {"path": asked.path}}
        config = resolved(BASE | tables, options.overrides)
        engine = EngineThread(leaving.enter_context(open_engine(config)))
        name = options.name or Path(options.model).resolve().name
        endpoint = Endpoint(
            tokenizer=tokenizer, model=name, context=shape.max_position_embeddings, generate=engine.generate,
            sampling=sampling, score=engine.score if engine.can_score else None,
        )  # fmt: skip

        def session_of(given: str) -> tuple[Endpoint, Session]:
            if key and not secrets.compare_digest(given.encode(), key.encode()):
                raise CallRefused(401, f"the API key is not the one of --api-key or {API_KEY}", "authentication_error")
            return endpoint, Session()  # not used for training

        app = build_app(session_of, engine.metrics)
        opened = leaving.enter_context(listening(options.host, options.port))
        told()
        host, port = opened.getsockname()[:2]
        print(f"a chat call: {sample_chat(tokenizer)}", file=sys.stderr)
        print(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        return asyncio.run(_serve(app, opened, engine, () if key else LOOPBACK))


async def _serve(app: Starlette, opened: socket.socket, engine: EngineThread, hosts: Sequence[str]) -> int:
    from llamarl.run.web import serving

    server, loop = serving(app, hosts), asyncio.get_running_loop()
    engine.loop = loop
    gc.freeze()  # a collection over all objects of torch would delay every caller
    ended = loop.run_in_executor(None, engine.run)
    ended.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[opened])
    finally:
        engine.close()
    await ended
    return 0


def _tokenizer(asked: AskedModel) -> Tokenizer:
    """Returns the model's tokenizer with a chat template that formats prompts as the model's run did. Without a run and
    without a chat template, formats the question and a line break. Raises ConfigError."""
    from llamarl.data.chat_format import chat_template_of, with_chat
    from llamarl.data.tokenizer import Tokenizer
    from llamarl.run.export import format_of

    if asked.run is None:
        return with_chat(Tokenizer(asked.path))
    data, tokenizer = format_of(asked.run, asked.path)
    try:
        template = chat_template_of(data, tokenizer)
    except ConfigError as error:  # /v1/completions accepts prompts that the client has formatted
        sys.stderr.write(f"llamarl serve: {error}; /v1/chat/completions writes the question only\n")
        return with_chat(tokenizer)
    return tokenizer if template is None else tokenizer.with_template(template)


class EngineThread:
    """An engine in a separate thread. Requests that arrive during a step join the next one."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._inbox = SimpleQueue[GenerationRequest | int | Callable[[], None] | None]()
        """Requests, ids of canceled requests, work to run between two steps, or None to stop."""
        self._waiting = dict[int, asyncio.Future[Rollout]]()
        self._watched: dict[int, More] = {}
        """Listeners by request id, called with a rollout's tokens so far while it is sampled."""
        self._count = 0
        self.loop: asyncio.AbstractEventLoop
        """Event loop of the callers, which receives the answers."""

    async def generate(self, prompt_T: np.ndarray, sampling: SamplingParams, more: More | None) -> Rollout:
        """Samples a rollout after a prompt. Canceling the call cancels the request."""
        self._count += 1
        number = self._count
        self._waiting[number] = answer = self.loop.create_future()
        if more:
            self._watched[number] = more
        self._inbox.put(
            GenerationRequest(group_id=number, prompt_token_ids_T=prompt_T, group_size=1, sampling=sampling)
        )
        try:
            return await answer
        except asyncio.CancelledError:
            self._inbox.put(number)
            raise
        finally:
            self._watched.pop(number, None)

    @property
    def can_score(self) -> bool:
        """Whether the engine's model is in this process."""
        from llamarl.generation.model import GeneratorModel

        return isinstance(getattr(self._engine, "model", None), GeneratorModel)

    async def score(self, token_ids_T: np.ndarray, num_top: int, temperature: float) -> Scores:
        """Returns log-probabilities of given tokens and of the most likely tokens at each position, computed between
        two steps of the engine. Raises ValueError."""
        from llamarl.generation.sampler import top_logprobs
        from llamarl.parts.episodes.gateway.protocol import Scores

        answer, model = self.loop.create_future(), getattr(self._engine, "model")  # noqa: B009 - see `can_score`

        def tell(found: Scores | ValueError) -> None:
            if answer.done():  # the caller has left
                return
            if isinstance(found, ValueError):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def work() -> None:
            try:
                found = Scores(*top_logprobs(model, token_ids_T, num_top, temperature))
            except ValueError as error:
                self.loop.call_soon_threadsafe(tell, error)
            else:
                self.loop.call_soon_threadsafe(tell, found)

        self._inbox.put(work)
        return await answer

    def metrics(self) -> dict[str, float]:
        """Returns the number of unanswered requests, and counters of the engine, by name."""
        return {"requests": len(self._waiting)} | asdict(self._engine.stats())

    def close(self) -> None:
        """Makes `run` return."""
        self._inbox.put(None)

    def run(self) -> None:
        """Steps the engine until `close`, in the engine's thread."""
        engine = self._engine
        while True:
            while not (engine.has_work and self._inbox.empty()):
                asked = self._inbox.get()
                if asked is None:
                    return
                if callable(asked):
                    asked()
                elif isinstance(asked, int):
                    self.loop.call_soon_threadsafe(self._deliver, engine.abort([asked]), [])
                else:
                    engine.submit([asked])
            done, so_far = engine.step(), engine.so_far(tuple(self._watched))
            if done or so_far:
                self.loop.call_soon_threadsafe(self._deliver, done, so_far)

    def _deliver(self, done: Sequence[Rollout], so_far: Sequence[Rollout]) -> None:
        for rollout in so_far:
            if more := self._watched.get(rollout.group_id):
                more(rollout)
        for rollout in done:
            answer = self._waiting.pop(rollout.group_id)
            if not answer.done():  # the caller is still waiting
                answer.set_result(rollout)
