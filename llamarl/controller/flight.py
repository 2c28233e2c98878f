"""Rollouts in flight and the generators that work on them.

`Flight` is one table with a row for each rollout, from its admission until its group is scored. `Replica` is one
generator, and `Replicas` distributes requests over all of them. A rollout moves through these states::

               assign            receive: parked        the last of its group at its holder
    QUEUED ---------> GENERATING ---------------> PARKED --------------------------------> QUEUED
     ^  ^  <---------- | |  withdraw: its holder is gone, silent, or late with a version   (PARKED, too)
     |  |              | +-- receive: finished ------------------------> ENDED
     |  |              +---- receive: a turn has ended ---> TURN ------> ENDED
     |  +----------------------- its environment has replied |
     +--------------------- an agent has it: QUEUED -------->+

Each call of an agent is a rollout with its own request. A rollout that is no longer needed stays in the table as
DROPPED until its generator has confirmed that it has stopped.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial, reduce
from statistics import median_low
from typing import TypeVar

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, MeshFailed, port
from llamarl.config import RunConfig, build
from llamarl.controller.ports import GeneratorPort, split_requests
from llamarl.controller.progress import NO_VERSION, Progress
from llamarl.controller.restart import STOP_S
from llamarl.controller.supervision import Signal, Supervisor
from llamarl.executors.replies import GeneratorStats, Published, ScoredResponse
from llamarl.journal.records import Key
from llamarl.journal.writer import Journal
from llamarl.training.probe import is_rescored
from llamarl.types import (
    FinishReason,
    GenerationRequest,
    Outcome,
    Prompt,
    RewardResult,
    Rollout,
    RolloutGroup,
)

FIRST_EVAL_ID, FIRST_GREEDY_ID = 1 << 40, 1 << 41
"""First group ids of evaluations and of greedy responses. Group ids key the sampling noise, so none may overlap."""
REST = 4.0
"""A slow replica gets a test request after an idle time of REST times the duration of its last requests."""
SLOW = 4.0
"""A replica is slow if its seconds per token are more than SLOW times the median."""
ABORT_INTERVAL_S = 1.0
"""Interval between two aborts sent to a replica that is about to leave."""
T = TypeVar("T")


class Replica:
    """One generator, as the controller knows it. `Flight` knows which rollouts it owes.

    Example::

        replica = Replica(handle, timeout_s=600)
        await replica.port.submit(requests)
        replica.version      # NO_VERSION until it has adopted weights
    """

    def __init__(self, handle: ExecutorHandle, timeout_s: float) -> None:
        self.handle = handle
        self.name = handle.name
        self.port = port(GeneratorPort, handle, timeout_s)
        self.version = NO_VERSION
        """Newest version whose adoption it has confirmed."""
        self.fetching = NO_VERSION
        """Version that it is fetching; `NO_VERSION` means none."""
        self.fetching_since_s = math.inf
        self.adopt_s = math.inf
        """Seconds of its last adoption, from call to answer; infinite before the first."""
        self.transport = ""
        """Transport of its weights; empty until it is chosen."""
        self.tried: Published | None = None
        """Version of its last fetch, successful or not."""
        self.num_failures = 0
        """Consecutive fetches that failed or delivered wrong weights."""
        self.is_leaving = self.is_gone = False
        self.adopting: asyncio.Task[None] | None = None
        """Task of its adoption loop."""
        self.token_s = 0.0
        """Recent seconds per token of a rollout, from request to answer; 0 before the first answer."""
        self._busy_since_s = self._idle_since_s = 0.0
        """Time at which it last began, or ceased, to owe rollouts."""
        self.withdrawn = set[Key]()
        """Rollouts that were given to other replicas. Its answers for these are ignored."""
        self.busy = asyncio.Event()
        """Set while it owes rollouts, and once it is gone."""
        self.stats = GeneratorStats()

    def mark_busy(self) -> None:
        """Notes that it owes rollouts from now on."""
        self._busy_since_s = asyncio.get_running_loop().time()
        self.busy.set()

    def mark_answered(self, seconds: float, num_tokens: int, *, is_idle: bool) -> None:
        """Notes an answer with `num_tokens` tokens, which took their rollouts `seconds` in total."""
        if num_tokens:
            token_s = seconds / num_tokens
            average_s = (self.token_s + token_s) / 2 if self.token_s else token_s
            self.token_s = min(token_s, average_s)  # an improvement counts at once
        if is_idle:
            self._idle_since_s = asyncio.get_running_loop().time()
            if not self.withdrawn:
                self.busy.clear()

    @property
    def is_rested(self) -> bool:
        """Whether it may get a test request, if it is slow and owes nothing."""
        idle_s = asyncio.get_running_loop().time() - self._idle_since_s
        return idle_s > REST * (self._idle_since_s - self._busy_since_s)


class RolloutState(StrEnum):
    """Where a rollout is."""

    QUEUED = "queued"
    """It waits for a generator in service. Its holder, if any, keeps its KV cache."""
    GENERATING = "generating"
    """Its holder generates it, or will."""
    PARKED = "parked"
    """Its holder generates the rest of its group; then all continue, and share the prefill of their prompt."""
    TURN = "turn"
    """An environment or an agent has it. Its holder, if any, keeps its KV cache."""
    ENDED = "ended"
    """It waits for the rest of its group and for the reward."""
    DROPPED = "dropped"
    """It is no longer needed. Its holder has not confirmed yet that it has stopped."""


_NEXT = {
    RolloutState.QUEUED: {RolloutState.GENERATING, RolloutState.TURN},
    RolloutState.GENERATING: {
        RolloutState.QUEUED,
        RolloutState.PARKED,
        RolloutState.TURN,
        RolloutState.ENDED,
        RolloutState.DROPPED,
    },
    RolloutState.PARKED: {RolloutState.QUEUED},
    RolloutState.TURN: {RolloutState.QUEUED, RolloutState.ENDED},
    RolloutState.ENDED: {RolloutState.QUEUED},  # the agent makes another call
    RolloutState.DROPPED: set[RolloutState](),
}
_OWED = {RolloutState.GENERATING, RolloutState.DROPPED}
"""States in which the holder owes an answer."""


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightRollout:
    """A row of `Flight`, which only `Flight` changes."""

    request: GenerationRequest
    """Request for the rollout, without partial rollouts."""
    rollout: Rollout
    """The rollout as far as the controller knows it."""
    state: RolloutState = RolloutState.QUEUED
    holder: Replica | None = None
    """Generator that works on it or keeps its KV cache."""
    since_s: float = 0.0
    """Time at which it entered its state; GENERATING: time from which its holder could begin."""
    environment_s: float | None = None
    """Seconds spent on replies to its turns; None means that it had no environment."""
    result: RewardResult | None = None
    """Result of its environment, which replaces that of the reward."""

    @property
    def key(self) -> Key:
        return self.rollout.group_id, self.rollout.index


def greedy_request(request: GenerationRequest) -> GenerationRequest:
    """Returns the request for one greedy response to the same prompt."""
    sampling, group_id = replace(request.sampling, temperature=0.0), FIRST_GREEDY_ID + request.group_id
    return replace(request, group_id=group_id, group_size=1, sampling=sampling, purpose="greedy", is_rescored=False)


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group with rollouts in flight."""

    prompt: Prompt
    rows: Sequence[InFlightRollout]
    """Rollouts by index; the greedy response, if there is one, is last."""

    @property
    def request(self) -> GenerationRequest:
        """Request for the group, without the greedy response."""
        return self.rows[0].request

    @property
    def group_id(self) -> int:
        return self.request.group_id

    @property
    def is_trained_on(self) -> bool:
        return self.request.purpose == "train"

    @property
    def rollouts(self) -> list[Rollout]:
        """Rollouts as far as they are known; the greedy response is last."""
        return [row.rollout for row in self.rows]

    @property
    def num_tokens(self) -> int:
        return sum(row.rollout.num_tokens for row in self.rows)

    @property
    def num_ended(self) -> int:
        return sum(row.state is RolloutState.ENDED for row in self.rows)

    @property
    def is_whole(self) -> bool:
        """Whether all rollouts have ended."""
        return self.num_ended == len(self.rows)

    def scored(self, rollouts: Sequence[Rollout], scores: Sequence[ScoredResponse]) -> RolloutGroup:
        """Returns the group of these rollouts with their scores, both by index."""
        size = self.request.group_size
        environment_s = [row.environment_s for row in self.rows[:size]]
        has_environment = any(seconds is not None for seconds in environment_s)
        return RolloutGroup(
            group_id=self.group_id,
            prompt=self.prompt,
            rollouts=tuple(rollouts[:size]),
            results=tuple(score.result for score in scores[:size]),
            responses=tuple(score.response for score in scores[:size]),
            environment_s=tuple(seconds or 0.0 for seconds in environment_s) if has_environment else (),
            baseline=_baseline(rollouts[size], scores[size].result) if len(rollouts) > size else None,
        )


def _baseline(greedy: Rollout, result: RewardResult) -> RewardResult:
    if greedy.finish_reason is not FinishReason.FAILED:
        return result
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=greedy.error)


class Flight:
    """The table of rollouts that are requested and not yet scored.

    Example::

        pending = flight.begin(request, prompt, held={})               # rows are QUEUED
        flight.assign(replica, requests_for(pending.rows))             # GENERATING at `replica`
        finished, to_resume = flight.receive(replica, collected.rollouts)
        group = await flight.whole.get()                               # all its rollouts are ENDED
    """

    def __init__(
        self, config: RunConfig, journal: Journal, on_generated: Callable[[int], None] = lambda group_id: None
    ) -> None:
        """
        Args:
            journal: gets each answer before anything else uses it.
            on_generated: called with the id of each group whose rollouts have all ended.
        """
        advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
        self._journal, self._segment_tokens = journal, config.rollout.segment_tokens
        self._on_generated = on_generated
        self.whole = asyncio.Queue[PendingGroup]()
        """Groups whose rollouts have all ended, to be scored."""
        self._is_rescored = partial(is_rescored, config)
        self._needs_greedy: bool = advantage.NEEDS_GREEDY
        self._sources_with_turns = {
            label for label, source in config.by_source.items() if source.rollout.environment is not None
        }
        """Sources with an environment, which replies to a rollout that has stopped."""
        self.groups = dict[int, PendingGroup]()
        """Groups by the ids of their requests."""
        self._rows = dict[int, dict[int, InFlightRollout]]()
        """The table: rows by request id and index."""
        self._owed = dict[Replica, dict[Key, InFlightRollout]]()
        """Rows that are GENERATING or DROPPED, by holder."""
        self._num_owed = dict[Replica, Counter[int]]()
        """Numbers of these rows, by holder and request id."""

    def _move(self, row: InFlightRollout, state: RolloutState, holder: Replica | None = None) -> None:
        assert state in _NEXT[row.state], f"rollout {row.key} is {row.state}, and cannot be {state}"
        self._unindex(row)
        if holder is not None and state in _OWED:
            self._owed.setdefault(holder, {})[row.key] = row
            self._num_owed.setdefault(holder, Counter())[row.request.group_id] += 1
        row.state, row.holder, row.since_s = state, holder, asyncio.get_running_loop().time()

    def _unindex(self, row: InFlightRollout) -> None:
        if row.holder is None or row.state not in _OWED:
            return
        del self._owed[row.holder][row.key]
        num_owed = self._num_owed[row.holder]
        num_owed[row.request.group_id] -= 1
        if not num_owed[row.request.group_id]:
            del num_owed[row.request.group_id]
        if not num_owed:
            del self._owed[row.holder], self._num_owed[row.holder]

    # Views

    def __getitem__(self, key: Key) -> InFlightRollout:
        return self._rows[key[0]][key[1]]

    def get(self, key: Key) -> InFlightRollout | None:
        """Returns the row of a rollout, or None if it is not in flight."""
        return self._rows.get(key[0], {}).get(key[1])

    def __contains__(self, key: Key) -> bool:
        """Whether a rollout is in flight and not dropped."""
        return (row := self.get(key)) is not None and row.state is not RolloutState.DROPPED

    def rows_of(self, request_id: int) -> Sequence[InFlightRollout]:
        """Returns the rows of a request. An empty list means that it is not in flight."""
        return [*self._rows.get(request_id, {}).values()]

    def in_state(self, state: RolloutState) -> Iterator[InFlightRollout]:
        return (row for rows in self._rows.values() for row in rows.values() if row.state is state)

    def owed(self, replica: Replica) -> Mapping[Key, InFlightRollout]:
        """Returns the rollouts that a generator was asked for and has not answered."""
        return self._owed.get(replica, {})

    def requests_at(self, replica: Replica) -> Mapping[int, int]:
        """Returns the number of rollouts that a generator owes, by request id."""
        return self._num_owed.get(replica, {})

    def describe(self) -> str:
        """Returns text for a stall report: the number of groups, and what the oldest one lacks."""
        group_ids = {pending.group_id for pending in self.groups.values()}
        if not group_ids:
            return "none is in flight"
        oldest = self.groups[min(group_ids)]
        arrived = f"{oldest.num_ended} of {len(oldest.rows)} rollouts"
        return f"{len(group_ids)} are in flight, the oldest is group {oldest.group_id} with {arrived}"

    # Moves

    def begin(self, request: GenerationRequest, prompt: Prompt, held: Mapping[Key, Rollout]) -> PendingGroup:
        """Adds a group that is to be generated.

        Args:
            held: rollouts of the group from the journal. Finished ones are not generated again, and some of these wait
                for the reply to their last turn. The others continue where they stopped.
        """
        has_turns = prompt.source in self._sources_with_turns
        is_trained_on = request.purpose == "train"
        request = replace(
            request, segment_tokens=self._segment_tokens, has_turns=has_turns,
            is_rescored=is_trained_on and self._is_rescored(request.group_id),
        )  # fmt: skip
        with_greedy = self._needs_greedy and is_trained_on
        rows = list[InFlightRollout]()
        for part in (request, greedy_request(request)) if with_greedy else (request,):
            by_index = self._rows[part.group_id] = {
                start.index: InFlightRollout(request=part, rollout=held.get((part.group_id, start.index), start))
                for start in part.starts()
            }
            rows += by_index.values()
        pending = PendingGroup(prompt, rows)
        self.groups.update((row.request.group_id, pending) for row in rows)
        now_s = asyncio.get_running_loop().time()
        for row in rows:
            row.since_s, is_final = now_s, row.rollout.finish_reason.is_final
            row.state = self._state_after(row) if is_final else RolloutState.QUEUED
        self._record(row.rollout for row in rows if row.key in held)
        self._check_whole(pending)
        return pending

    def expect(self, request: GenerationRequest) -> None:
        """Queues the rollouts of a request: a call of an agent, or the next turn after a reply of the environment."""
        rows = self._rows.setdefault(request.group_id, {})
        for start in request.starts():
            if (row := rows.get(start.index)) is None:
                rows[start.index] = InFlightRollout(request=replace(request, partials=()), rollout=start)
            else:
                self._move(row, RolloutState.QUEUED, row.holder)
                row.request, row.rollout = replace(request, partials=()), start

    def is_dropped(self, request_id: int) -> bool:
        """Whether a request was dropped and its generator has not confirmed that yet."""
        return any(row.state is RolloutState.DROPPED for row in self.rows_of(request_id))

    def wanted(self, requests: Iterable[GenerationRequest]) -> list[GenerationRequest]:
        """Returns the requests that are still in flight and not dropped."""
        return [request for request in requests if all((request.group_id, index) in self for index in request.indices)]

    def assign(self, replica: Replica, requests: Iterable[GenerationRequest]) -> None:
        """Notes that a generator is about to get these requests, and owes them from now on."""
        if not self.owed(replica):
            replica.mark_busy()
        for request in requests:
            for index in request.indices:
                self._move(self[request.group_id, index], RolloutState.GENERATING, replica)

    def set_version(self, replica: Replica, version: int) -> None:
        """Notes that a generator serves `version`, and begins the rollouts that waited for it."""
        now_s = asyncio.get_running_loop().time()
        for row in self.owed(replica).values():
            if replica.version < row.request.from_version <= version:
                row.since_s = now_s
        replica.version = version

    def can_answer(self, replica: Replica) -> bool:
        """Whether a generator owes a rollout that does not wait for newer weights, or is gone."""
        requests = (next(iter(self._rows[request_id].values())).request for request_id in self.requests_at(replica))
        can_begin = any(request.from_version <= max(replica.version, 0) for request in requests)
        return can_begin or bool(replica.withdrawn) or replica.is_gone

    def receive(self, replica: Replica, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[GenerationRequest]]:
        """Takes an answer of a generator. Returns its finished rollouts, and requests to continue with parked ones."""
        owed, answered = self.owed(replica), list[tuple[InFlightRollout, Rollout]]()
        for rollout in rollouts:
            if row := owed.get((rollout.group_id, rollout.index)):
                answered.append((row, rollout))
            else:
                replica.withdrawn.remove((rollout.group_id, rollout.index))
        self._record(rollout for _, rollout in answered)
        now_s, seconds, num_tokens, finished = asyncio.get_running_loop().time(), 0.0, 0, list[Rollout]()
        for row, rollout in answered:
            if row.state is RolloutState.DROPPED:
                self._remove(row)
                continue
            num_tokens += rollout.num_tokens - row.rollout.num_tokens
            seconds += now_s - row.since_s
            row.rollout, is_final = rollout, rollout.finish_reason.is_final
            state = self._state_after(row) if is_final else RolloutState.PARKED
            # Of a response that ended by length the generator keeps no keys and values.
            is_gone = state is RolloutState.ENDED or rollout.finish_reason is FinishReason.LENGTH
            self._move(row, state, None if is_gone else replica)
            if is_final:
                finished.append(rollout)
        # A greedy response, which has its own request, may come with its group: check each group once.
        groups = {group.group_id: group for rollout in finished if (group := self.groups.get(rollout.group_id))}
        for pending in groups.values():
            self._check_whole(pending)
        replica.mark_answered(seconds, num_tokens, is_idle=not self.owed(replica))
        owed_requests = self.requests_at(replica)
        complete = [row.request.group_id for row, _ in answered if row.request.group_id not in owed_requests]
        return finished, self._requeue(replica, complete)

    def waiting_for_weights(self, replica: Replica, version: float = math.inf) -> list[int]:
        """Returns ids of requests that a generator cannot begin with its weights, but with those of `version`."""
        rows = self.owed(replica).values()
        early = (row.request for row in rows if replica.version < row.request.from_version <= version)
        return [*dict.fromkeys(request.group_id for request in early)]

    def withdraw(self, replica: Replica, request_ids: Collection[int] | None = None) -> list[GenerationRequest]:
        """Takes unanswered requests back from a generator, so that others can work on them. Its later answers are
        ignored.

        Args:
            request_ids: None means all.

        Returns:
            Requests that continue the rollouts as far as they are known.
        """
        rows = [
            row for row in self.owed(replica).values() if request_ids is None or row.request.group_id in request_ids
        ]
        if not replica.is_gone:
            replica.withdrawn |= {row.key for row in rows}
        for row in [row for row in rows if row.state is RolloutState.DROPPED]:
            self._remove(row)
        return self._requeue(replica, [row.request.group_id for row in rows if row.state is RolloutState.GENERATING])

    def detach(self, row: InFlightRollout) -> Replica | None:
        """Detaches a rollout from the generator that holds its KV cache. Returns that generator, or None if no
        generator holds it or its holder still works on its group."""
        if row.state in _OWED or row.state is RolloutState.PARKED:
            return None
        holder, row.holder = row.holder, None
        return holder

    def drop(self, rows: Iterable[InFlightRollout]) -> dict[Replica, list[int]]:
        """Drops rollouts that are no longer needed. Returns request ids by the generators that still work on them."""
        working = defaultdict[Replica, list[int]](list)
        for row in rows:
            if row.state is RolloutState.GENERATING and row.holder is not None:
                working[row.holder].append(row.request.group_id)
                self._move(row, RolloutState.DROPPED, row.holder)
            elif row.state is not RolloutState.DROPPED:
                self._remove(row)
        return working

    def begin_turn(self, row: InFlightRollout) -> None:
        """Gives a rollout to an agent."""
        self._move(row, RolloutState.TURN)

    def cut(self, row: InFlightRollout, rollout: Rollout) -> None:
        """Replaces a rollout that its environment has by one that ends by length, before the environment judges it."""
        assert row.state is RolloutState.TURN
        row.rollout = rollout

    def end(self, row: InFlightRollout, rollout: Rollout, result: RewardResult | None) -> None:
        """Ends a rollout, as its environment or agent decided, with the result of the environment if there is one."""
        self._move(row, RolloutState.ENDED, row.holder)
        row.rollout, row.result = rollout, result
        self._check_whole(self.groups[row.request.group_id])

    def _state_after(self, row: InFlightRollout) -> RolloutState:
        """Returns the state of a rollout that a generator has finished. An environment also gets rollouts that end by
        length, and may judge them."""
        is_agents_call = row.request.group_id not in self.groups
        reasons = {FinishReason.STOP} if is_agents_call else {FinishReason.STOP, FinishReason.LENGTH}
        goes_to_turns = row.request.has_turns and row.rollout.finish_reason in reasons
        return RolloutState.TURN if goes_to_turns else RolloutState.ENDED

    def _check_whole(self, pending: PendingGroup) -> None:
        """Passes a group on to be scored if all its rollouts have ended."""
        if pending.is_whole:
            self._on_generated(pending.group_id)
            self.whole.put_nowait(pending)

    def remove(self, pending: PendingGroup) -> None:
        """Removes a scored group."""
        for row in pending.rows:
            self.groups.pop(row.request.group_id, None)
            self._remove(row)

    def _remove(self, row: InFlightRollout) -> None:
        self._unindex(row)
        rows = self._rows[row.request.group_id]
        del rows[row.rollout.index]
        if not rows:
            del self._rows[row.request.group_id]

    def _requeue(self, replica: Replica, request_ids: Iterable[int]) -> list[GenerationRequest]:
        """Queues the unfinished rollouts of these requests at a generator. Returns requests to continue with them."""
        requests = list[GenerationRequest]()
        for request_id in dict.fromkeys(request_ids):
            rows = [row for row in self._rows.get(request_id, {}).values() if row.holder is replica]
            rows = [row for row in rows if row.state in (RolloutState.GENERATING, RolloutState.PARKED)]
            for row in rows:
                self._move(row, RolloutState.QUEUED)
            requests += requests_for(rows)
        return requests

    def _record(self, rollouts: Iterable[Rollout]) -> None:
        pairs = ((self.groups.get(rollout.group_id), rollout) for rollout in rollouts)
        if trained := [(group.group_id, rollout) for group, rollout in pairs if group and group.is_trained_on]:
            self._journal.rollouts(trained)


def requests_for(rows: Iterable[InFlightRollout]) -> list[GenerationRequest]:
    """Returns requests for queued rollouts, each with the partial rollouts to continue."""
    by_request = defaultdict[int, list[InFlightRollout]](list)
    for row in rows:
        if row.state is RolloutState.QUEUED:
            by_request[row.request.group_id].append(row)
    return [
        request
        if len(queued) == request.group_size
        and not any(row.rollout.num_tokens or row.rollout.prefills for row in queued)
        else replace(request, partials=tuple(row.rollout for row in queued))
        for queued in by_request.values()
        for request in [queued[0].request]
    ]


class Replicas:
    """All generators of a run.

    A replica is *in service* if it serves the released version or a newer one, is not about to leave, and has confirmed
    that it stopped all withdrawn rollouts. Only replicas in service get requests, so that a late replica delays no
    group. This rule does not bound the staleness: `GenerationRequest.from_version` does (`admission.py`).

    Example::

        replicas = Replicas(executors.generators, flight, supervisor, progress, timeout_s=600)
        await replicas.submit(requests)    # to the replicas in service that owe the least
        replicas.release(version)          # replicas that serve an older version are out of service
    """

    def __init__(
        self,
        handles: Sequence[ExecutorHandle],
        flight: Flight,
        supervisor: Supervisor,
        progress: Progress,
        timeout_s: float,
        *,
        survives_deaths: bool = False,
    ) -> None:
        """
        Args:
            survives_deaths: whether a call to a dead replica has no effect, since `Recovery` handles the death.
        """
        self.alive = [Replica(handle, timeout_s) for handle in handles]
        self.num_resumed = 0
        """Partial rollouts that were continued."""
        self.timeout_s = timeout_s
        self.changed = Signal()
        """Notified when a replica joins, leaves, adopts a version or owes less."""
        self._flight = flight
        self._supervisor = supervisor
        self._progress = progress
        self._survives_deaths = survives_deaths
        self._stats_of_removed = GeneratorStats()

    def in_service(self, replica: Replica) -> bool:
        return replica.version >= self._progress.released and not replica.is_leaving and not replica.withdrawn

    def can_catch_up(self, replica: Replica, patience_s: float) -> bool:
        """Whether the release of a new version should wait for this replica.

        That holds in service. Otherwise it holds if the replica adopts within half of the patience: then it can finish
        its current fetch and adopt the new version in time. Without this rule it would never catch up.
        """
        age_s = asyncio.get_running_loop().time() - replica.fetching_since_s
        return self.in_service(replica) or max(replica.adopt_s, age_s) < patience_s / 2

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Sends each request to the replica in service that owes the fewest rollouts. Waits while there is none.

        A rollout that returns from its environment goes to the replica that holds its KV cache. A slow replica (`SLOW`)
        gets one test request at a time.
        """
        await self.changed.until(lambda: any(map(self.in_service, self.alive)))
        by_home, others = defaultdict[Replica, list[GenerationRequest]](list), list[GenerationRequest]()
        for request in self._flight.wanted(requests):
            home = self._home(request)
            (others if home is None else by_home[home]).append(request)
        for home, part in by_home.items():
            self._send(home, part)
        quick = self._quick(others)
        if len(others) == 1:
            self._send(min(quick, key=self.num_owed), others)
        elif others:
            size = len(others[0].partials) or others[0].group_size
            for replica, part in zip(quick, deal(others, [*map(self.num_owed, quick)], size), strict=True):
                if part:
                    self._send(replica, part)

    def num_owed(self, replica: Replica) -> int:
        """Returns the number of rollouts that a replica was asked for and has not answered."""
        return len(self._flight.owed(replica))

    def _quick(self, requests: list[GenerationRequest]) -> list[Replica]:
        """Returns the replicas in service that are not slow. Each slow one that is rested takes the last request."""
        able = [replica for replica in self.alive if self.in_service(replica)]
        median_s = median_low([replica.token_s for replica in able if replica.token_s] or [math.inf])
        slow = {replica for replica in able if replica.token_s > SLOW * median_s}
        for replica in slow:
            if requests and replica.is_rested and not self.num_owed(replica):
                self._send(replica, [requests.pop()])
        return [replica for replica in able if replica not in slow]

    def _send(self, replica: Replica, requests: list[GenerationRequest]) -> None:
        """Sends requests, which the replica owes from now on. If the call fails, `remove` returns them."""
        self._flight.assign(replica, requests)
        self.changed.notify()
        # Each call is a task: one that hangs must not delay the others.
        for batch in split_requests(requests):
            sent = self.unless_dead(replica, replica.port.submit(batch))
            self._supervisor.start(sent, f"requests to {replica.name}")

    def _home(self, request: GenerationRequest) -> Replica | None:
        """Returns the replica that holds the KV cache of a single rollout, if it is in service."""
        if len(request.partials) != 1:
            return None
        row = self._flight[request.group_id, request.partials[0].index]
        if row.holder is None or (not row.holder.is_gone and self.in_service(row.holder)):
            return row.holder
        self.free_kv([row])
        return None

    def free_kv(self, rows: Iterable[InFlightRollout]) -> None:
        """Frees the KV cache of rollouts at the replicas that hold it."""
        held = defaultdict[Replica, list[Key]](list)
        for row in rows:
            if (holder := self._flight.detach(row)) and not holder.is_gone:
                held[holder].append(row.key)
        for holder, keys in held.items():
            released = self.unless_dead(holder, holder.port.release(keys))
            self._supervisor.start(released, f"release on {holder.name}")

    def drop(self, request_ids: Iterable[int]) -> None:
        """Aborts requests that are no longer needed, and frees their KV cache."""
        rows = [row for request_id in request_ids for row in self._flight.rows_of(request_id)]
        self.free_kv(rows)
        for replica, working in self._flight.drop(rows).items():
            aborted = self.unless_dead(replica, replica.port.abort(working))
            self._supervisor.start(aborted, f"abort on {replica.name}")

    def resume(self, requests: Sequence[GenerationRequest]) -> None:
        """Submits requests with partial rollouts in the background."""
        if requests:
            self._supervisor.start(self.submit(requests), "partial rollouts")

    async def unless_dead(self, replica: Replica, call: Awaitable[T]) -> T | None:
        """Returns the answer of a call, or None if the replica is gone, or is dead or hangs and deaths are survived."""
        try:
            return await call
        except CallTimeout as error:
            if not self._survives_deaths:
                raise
            dead = MeshFailed(replica.name, (0,), str(error))
            with suppress(ExecutorError):
                await replica.handle.give_up(dead, STOP_S)
            return None
        except MeshFailed:
            if not (self._survives_deaths or replica.is_gone):
                raise
            return None

    def adopted(self, replica: Replica, version: int) -> None:
        """Notes that `replica` serves `version`."""
        self._flight.set_version(replica, version)
        self.steal_waiting(replica)
        self.changed.notify()

    async def wait_for_adoption(self, version: int, awaited: Sequence[Replica], patience_s: float) -> set[Replica]:
        """Waits until these replicas serve `version` or are gone. Returns the late ones after `patience_s`."""
        late = set(awaited)

        def is_complete() -> bool:
            late.difference_update([replica for replica in late if replica.version >= version or replica.is_gone])
            return not late

        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self.changed.until(is_complete)
        return late

    def release(self, version: int) -> None:
        """Makes `version` the oldest one that a replica may serve to be in service."""
        self._progress.released = max(self._progress.released, version)
        self.changed.notify()

    def add(self, handle: ExecutorHandle) -> Replica:
        """Adds a replica, which gets requests once it has weights."""
        replica = Replica(handle, self.timeout_s)
        self.alive.append(replica)
        return replica

    def remove(self, replica: Replica) -> list[GenerationRequest]:
        """Removes a replica that is gone. Returns requests to continue with its unanswered rollouts."""
        replica.is_gone = True
        replica.busy.set()
        if replica.adopting is not None:
            replica.adopting.cancel()
        self.alive.remove(replica)
        self._stats_of_removed = self._stats_of_removed.plus(replica.stats._replace(num_running=0, num_waiting=0))
        self.changed.notify()
        return self._flight.withdraw(replica)

    def steal_waiting(self, idle: Replica) -> None:
        """Gives an idle replica work: half of the requests that wait for weights at another replica and could begin
        here, the oldest first."""
        if self._flight.can_answer(idle) or idle not in self._quick([]):
            return
        waiting = {replica: self._flight.waiting_for_weights(replica, idle.version) for replica in self.alive}
        longest = max(waiting, key=lambda replica: len(waiting[replica]))
        if stolen := waiting[longest][: (len(waiting[longest]) + 1) // 2]:
            self._send(idle, self.withdraw(longest, stolen))

    def withdraw_waiting(self, replica: Replica) -> list[GenerationRequest]:
        """Withdraws requests that wait for newer weights at `replica`."""
        return self.withdraw(replica, self._flight.waiting_for_weights(replica))

    def withdraw(self, replica: Replica, request_ids: Collection[int] | None = None) -> list[GenerationRequest]:
        """Takes unanswered requests back from a replica, which gets no new ones until it has confirmed that.

        Args:
            request_ids: None means all.

        Returns:
            Requests for other replicas, with the partial rollouts to continue.
        """
        if requests := self._flight.withdraw(replica, request_ids):
            aborted = self.unless_dead(replica, replica.port.abort([request.group_id for request in requests]))
            self._supervisor.start(aborted, f"withdraw from {replica.name}")
        return requests

    async def drain(self, replica: Replica) -> None:
        """Aborts the rollouts that `replica` generates, so that others continue them. Waits until it owes none.

        Raises CallTimeout.
        """
        replica.is_leaving = True
        clock = asyncio.get_running_loop()
        deadline_s = clock.time() + self.timeout_s
        while (owed := self._flight.owed(replica)) and not replica.is_gone:
            if clock.time() > deadline_s:
                raise CallTimeout(replica.name, "abort", self.timeout_s, f"still owes {len(owed)} rollouts")
            await self.unless_dead(
                replica, replica.port.abort([*{row.request.group_id: None for row in owed.values()}])
            )
            emptied = self.changed.until(lambda: replica.is_gone or not self.num_owed(replica))
            try:
                await asyncio.wait_for(emptied, ABORT_INTERVAL_S)
            except TimeoutError:  # a request was on its way when the last abort arrived
                continue

    def describe(self) -> list[str]:
        """Returns texts for a stall report: the rollouts that each replica owes."""
        return [
            f"{replica.name} owes {self.num_owed(replica)} rollouts"
            + ("" if self.in_service(replica) else f" and is out of service at version {replica.version}")
            for replica in self.alive
        ]

    @property
    def stats(self) -> GeneratorStats:
        """Sums over all replicas since their start, as of their last answers."""
        return reduce(GeneratorStats.plus, (replica.stats for replica in self.alive), self._stats_of_removed)


def deal(items: Iterable[T], loads: list[int], weight: int) -> list[list[T]]:
    """Distributes `items` in order: each goes to the least loaded receiver, whose load then grows by `weight`."""
    dealt = [list[T]() for _ in loads]
    queue = [(load, receiver) for receiver, load in enumerate(loads)]
    heapq.heapify(queue)
    for item in items:
        load, receiver = queue[0]
        dealt[receiver].append(item)
        heapq.heapreplace(queue, (load + weight, receiver))
    return dealt
