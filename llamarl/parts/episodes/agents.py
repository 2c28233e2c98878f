"""`Agents`: episodes of external programs that call the policy through the gateway.

Each call is a separate rollout under the admission of its group: any generator may serve it, and it is parked, resumed
and recovered like other rollouts. The training data of an episode arrives when the episode ends, so the death of the
gateway restarts the unfinished episodes.
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
    """Time when the agent started or was last answered, in seconds of the event loop's clock."""
    calls: set[int] = field(default_factory=set)
    """Ids of all requests of the agent."""


class Agents:
    """Episodes of external programs, of all groups: one kind of `Turns`."""

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
            waited: called with the seconds that the policy waited for an agent.
        """
        self._port, self._timeout_s = port(GatewayPort, handle, timeout_s), timeout_s
        self._flight, self._supervisor, self._replicas = flight, supervisor, replicas
        self._waited = waited
        self._episodes = dict[Key, _RunningEpisode]()
        self._asking = dict[int, Key]()
        """Key of the episode whose call is being generated, by the id of the request."""
        if isinstance(handle, RestartableHandle):
            handle.restore = self._restore

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Starts the agents, which then send their calls."""
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
        """Handles finished rollouts, which are all answers to calls."""
        for one in finished:
            self._episodes[self._asking.pop(one.group_id)].since_s = asyncio.get_running_loop().time()
        if finished:
            self._supervisor.start(self._port.answer(finished), "answers to agents")

    async def loop(self) -> None:
        """Consumes calls and ends of episodes. Waits for the gateway. Produces requests to generators, and complete
        rollouts. Unblocked by `submit` and `take`."""
        clock = asyncio.get_running_loop()
        while True:
            news = await self._port.collect()
            to_ask = list[GenerationRequest]()
            for group_id, index, request in news.calls:
                episode = self._episodes.get((group_id, index))
                if episode is None or self._flight.is_dropped(request.group_id):
                    continue  # a late message of a gateway
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
        """Forgets the calls of an ended episode."""
        for call in episode.calls:
            self._asking.pop(call, None)
        self._replicas.drop(episode.calls)

    async def _restore(self, life: ExecutorHandle) -> str:
        """Restarts all episodes on a new gateway."""
        tasks, now_s = list[AgentTask](), asyncio.get_running_loop().time()
        for key, episode in self._episodes.items():
            self._forget(episode)
            task = episode.task._replace(attempt=episode.task.attempt + 1)
            self._episodes[key] = _RunningEpisode(task=task, row=episode.row, since_s=now_s)
            tasks.append(task)
        await port(GatewayPort, life, self._timeout_s).submit(tasks)
        return f"{len(tasks)} episodes of agents, from their beginnings"

    def describe(self) -> str:
        """Returns a sentence on unfinished agent episodes for a stall report. Empty means none."""
        if not self._episodes:
            return ""
        age_s = asyncio.get_running_loop().time() - min(one.since_s for one in self._episodes.values())
        what = f"{len(self._episodes)} episodes of agents are under way, {len(self._asking)} wait for the policy"
        return f"{what}, and one agent has been silent for {age_s:.0f} s"
