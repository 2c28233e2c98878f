"""`Episodes`: rollouts that wait for their environment.

A turn is a segment: what was sampled leaves the generator as a parked rollout does, the observation is appended, and
the rollout goes on wherever most is free. So versions per token, new weights between and within turns, the loss of a
generator and the bound of staleness are what they are for parked rollouts.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from llamarl.cluster.api import ExecutorHandle
from llamarl.cluster.port import port
from llamarl.config import RunConfig
from llamarl.controller.groups import PendingGroup
from llamarl.controller.lives import RestartableHandle
from llamarl.controller.ports import Executors
from llamarl.controller.records import Key
from llamarl.controller.replica import Replica
from llamarl.controller.replicas import Replicas
from llamarl.controller.supervision import Supervisor
from llamarl.executors.replies import Replied
from llamarl.parts.episodes.agents import Agents
from llamarl.parts.episodes.environments._base import Environment
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.ports import EnvironmentPort, OpenTurn
from llamarl.types import FinishReason, GenerationRequest, Rollout, observed


@dataclass(kw_only=True, slots=True)
class _WaitingTurn:
    pending: PendingGroup
    rollout: Rollout
    since_s: float

    def episode(self, spent_s: float) -> OpenTurn:
        rollout = self.rollout
        return OpenTurn(rollout.group_id, rollout.index, self.pending.prompt, rollout.turns, spent_s)


def open_turns(
    config: RunConfig,
    executors: Executors,
    supervisor: Supervisor,
    pending: Mapping[int, PendingGroup],
    replicas: Replicas,
    ended: Callable[[Rollout], None],
    waited: Callable[..., None],
) -> Episodes | Agents | None:
    """Turns that an agent or an environment answers; None: a response is one turn. Raises ConfigError."""
    wanted, handle = config.rollout.environment, executors.models.get("environment")
    if config.rollout.agent and handle:
        return Agents(handle, pending, config.cluster.call_timeout_s, supervisor, replicas, ended, waited)
    if wanted is None or handle is None:
        return None
    environment, timeout_s = build_environment(wanted), config.cluster.call_timeout_s
    return Episodes(handle, environment, timeout_s, supervisor, replicas, ended, waited)


class Episodes:
    """Episodes that an environment answers, of all groups: one kind of `Turns`."""

    def __init__(
        self,
        handle: ExecutorHandle,
        environment: Environment,
        timeout_s: float,
        supervisor: Supervisor,
        replicas: Replicas,
        ended: Callable[[Rollout], None],
        waited: Callable[..., None],
    ) -> None:
        """
        Args:
            replicas: generators that go on, and hold what was computed until then.
            ended: takes a rollout that is whole.
            waited: hears how many seconds a rollout has waited for a reply, and the reply.
        """
        self._port = port(EnvironmentPort, handle, timeout_s)
        self._environment, self._timeout_s, self._supervisor = environment, timeout_s, supervisor
        self._replicas, self._ended, self._waited = replicas, ended, waited
        self._waiting = dict[Key, _WaitingTurn]()
        self._spent_s = defaultdict[Key, float](float)
        if isinstance(handle, RestartableHandle):
            handle.restore = self._restore

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """The policy begins."""
        await self._replicas.submit(requests)

    def take(
        self, finished: Sequence[Rollout], pending: Mapping[int, PendingGroup], holder: Replica | None
    ) -> list[Rollout]:
        """Keeps rollouts that end a turn until their reply; returns the others, which are whole.

        Args:
            pending: groups by the ids of their requests.
            holder: what has computed them, and holds that; None: nobody does.
        """
        now_s, episodes = asyncio.get_running_loop().time(), list[OpenTurn]()
        turns = [rollout for rollout in finished if rollout.finish_reason is FinishReason.STOP]
        for rollout in turns:
            key = rollout.group_id, rollout.index
            self._waiting[key] = waiting = _WaitingTurn(
                pending=pending[rollout.group_id], rollout=rollout, since_s=now_s
            )
            episodes.append(waiting.episode(self._spent_s[key]))
        if holder is not None:
            self._replicas.hold(holder, turns)
        if episodes:
            self._supervisor.start(self._port.submit(episodes), "turns to the environment")
        ended = [rollout for rollout in finished if rollout.finish_reason is not FinishReason.STOP]
        keys = [(rollout.group_id, rollout.index) for rollout in ended]
        begun = [key for key in keys if key in self._spent_s]
        for key in begun:
            pending[key[0]].environment_s[key] = self._spent_s.pop(key)
        self._leave(begun)
        return ended

    def _leave(self, episodes: list[Key]) -> None:
        """The environment is not asked about these any more, and has not ended them."""
        if episodes and self._environment.is_stateful:
            self._supervisor.start(self._port.leave(episodes), "episodes that have ended")

    async def loop(self) -> None:
        """Consumes replies; waits for episodes to be asked for; produces rollouts to go on with, and whole ones;
        unblocked by `take`."""
        clock = asyncio.get_running_loop()
        while True:
            to_go_on, ended = list[GenerationRequest](), list[Key]()
            for replied in await self._port.collect():
                key = replied.group_id, replied.index
                waiting = self._waiting.get(key)
                if waiting is None or waiting.rollout.num_tokens != replied.num_tokens:
                    continue  # a new environment was asked twice, or what the old one had answered
                del self._waiting[key]
                self._waited(clock.time() - waiting.since_s, replied)
                self._spent_s[key] += replied.seconds
                if (request := self._next(waiting, replied)) is not None:
                    to_go_on.append(request)
                else:
                    ended.append(key)
            self._replicas.resume(to_go_on)
            self._replicas.forget(ended)

    def _next(self, waiting: _WaitingTurn, replied: Replied) -> GenerationRequest | None:
        """Request with which an episode goes on; None: it has ended."""
        pending, rollout = waiting.pending, waiting.rollout
        request = pending.request_of(rollout)
        if replied.observation_T is not None:
            num_tokens = rollout.num_tokens + len(replied.observation_T)
            goes_on = rollout.num_turns < self._environment.max_turns
            if goes_on and num_tokens < request.sampling.max_new_tokens:
                columns = observed(rollout.columns, replied.observation_T)
                parked = replace(rollout, columns=columns, finish_reason=FinishReason.PARKED)
                return replace(request, partials=(parked,))
            rollout = replace(rollout, finish_reason=FinishReason.LENGTH)
            self._leave([(rollout.group_id, rollout.index)])
        if replied.result is not None:
            pending.judged[rollout.group_id, rollout.index] = replied.result
        key = rollout.group_id, rollout.index
        pending.environment_s[key] = self._spent_s.pop(key)
        self._ended(rollout)
        return None

    async def _restore(self, life: ExecutorHandle) -> str:
        """A new environment is asked for all replies that are missing."""
        episodes = [waiting.episode(self._spent_s[key]) for key, waiting in self._waiting.items()]
        await port(EnvironmentPort, life, self._timeout_s).submit(episodes)
        return f"the turns of {len(episodes)} episodes"

    def describe(self) -> str:
        """Rollouts that wait for the environment, in a sentence for a stall report; empty: none waits."""
        if not self._waiting:
            return ""
        oldest = min(self._waiting.values(), key=lambda one: one.since_s)
        age_s = asyncio.get_running_loop().time() - oldest.since_s
        return f"{len(self._waiting)} rollouts wait for the environment, the oldest for {age_s:.0f} s"
