"""`Agents`: episodes of outside programs, which ask the policy over the gateway.

Each call is a rollout of its own under the admission of its group: it goes to generators in service, is parked and goes
on, and survives their deaths as all rollouts do. What an episode is learnt from comes when it ends, so the loss of the
gateway costs the episodes under way, which begin again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from llamarl.cluster.api import ExecutorHandle, port
from llamarl.controller.flight import Flight, InFlightRollout, Replicas
from llamarl.controller.restart import RestartableHandle
from llamarl.controller.supervision import Supervisor
from llamarl.journal.records import Key
from llamarl.parts.episodes.gateway.news import AgentTask
from llamarl.parts.episodes.ports import GatewayPort
from llamarl.types import GenerationRequest, Rollout


@dataclass(kw_only=True, slots=True)
class _RunningEpisode:
    task: AgentTask
    row: InFlightRollout
    since_s: float
    """Time when the agent began, or was last answered, in seconds of the event loop's clock."""
    calls: set[int] = field(default_factory=set)
    """Ids of all its requests."""


class Agents:
    """Episodes that outside programs run, of all groups: one kind of `Turns`."""

    def __init__(
        self,
        handle: ExecutorHandle,
        timeout_s: float,
        supervisor: Supervisor,
        flight: Flight,
        replicas: Replicas,
        waited: Callable[[float], None],
    ) -> None:
        """
        Args:
            waited: hears how many seconds the policy has waited for an agent.
        """
        self._port, self._timeout_s = port(GatewayPort, handle, timeout_s), timeout_s
        self._flight, self._supervisor, self._replicas = flight, supervisor, replicas
        self._waited = waited
        self._episodes = dict[Key, _RunningEpisode]()
        self._asking = dict[int, Key]()
        """Key of the episode whose call generators work on, by the id of the request."""
        if isinstance(handle, RestartableHandle):
            handle.restore = self._restore

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Agents begin; they ask for the rest."""
        tasks, now_s = list[AgentTask](), asyncio.get_running_loop().time()
        for request in requests:
            prompt = self._flight.groups[request.group_id].prompt
            for row in [self._flight[request.group_id, index] for index in request.indices]:
                task = AgentTask(*row.key, prompt, request.sampling, 0)
                self._flight.begin_turn(row)
                self._episodes[row.key] = _RunningEpisode(task=task, row=row, since_s=now_s)
                tasks.append(task)
        await self._port.submit(tasks)

    def take(self, finished: Sequence[Rollout]) -> None:
        """All are answers to calls."""
        for one in finished:
            self._episodes[self._asking.pop(one.group_id)].since_s = asyncio.get_running_loop().time()
        if finished:
            self._supervisor.start(self._port.answer(finished), "answers to agents")

    async def loop(self) -> None:
        """Consumes calls and ends of episodes; waits for the gateway; produces requests to generators, and whole
        rollouts; unblocked by `submit` and `take`."""
        clock = asyncio.get_running_loop()
        while True:
            news = await self._port.collect()
            to_ask = list[GenerationRequest]()
            for group_id, index, request in news.calls:
                episode = self._episodes.get((group_id, index))
                if episode is None or self._flight.is_dropped(request.group_id):
                    continue  # a gateway's last word
                self._waited(clock.time() - episode.since_s)
                episode.calls.add(request.group_id)
                self._asking[request.group_id] = group_id, index
                to_ask.append(replace(request, from_version=episode.row.request.from_version))
                self._flight.expect(to_ask[-1])
            for rollout, result in news.ends:
                key = rollout.group_id, rollout.index
                if (episode := self._episodes.pop(key, None)) is None:
                    continue
                self._forget(episode)
                self._flight.end(episode.row, rollout, result)
            self._replicas.resume(to_ask)

    def _forget(self, episode: _RunningEpisode) -> None:
        """Nobody waits for its calls."""
        for call in episode.calls:
            self._asking.pop(call, None)
        self._replicas.drop(episode.calls)

    async def _restore(self, life: ExecutorHandle) -> str:
        """All episodes begin again."""
        tasks, now_s = list[AgentTask](), asyncio.get_running_loop().time()
        for key, episode in self._episodes.items():
            self._forget(episode)
            task = episode.task._replace(attempt=episode.task.attempt + 1)
            self._episodes[key] = _RunningEpisode(task=task, row=episode.row, since_s=now_s)
            tasks.append(task)
        await port(GatewayPort, life, self._timeout_s).submit(tasks)
        return f"{len(tasks)} episodes of agents, from their beginnings"

    def describe(self) -> str:
        """Episodes of agents under way, in a sentence for a stall report; empty: there is none."""
        if not self._episodes:
            return ""
        age_s = asyncio.get_running_loop().time() - min(one.since_s for one in self._episodes.values())
        what = f"{len(self._episodes)} episodes of agents are under way, {len(self._asking)} wait for the policy"
        return f"{what}, and one agent has been silent for {age_s:.0f} s"
