"""`Replica`: one generator, what it serves and what it owes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llamarl.cluster.api import ExecutorHandle
from llamarl.cluster.port import port
from llamarl.controller.ports import GeneratorPort
from llamarl.executors.probes import CauseProbe, Mismatch
from llamarl.executors.replies import Adoption, Collected, GeneratorStats, Published
from llamarl.types import GenerationRequest, Rollout

NO_VERSION = -1
"""Older than every version."""
REST = 4.0
"""One that is slow has owed nothing for so many times as long as its last requests took, before it is tried again."""


class Replica:
    """One generator and what the controller knows of it."""

    causes: tuple[CauseProbe, np.ndarray] | None = None
    """The last such probe that it has scored, and what it said, [3, N]."""

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
        self.answer: tuple[Adoption, Mismatch | None] | None = None
        """Answer to its last adoption, and what its probe showed."""
        self.num_failures = 0
        """Fetches in a row that ended with a failure or a mismatch."""
        self.is_leaving = self.is_gone = False
        self.adopting: asyncio.Task[None] | None = None
        """Keeps its weights up to date."""
        self.requests = dict[int, GenerationRequest]()
        """Requests that it has not answered completely, by group."""
        self._missing = dict[int, dict[int, Rollout]]()
        """The rollouts that it owes, by group and index, as they began."""
        self._parked = dict[int, list[Rollout]]()
        """Partial rollouts of groups that it still works on."""
        self._asked_s = dict[tuple[int, int], float]()
        """When it was asked for what it owes, by group and index."""
        self.token_s = 0.0
        """Seconds from request to answer for each token of a rollout, lately; 0 before the first."""
        self._busy_since_s = self._idle_since_s = 0.0
        """When it last began, or ceased, to owe something."""
        self.num_outstanding = 0
        """Rollouts that it owes."""
        self.withdrawn = set[tuple[int, int]]()
        """Rollouts, by group and index, that others generate by now: what it says of them is dropped."""
        self.busy = asyncio.Event()
        """Set while it owes something, and when it is gone."""
        self.stats = GeneratorStats()

    def owe(self, requests: Sequence[GenerationRequest]) -> None:
        """Notes requests that the generator is about to be asked for."""
        now_s = asyncio.get_running_loop().time()
        if not self.num_outstanding:
            self._busy_since_s = now_s
        for request in requests:
            missing = {start.index: start for start in request.starts()}
            self.requests.setdefault(request.group_id, request)
            self._missing.setdefault(request.group_id, {}).update(missing)  # it may work on others of the group
            self._asked_s.update(((request.group_id, index), now_s) for index in missing)
            self.num_outstanding += len(missing)
        self.busy.set()

    @property
    def may_answer(self) -> bool:
        """It owes something that does not wait for a version to come, or is gone."""
        is_free = any(request.from_version <= max(self.version, 0) for request in self.requests.values())
        return is_free or bool(self.withdrawn) or self.is_gone

    def serve(self, version: int) -> None:
        """It serves `version` from now on, and begins with what has waited for that."""
        now_s = asyncio.get_running_loop().time()
        for group_id, request in self.requests.items():
            if self.version < request.from_version <= version:
                self._asked_s.update(((group_id, index), now_s) for index in self._missing[group_id])
        self.version = version

    def deliver(self, collected: Collected) -> tuple[list[Rollout], list[GenerationRequest]]:
        """Takes in its answer: finished rollouts, and requests to go on with parked ones.

        Those of a group go on together, once it works on none of them any more: they share the prefill of their prompt.
        """
        self.stats = collected.stats
        finished, to_go_on = list[Rollout](), list[GenerationRequest]()
        now_s, seconds, num_tokens = asyncio.get_running_loop().time(), 0.0, 0
        for rollout in collected.rollouts:
            group_id = rollout.group_id
            if (group_id, rollout.index) in self.withdrawn:
                self.withdrawn.remove((group_id, rollout.index))
                continue
            self.num_outstanding -= 1
            missing = self._missing[group_id]
            num_tokens += rollout.num_tokens - missing.pop(rollout.index).num_tokens
            seconds += now_s - self._asked_s.pop((group_id, rollout.index))
            if rollout.finish_reason.is_final:
                finished.append(rollout)
            else:
                self._parked.setdefault(group_id, []).append(rollout)
            if not missing:
                del self._missing[group_id]
                request, parked = self.requests.pop(group_id), self._parked.pop(group_id, None)
                if parked:
                    to_go_on.append(replace(request, partials=tuple(parked)))
        if num_tokens:
            token_s = seconds / num_tokens
            later_s = (self.token_s + token_s) / 2 if self.token_s else token_s
            self.token_s = min(token_s, later_s)  # what is better counts at once
        if not self.num_outstanding:
            self._idle_since_s = now_s
            if not self.withdrawn:
                self.busy.clear()
        return finished, to_go_on

    def unanswered(self) -> list[GenerationRequest]:
        """Requests that others must generate now that it is gone: from the last segment on, or from the prompt."""
        return [
            replace(request, partials=(*self._missing[group_id].values(), *self._parked.get(group_id, ())))
            for group_id, request in self.requests.items()
        ]

    def withdraw(self, than: int = NO_VERSION) -> list[GenerationRequest]:
        """Requests that it does not owe any more, as it does not answer, or is late with a version: of `unanswered`
        those that wait for a newer one `than` this."""
        requests = [request for request in self.unanswered() if request.from_version > than]
        for request in requests:
            missing = {(request.group_id, index) for index in self._missing.pop(request.group_id)}
            self.withdrawn |= missing
            self.num_outstanding -= len(missing)
            for key in missing:
                del self._asked_s[key]
            del self.requests[request.group_id]
            self._parked.pop(request.group_id, None)
        return requests

    @property
    def is_rested(self) -> bool:
        """Whether it may be tried again, if it is slow."""
        rest_s = asyncio.get_running_loop().time() - self._idle_since_s
        return not self.num_outstanding and rest_s > REST * (self._idle_since_s - self._busy_since_s)
