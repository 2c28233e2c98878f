"""`Replica`: one generator, what it serves and how fast it is; what it owes is in `flight.py`."""

from __future__ import annotations

import asyncio
import math

from llamarl.cluster.api import ExecutorHandle
from llamarl.cluster.port import port
from llamarl.controller.ports import GeneratorPort
from llamarl.controller.records import Key
from llamarl.executors.replies import GeneratorStats, Published

NO_VERSION = -1
"""Older than every version."""
REST = 4.0
"""One that is slow has owed nothing for so many times as long as its last requests took, before it is tried again."""


class Replica:
    """One generator and what the controller knows of it."""

    def __init__(self, handle: ExecutorHandle, timeout_s: float) -> None:
        self.handle = handle
        self.name = handle.name
        self.port = port(GeneratorPort, handle, timeout_s)
        self.version = NO_VERSION
        """Version that it is known to serve; it may have begun to serve a newer one."""
        self.fetching = NO_VERSION
        """Version that it fetches now; `NO_VERSION`: none."""
        self.fetching_since_s = math.inf
        self.adopt_s = math.inf
        """Seconds that its last adoption took, from call to answer; infinite before the first."""
        self.transport = ""
        """Transport that brings its weights; empty until it is chosen."""
        self.tried: Published | None = None
        """Version that it fetched last, with or without success."""
        self.num_failures = 0
        """Fetches in a row that ended with a failure or a mismatch."""
        self.is_leaving = self.is_gone = False
        self.adopting: asyncio.Task[None] | None = None
        """Keeps its weights up to date."""
        self.token_s = 0.0
        """Seconds from request to answer for each token of a rollout, lately; 0 before the first."""
        self._busy_since_s = self._idle_since_s = 0.0
        """When it last began, or ceased, to owe something."""
        self.withdrawn = set[Key]()
        """Rollouts that others generate by now: what it says of them is nobody's."""
        self.busy = asyncio.Event()
        """Set while it owes something, and when it is gone."""
        self.stats = GeneratorStats()

    def begins(self) -> None:
        """It owes something, for the first time since it has owed nothing."""
        self._busy_since_s = asyncio.get_running_loop().time()
        self.busy.set()

    def answered(self, seconds: float, num_tokens: int, *, is_idle: bool) -> None:
        """It has answered so many tokens, which took their rollouts these seconds in all, and owes nothing if it is
        idle."""
        if num_tokens:
            token_s = seconds / num_tokens
            later_s = (self.token_s + token_s) / 2 if self.token_s else token_s
            self.token_s = min(token_s, later_s)  # what is better counts at once
        if is_idle:
            self._idle_since_s = asyncio.get_running_loop().time()
            if not self.withdrawn:
                self.busy.clear()

    @property
    def is_rested(self) -> bool:
        """Whether it may be tried again, if it is slow and owes nothing."""
        rest_s = asyncio.get_running_loop().time() - self._idle_since_s
        return rest_s > REST * (self._idle_since_s - self._busy_since_s)
