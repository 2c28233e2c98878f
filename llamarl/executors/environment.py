"""The environment executor: answers turns of the policy, in worker processes that can be killed."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from llamarl.cluster.executor import Executor
from llamarl.config import Ref
from llamarl.data.tokenizer import Tokenizer
from llamarl.environments._base import Messages
from llamarl.environments._worker import build_environment
from llamarl.executors.replies import Episode, Replied
from llamarl.rewards._base import invalid
from llamarl.sandbox.pool import Failure, WorkerPool
from llamarl.types import Outcome, RewardResult

QUICK_S = 0.005
"""Replies that take less are asked for in batches: the way to a worker takes as long as some of them."""
BATCH = 32
MARGIN_S = 5.0
"""For a batch, beside the time of its replies."""


class EnvironmentExecutor(Executor):
    """Episodes come by `submit` and their replies go by `collect`, as they are there: none waits for a slow one, as
    long as there are free workers."""

    def __init__(self, model_path: str, config: Ref) -> None:
        self._tokenizer = Tokenizer(model_path)
        self._environment = build_environment(config)
        self._ref = config.model_dump_json()
        self._changed = threading.Condition()
        self._queue = deque[Episode]()
        self._replies = list[Replied]()
        self._asked: Future[list[Replied]] | None = None
        self._closed = False
        step_s, limits = self._environment.step_s, self._environment
        self._pools = [
            WorkerPool(
                "llamarl.environments._worker:reply", num_workers=1, cpu_s=math.ceil(step_s), wall_s=step_s,
                memory_bytes=limits.memory_bytes,
            )
            for _ in range(limits.workers)
        ]  # fmt: skip
        for pool in self._pools:
            threading.Thread(target=self._reply_loop, args=(pool,), name="environment", daemon=True).start()

    def submit(self, episodes: Sequence[Episode]) -> None:
        """Queues episodes whose last turn wants a reply."""
        with self._changed:
            self._queue.extend(episodes)
            self._changed.notify_all()

    def collect(self) -> Future[list[Replied]]:
        """The next replies, as soon as there are some."""
        reply = Future[list[Replied]]()
        with self._changed:
            self._asked = reply
        self._hand_over()
        return reply

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for pool in self._pools:
            pool.close()

    def _reply_loop(self, pool: WorkerPool) -> None:
        each_s = math.inf
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                share = len(self._queue) // len(self._pools)
                count = max(1, min(share, BATCH)) if each_s < QUICK_S else 1
                episodes = [self._queue.popleft() for _ in range(count)]
            start_s = time.monotonic()
            items = [self._item(episode) for episode in episodes]
            said = pool.map(items, count * self._environment.step_s + MARGIN_S)
            each_s = (time.monotonic() - start_s) / count
            replies = [self._reply(episode, one, each_s) for episode, one in zip(episodes, said, strict=True)]
            with self._changed:
                self._replies += replies
            self._hand_over()

    def _hand_over(self) -> None:
        with self._changed:
            if self._asked is None or not self._replies:
                return
            asked, self._asked = self._asked, None
            if not asked.set_running_or_notify_cancel():  # a caller that gave up gets nothing, and nothing is lost
                return
            replies, self._replies = self._replies, []
        asked.set_result(replies)

    def _item(self, episode: Episode) -> dict[str, Any]:
        prompt, turns = episode.prompt, list[list[str | None]]()
        for is_sampled, token_ids_T in episode.turns:
            text = self._tokenizer.decode(token_ids_T)
            if is_sampled:
                turns.append([text, None])
            else:
                turns[-1][1] = text
        task = {"prompt": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
        return {"environment": self._ref, "task": task, "turns": turns}

    def _reply(self, episode: Episode, said: dict[str, Any] | Failure, seconds: float) -> Replied:
        """What a worker said, as tokens or as an end."""
        result: RewardResult | None = None
        observation_T: np.ndarray | None = None
        if isinstance(said, Failure):
            result = invalid(said.reason.replace("grader", "environment"))
        elif "reward" in said:
            fields = said["reward"] | {"outcome": Outcome(said["reward"]["outcome"])}
            result = RewardResult(**fields)
        elif "text" in said:
            observation_T = self._tokenizer.encode(said["text"])
        elif "messages" in said:
            observation_T = self._rendered(said["messages"], ends_with_stop=self._ends_with_stop(episode))
        if observation_T is not None and not len(observation_T):
            result = invalid("an empty observation; reply None to end an episode")
        elif observation_T is not None and len(observation_T) > self._environment.observation_tokens:
            tokens, limit = len(observation_T), self._environment.observation_tokens
            result = invalid(f"an observation of {tokens} tokens (rollout.environment.observation_tokens = {limit})")
        elif episode.spent_s + seconds > self._environment.episode_s:
            result = invalid(f"replies took over {self._environment.episode_s:g} s (rollout.environment.episode_s)")
        if result is not None:
            observation_T = None
        num_tokens = sum(len(part) for _, part in episode.turns)
        return Replied(episode.group_id, episode.index, num_tokens, observation_T, result, seconds)

    def _ends_with_stop(self, episode: Episode) -> bool:
        return int(episode.turns[-1][1][-1]) in self._tokenizer.eos_token_ids

    def _rendered(self, messages: Messages, *, ends_with_stop: bool) -> np.ndarray:
        """The tokens between the policy's turn and its next one, as the chat template writes them: what follows a
        sentinel in place of the turn. What was sampled is never encoded again."""
        return self._tokenizer.encode(self._tokenizer.after_turn(messages, without_stop=ends_with_stop))
