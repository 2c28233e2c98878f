"""`Episodes`: rollouts that interact with an environment.

A turn is a segment: the sampled tokens leave the generator like a parked rollout, the observation is appended, and the
rollout continues on the least loaded generator. Policy versions, weight updates, generator failures and the staleness
bound therefore work as for parked rollouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llamarl.cluster.api import ExecutorHandle, port
from llamarl.config import RunConfig
from llamarl.controller.flight import Flight, InFlightRollout, Replicas, RolloutState
from llamarl.controller.ports import Executors
from llamarl.controller.restart import RestartableHandle
from llamarl.controller.supervision import Supervisor
from llamarl.executors.replies import Replied
from llamarl.journal.records import Key
from llamarl.parts.episodes.agents import Agents
from llamarl.parts.episodes.environments._base import Environment
from llamarl.parts.episodes.environments._worker import build_environment
from llamarl.parts.episodes.ports import EnvironmentPort, OpenTurn
from llamarl.types import FinishReason, GenerationRequest, Rollout, observed


def open_turns(
    config: RunConfig,
    executors: Executors,
    supervisor: Supervisor,
    flight: Flight,
    replicas: Replicas,
    waited: Callable[..., None],
) -> Episodes | Agents | None:
    """Returns the agents or environments that reply between turns. None means single-turn rollouts. Raises
    ConfigError."""
    handle = executors.models.get("environment")
    if config.rollout.agent and handle:
        return Agents(handle, config.cluster.timeout_s, supervisor, flight, replicas, waited)
    environments = {
        label: build_environment(one.rollout.environment)
        for label, one in config.by_source.items()
        if one.rollout.environment
    }
    if not environments or handle is None:
        return None
    timeout_s = config.cluster.timeout_s
    return Episodes(handle, environments, timeout_s, supervisor, flight, replicas, waited)


def rewarded(rollout: Rollout, reward: float) -> Rollout:
    """Returns a rollout with the reward of its last turn, at the last token."""
    if not reward:
        return rollout
    rewards_T = rollout.turn_rewards_T.copy()
    rewards_T[-1] = reward
    return replace(rollout, columns=rollout.columns | {"turn_rewards": rewards_T})


def _is_cut(rollout: Rollout) -> bool:
    return rollout.finish_reason is FinishReason.LENGTH


class Episodes:
    """Episodes with an environment, of all groups: one kind of `Turns`."""

    def __init__(
        self,
        handle: ExecutorHandle,
        environments: Mapping[str, Environment],
        timeout_s: float,
        supervisor: Supervisor,
        flight: Flight,
        replicas: Replicas,
        waited: Callable[..., None],
    ) -> None:
        """
        Args:
            environments: environments by the label of their source.
            replicas: generators that continue rollouts and keep their KV cache.
            waited: called with the seconds that a rollout waited for a reply, and the reply.
        """
        self._port = port(EnvironmentPort, handle, timeout_s)
        self._environments, self._timeout_s, self._supervisor = environments, timeout_s, supervisor
        self._flight, self._replicas, self._waited = flight, replicas, waited
        if isinstance(handle, RestartableHandle):
            handle.restore = self._restore

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Sends the first requests of the policy."""
        await self._replicas.submit(requests)

    def take(self, finished: Sequence[Rollout]) -> None:
        """Requests replies for rollouts at the end of a turn, and judgments of rollouts that ended by length. The other
        rollouts are complete."""
        rows = [self._flight[one.group_id, one.index] for one in finished]
        turns, over = list[InFlightRollout](), list[InFlightRollout]()
        for row in rows:
            if row.state is RolloutState.TURN:
                (turns if not _is_cut(row.rollout) or self._environment_of(row).judges_ended else over).append(row)
        self._ask(turns)
        ended = [*over, *(row for row in rows if row.state is RolloutState.ENDED)]
        self._leave([row.key for row in ended if row.environment_s is not None])
        for row in over:
            self._flight.end(row, row.rollout, None)

    def _ask(self, rows: Sequence[InFlightRollout]) -> None:
        for row in rows:
            row.environment_s = row.environment_s or 0.0
        if rows:
            self._supervisor.start(self._port.submit([*map(self._open_turn, rows)]), "turns to the environment")

    def _open_turn(self, row: InFlightRollout) -> OpenTurn:
        prompt, is_over = self._flight.groups[row.request.group_id].prompt, _is_cut(row.rollout)
        return OpenTurn(*row.key, prompt, row.rollout.turns, row.environment_s or 0.0, is_over)

    def _environment_of(self, row: InFlightRollout) -> Environment:
        return self._environments[self._flight.groups[row.request.group_id].prompt.source]

    def _leave(self, episodes: list[Key]) -> None:
        """Cancels these unfinished episodes in the environment."""
        if episodes and any(one.is_stateful for one in self._environments.values()):
            self._supervisor.start(self._port.leave(episodes), "episodes that have ended")

    async def loop(self) -> None:
        """Consumes replies. Waits for episodes that need a reply. Produces rollouts to continue, and complete ones.
        Unblocked by `take`."""
        clock = asyncio.get_running_loop()
        while True:
            to_go_on = list[GenerationRequest]()
            for replied in await self._port.collect():
                row = self._flight.get((replied.group_id, replied.index))
                if row is None or row.state is not RolloutState.TURN or row.rollout.num_tokens != replied.num_tokens:
                    continue  # a repeated reply, after the environment restarted
                if _is_cut(row.rollout) and replied.observation_T is not None:
                    continue  # a repeated reply to the turn after which the rollout was cut
                self._waited(clock.time() - row.since_s, replied)
                row.environment_s = (row.environment_s or 0.0) + replied.seconds
                to_go_on += self._next(row, replied)
            self._replicas.resume(to_go_on)

    def _next(self, row: InFlightRollout, replied: Replied) -> list[GenerationRequest]:
        """Returns the request that continues an episode. Empty means that it has ended."""
        rollout = rewarded(row.rollout, replied.turn_reward)
        if replied.observation_T is not None:
            num_tokens = rollout.num_tokens + len(replied.observation_T)
            environment = self._environment_of(row)
            goes_on = rollout.num_turns < environment.max_turns
            if goes_on and num_tokens < row.request.sampling.max_new_tokens:
                columns = observed(rollout.columns, replied.observation_T)
                parked = replace(rollout, columns=columns, finish_reason=FinishReason.PARKED)
                request = replace(row.request, partials=(parked,))
                self._flight.expect(request)
                return [request]
            rollout = replace(rollout, finish_reason=FinishReason.LENGTH)
            if environment.judges_ended:
                self._flight.cut(row, rollout)
                self._ask([row])
                return []
            self._leave([row.key])
        self._flight.end(row, rollout, replied.result)
        self._replicas.free_kv([row])
        return []

    async def _restore(self, life: ExecutorHandle) -> str:
        """Requests all missing replies from a new environment."""
        turns = [*self._flight.in_state(RolloutState.TURN)]
        await port(EnvironmentPort, life, self._timeout_s).submit([*map(self._open_turn, turns)])
        return f"the turns of {len(turns)} episodes"

    def describe(self) -> str:
        """Returns a sentence on rollouts that wait for the environment, for a stall report. Empty means none."""
        since_s = [row.since_s for row in self._flight.in_state(RolloutState.TURN)]
        if not since_s:
            return ""
        age_s = asyncio.get_running_loop().time() - min(since_s)
        return f"{len(since_s)} rollouts wait for the environment, the oldest for {age_s:.0f} s"
