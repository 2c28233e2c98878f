"""The gateway executor: runs agents and forwards their calls to the policy through the controller."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from llamarl.cluster.api import Executor
from llamarl.config.schema import RolloutConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.models.folder import load_shape
from llamarl.parts.episodes.gateway.app import build_app
from llamarl.parts.episodes.gateway.endpoint import Endpoint
from llamarl.parts.episodes.gateway.episode import AgentEpisode
from llamarl.parts.episodes.gateway.news import AgentCall, AgentEnd, AgentNews, AgentTask
from llamarl.parts.episodes.gateway.protocol import CallRefused
from llamarl.parts.episodes.gateway.session import Session
from llamarl.parts.episodes.gateway.workers import AgentWorkers
from llamarl.run.web import listening, serving
from llamarl.types import FinishReason, Rollout, SamplingParams

HOST, MODEL = "127.0.0.1", "policy"
OVER = "the episode of this API key is over"
HAND_OVER_S, STOP_S = 20.0, 5.0
"""Maximum seconds until a `collect` returns without news, and for the server to stop."""


class GatewayExecutor(Executor):
    """Runs server, sessions and workers in an event loop in a separate thread, which also handles the controller's
    calls."""

    def __init__(
        self, model_path: str, config: RolloutConfig, arguments: Mapping[str, Any] | None = None, today: str = ""
    ) -> None:
        """See `Tokenizer` for `arguments` and `today`."""
        assert config.agent is not None, "a run without agents has no gateway"
        self._agent, self._config = config.agent, config
        self._tokenizer = Tokenizer(model_path, arguments, today)
        self._context = load_shape(model_path).max_position_embeddings
        self._episodes = dict[str, tuple[AgentTask, AgentEpisode]]()
        """Task and state of each episode, by session key."""
        self._answers = dict[int, asyncio.Future[Rollout]]()
        """Pending answers by request id."""
        self._asked: Future[AgentNews] | None = None
        self._news = AgentNews([], [])
        self._error: BaseException | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._workers = AgentWorkers(self._agent)
        self._server = serving(build_app(self._session_of, lambda: {"calls": len(self._answers)}))
        self._socket = listening(HOST, 0)
        self._base_url = f"http://{HOST}:{self._socket.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self._serving = self._loop.create_task(self._server.serve(sockets=[self._socket]))
        self._tasks.add(self._serving)
        self._serving.add_done_callback(self._done)
        self._thread.start()

    def submit(self, tasks: Sequence[AgentTask]) -> None:
        """Starts the agents of these tasks."""
        for task in tasks:
            self._do(self._run(task))

    def answer(self, rollouts: Sequence[Rollout]) -> None:
        """Delivers generated rollouts to the pending calls."""
        self._loop.call_soon_threadsafe(self._answered, rollouts)

    def collect(self) -> Future[AgentNews]:
        """Returns news of agents as soon as there is any."""
        asked = Future[AgentNews]()
        self._loop.call_soon_threadsafe(self._ask, asked)
        return asked

    def close(self) -> None:
        async def stop() -> None:
            self._server.should_exit = self._server.force_exit = True
            for task in self._tasks - {self._serving}:
                task.cancel()
            self._workers.close()
            await asyncio.wait(self._tasks)

        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(stop(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()
        self._socket.close()

    # In the loop's thread

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        def start() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._done)

        self._loop.call_soon_threadsafe(start)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._error = error
            self._hand_over(late=True)

    def _ask(self, asked: Future[AgentNews]) -> None:
        self._asked = asked
        self._hand_over()
        self._loop.call_later(HAND_OVER_S, lambda: self._asked is asked and self._hand_over(late=True))

    def _hand_over(self, *, late: bool = False) -> None:
        if self._asked is None or not (late or self._error or any(self._news)):
            return
        asked, self._asked = self._asked, None
        if not asked.set_running_or_notify_cancel():  # the caller gave up; the news stays queued
            return
        if self._error is not None:
            asked.set_exception(self._error)
            return
        news, self._news = self._news, AgentNews([], [])
        asked.set_result(news)

    def _answered(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            answer = self._answers.pop(rollout.group_id, None)
            if answer and not answer.done():  # otherwise the episode has ended or the agent disconnected
                answer.set_result(rollout)

    def _session_of(self, key: str) -> tuple[Endpoint, Session]:
        if key not in self._episodes:
            raise CallRefused(401, "no episode under way has this API key; use the one that the agent is given", "auth")
        task, episode = self._episodes[key]
        endpoint = Endpoint(
            tokenizer=self._tokenizer, model=MODEL, context=self._context,
            generate=partial(self._generate, key), sampling=task.sampling, is_fixed=True,
        )  # fmt: skip
        return endpoint, episode.session

    async def _generate(self, key: str, prompt_T: np.ndarray, sampling: SamplingParams, more: object) -> Rollout:
        """Returns the complete rollout, without partial answers. Raises CallRefused if the episode has ended
        meanwhile."""
        if key not in self._episodes:
            raise CallRefused(409, OVER)
        task, episode = self._episodes[key]
        request = episode.request(prompt_T, sampling, self._answers)
        answer = self._answers[request.group_id] = self._loop.create_future()
        self._news.calls.append(AgentCall(task.group_id, task.index, request))
        self._hand_over()
        return episode.answered(request, prompt_T, await answer)

    async def _run(self, task: AgentTask) -> None:
        """Runs an episode from start to end."""
        prompt = task.prompt
        item = {
            "task": {"prompt": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata},
            "episode_s": self._agent.episode_s, "base_url": self._base_url,
        }  # fmt: skip
        for alone in (False, True):  # another episode may have killed the worker
            name = f"{task.group_id}/{task.index}/{task.attempt}/{alone}"
            episode = AgentEpisode(name=name, sampling=task.sampling, segment_tokens=self._config.segment_tokens)
            key = secrets.token_urlsafe(24)
            self._episodes[key] = task, episode
            try:
                said = await self._workers.run(item | {"api_key": key}, alone=alone)
            except EOFError as error:
                said = {"error": f"{error}"}
                if not alone:
                    continue
            finally:
                del self._episodes[key]
                for one in episode.asked:
                    if (answer := self._answers.pop(one, None)) and not answer.done():
                        answer.set_exception(CallRefused(409, OVER))
            rollout = Rollout(
                group_id=task.group_id, index=task.index, columns=episode.session.columns(),
                finish_reason=FinishReason.LENGTH if episode.session.is_full else episode.reason,
            )  # fmt: skip
            self._news.ends.append(AgentEnd(rollout, episode.result(said)))
            break
        self._hand_over()
