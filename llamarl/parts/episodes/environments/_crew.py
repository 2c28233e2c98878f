"""`Crew`: the worker processes of an environment, which can be killed. No torch."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from llamarl.parts.episodes.environments._base import Environment
from llamarl.sandbox.pool import Failure, Limits, WorkerPool

QUICK_S = 0.005
"""Seconds below which replies are requested in batches, because messages to a worker take as long as several
replies."""
BATCH = 32
MARGIN_S = 5.0
"""Seconds of a batch in addition to the time of its replies."""
RECYCLE_AFTER = 500
"""Replies after which a stateless worker is replaced, to bound memory leaks."""
T = TypeVar("T")


class _EnvironmentProcess(Generic[T]):
    """One worker process and its queue."""

    def __init__(self, limits: Environment) -> None:
        self.pool = WorkerPool(
            "llamarl.parts.episodes.environments._worker:reply",
            Limits(
                num_workers=1,
                cpu_s=math.ceil(limits.step_s),
                wall_s=limits.step_s,
                memory_bytes=limits.memory_bytes,
                recycle_after=sys.maxsize if limits.is_stateful else RECYCLE_AFTER,
            ),
        )
        self.thread = threading.Thread()
        self.queue = deque[tuple[str, T]]()
        """Episodes by name that wait for a reply from this worker because it has their state."""
        self.ended = list[str]()
        """Names of episodes whose state this worker must close."""


class Crew(Generic[T]):
    """Requests replies for episodes, which have names. A slow reply delays no other as long as there are free workers.
    If episodes have state, the worker of the first reply makes all of them."""

    def __init__(
        self,
        environment: Environment,
        item_of: Callable[[T], dict[str, Any]],
        replied: Callable[[Sequence[tuple[T, dict[str, Any] | Failure]], float], Sequence[bool]],
    ) -> None:
        """
        Args:
            item_of: returns the request to a worker for an episode.
            replied: called with replies and the seconds of each. Returns the episodes that continue. Called in any
                thread, like `item_of`.
        """
        self._environment, self._item_of, self._replied = environment, item_of, replied
        self._changed = threading.Condition()
        self._queue = deque[tuple[str, T]]()
        self._homes = dict[str, _EnvironmentProcess[T]]()
        self._closed = False
        self._workers = [_EnvironmentProcess[T](environment) for _ in range(environment.workers)]
        for worker in self._workers:
            worker.thread = threading.Thread(target=self._loop, args=(worker,), name="environment", daemon=True)
            worker.thread.start()

    def ask(self, episodes: Sequence[tuple[str, T]]) -> None:
        """Queues episodes, by name, whose last turn needs a reply."""
        with self._changed:
            for name, episode in episodes:
                home = self._homes.get(name)
                (home.queue if home else self._queue).append((name, episode))
            self._changed.notify_all()

    def leave(self, names: Sequence[str]) -> None:
        """Closes the state of these episodes."""
        with self._changed:
            for name in names:
                if (home := self._homes.pop(name, None)) is not None:
                    home.ended.append(name)
            self._changed.notify_all()

    def close(self) -> None:
        """Closes all episodes and stops all workers."""
        self.leave(list(self._homes))
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            if self._environment.is_stateful:
                worker.thread.join(MARGIN_S)
            worker.pool.close()

    def _loop(self, worker: _EnvironmentProcess[T]) -> None:
        each_s = math.inf
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or worker.queue or worker.ended or self._closed)
                ended, worker.ended = worker.ended, []
                if self._closed and not ended:
                    return
                taken = [] if self._closed else self._take(worker, each_s)
            start_s = time.monotonic()
            items = [{"ended": name} for name in ended] + [self._item_of(episode) for _, episode in taken]
            said = worker.pool.map(items, len(items) * self._environment.step_s + MARGIN_S)
            each_s = (time.monotonic() - start_s) / len(items)
            for failed in (one for one in said[: len(ended)] if isinstance(one, Failure)):
                with suppress(OSError):  # the executor's log, unless its disk is full
                    sys.stdout.write(f"closing the state of an episode: {failed.reason}\n")
            if taken:
                replies = list(zip((episode for _, episode in taken), said[len(ended) :], strict=True))
                go_on = self._replied(replies, each_s)
                self.leave([name for (name, _), goes_on in zip(taken, go_on, strict=True) if not goes_on])

    def _take(self, worker: _EnvironmentProcess[T], each_s: float) -> list[tuple[str, T]]:
        """Takes the next episodes for this worker from the queue, first the ones whose state it has."""
        queue = worker.queue or self._queue
        share = len(queue) if queue is worker.queue else len(queue) // len(self._workers)
        count = max(1, min(share, BATCH)) if each_s < QUICK_S else 1
        taken = [queue.popleft() for _ in range(min(count, len(queue)))]
        if self._environment.is_stateful:
            self._homes.update((name, worker) for name, _ in taken)
        return taken
