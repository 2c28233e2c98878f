"""`Flight`: where each rollout is, from its admission until its group is scored. One table; all else are views of it.

::

               ask              answer: parked            the last of its group at its holder
    QUEUED -----------> ASKED -----------------> PARKED --------------------------------------> QUEUED
     ^  ^  <-----------   | |   taken back: its holder is gone, silent, or late with a version  (PARKED, too)
     |  |                 | +-- answer: whole --------------------------> ENDED
     |  |                 +---- answer: a turn has ended ---> TURN ------> ENDED
     |  +------------------------ its environment has answered |
     +------------------------ an agent has it: QUEUED ------->+

What a generator owes, what must be asked for again when it dies, how many rollouts a group lacks, which turns wait for
their environment: each is read from here. A call of an agent is a rollout of its own; one that nobody wants any more is
DROPPED until its holder has said so.
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

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, MeshFailed
from llamarl.cluster.port import port
from llamarl.config import RunConfig, build
from llamarl.controller.ports import GeneratorPort, requests_of
from llamarl.controller.restart import STOP_S
from llamarl.controller.supervision import Signal, Supervisor
from llamarl.executors.replies import GeneratorStats, Published, ScoredResponse
from llamarl.journal.records import Key
from llamarl.journal.writer import Journal
from llamarl.training.probe import is_rescored
from llamarl.types import FinishReason, GenerationRequest, Outcome, Prompt, RewardResult, Rollout, RolloutGroup

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


FIRST_EVAL_ID, FIRST_GREEDY_ID = 1 << 40, 1 << 41
"""Group ids key the sampling noise, so those of evaluations and greedy responses begin far from the training's."""


class RolloutState(StrEnum):
    """Place of a rollout on its way."""

    QUEUED = "queued"
    """It waits for a generator in service; its holder, if any, keeps what it has computed."""
    ASKED = "asked"
    """Its holder owes it."""
    PARKED = "parked"
    """Its holder works on others of its group, which share the prefill of their prompt when they go on."""
    TURN = "turn"
    """An environment or an agent has it; its holder, if any, keeps what it has computed."""
    ENDED = "ended"
    """It waits for the others of its group, and for the reward."""
    DROPPED = "dropped"
    """Nobody wants it; its holder owes the answer that it has stopped."""


_NEXT = {
    RolloutState.QUEUED: {RolloutState.ASKED, RolloutState.TURN},
    RolloutState.ASKED: {
        RolloutState.QUEUED,
        RolloutState.PARKED,
        RolloutState.TURN,
        RolloutState.ENDED,
        RolloutState.DROPPED,
    },
    RolloutState.PARKED: {RolloutState.QUEUED},
    RolloutState.TURN: {RolloutState.QUEUED, RolloutState.ENDED},
    RolloutState.ENDED: {RolloutState.QUEUED},  # the call of an agent, which goes on after it
    RolloutState.DROPPED: set[RolloutState](),
}
_OWED = {RolloutState.ASKED, RolloutState.DROPPED}
"""Its holder has not answered yet."""


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightRollout:
    """A row of the table; `Flight` alone moves it."""

    request: GenerationRequest
    """Asks for it; without partials."""
    rollout: Rollout
    """The rollout, as far as it is known."""
    state: RolloutState = RolloutState.QUEUED
    holder: Replica | None = None
    """The generator that works on it, or keeps what it has computed."""
    since_s: float = 0.0
    """When it came to its state, on the event loop's clock; ASKED: when its holder could begin."""
    environment_s: float | None = None
    """Seconds that replies to its turns took; None: nobody was asked."""
    result: RewardResult | None = None
    """Result of its environment, in place of the reward's."""

    @property
    def key(self) -> Key:
        return self.rollout.group_id, self.rollout.index


def greedy_request(request: GenerationRequest) -> GenerationRequest:
    """The request for one greedy response to the same prompt."""
    sampling, group_id = replace(request.sampling, temperature=0.0), FIRST_GREEDY_ID + request.group_id
    return replace(request, group_id=group_id, group_size=1, sampling=sampling, purpose="greedy", is_rescored=False)


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group whose rollouts are still coming in."""

    prompt: Prompt
    rows: Sequence[InFlightRollout]
    """Rollouts by index; a greedy one, where there is one, comes last."""

    @property
    def request(self) -> GenerationRequest:
        """Asks for the group, without its greedy response."""
        return self.rows[0].request

    @property
    def group_id(self) -> int:
        return self.request.group_id

    @property
    def is_trained_on(self) -> bool:
        return self.request.purpose == "train"

    @property
    def rollouts(self) -> list[Rollout]:
        """Rollouts as far as they are known; a greedy one comes last."""
        return [row.rollout for row in self.rows]

    @property
    def num_tokens(self) -> int:
        return sum(row.rollout.num_tokens for row in self.rows)

    @property
    def num_ended(self) -> int:
        """Rollouts that are whole."""
        return sum(row.state is RolloutState.ENDED for row in self.rows)

    @property
    def is_whole(self) -> bool:
        """Nothing is to come any more."""
        return self.num_ended == len(self.rows)

    def scored(self, rollouts: Sequence[Rollout], said: Sequence[ScoredResponse]) -> RolloutGroup:
        """All of them, scored, in their order."""
        size = self.request.group_size
        spent_s = [row.environment_s for row in self.rows[:size]]
        return RolloutGroup(
            group_id=self.group_id,
            prompt=self.prompt,
            rollouts=tuple(rollouts[:size]),
            results=tuple(one.result for one in said[:size]),
            responses=tuple(one.response for one in said[:size]),
            environment_s=tuple(one or 0.0 for one in spent_s) if any(one is not None for one in spent_s) else (),
            baseline=_baseline(rollouts[size], said[size].result) if len(rollouts) > size else None,
        )


def _baseline(greedy: Rollout, result: RewardResult) -> RewardResult:
    if greedy.finish_reason is not FinishReason.FAILED:
        return result
    return RewardResult(outcome=Outcome.INVALID, value=0.0, reason=greedy.error)


class Flight:
    """Rollouts that are asked for and not yet scored."""

    def __init__(
        self, config: RunConfig, journal: Journal, generated: Callable[[int], None] = lambda group_id: None
    ) -> None:
        """
        Args:
            journal: gets each answer before anything is made of it.
            generated: hears the id of each group whose rollouts have all come.
        """
        advantage = build(config.trainer.advantage, "llamarl.algorithms.advantages", "trainer.advantage")
        self._journal, self._segment_tokens = journal, config.rollout.segment_tokens
        self._generated = generated
        self.whole = asyncio.Queue[PendingGroup]()
        """Groups whose rollouts have all come, to be scored."""
        self._is_rescored = partial(is_rescored, config)
        self._needs_greedy: bool = advantage.NEEDS_GREEDY
        self._with_turns = {label for label, one in config.by_source.items() if one.rollout.environment is not None}
        """Sources whose environment says what follows a rollout that has stopped."""
        self.groups = dict[int, PendingGroup]()
        """Groups by the ids of their requests."""
        self._rows = dict[int, dict[int, InFlightRollout]]()
        """The table: rows by request and index."""
        self._owed = dict[Replica, dict[Key, InFlightRollout]]()
        """Index of the rows that are ASKED or DROPPED, by holder."""
        self._asked = dict[Replica, Counter[int]]()
        """Numbers of these, by holder and request."""

    def _move(self, row: InFlightRollout, state: RolloutState, holder: Replica | None = None) -> None:
        assert state in _NEXT[row.state], f"rollout {row.key} is {row.state}, and cannot be {state}"
        self._unindex(row)
        if holder is not None and state in _OWED:
            self._owed.setdefault(holder, {})[row.key] = row
            self._asked.setdefault(holder, Counter())[row.request.group_id] += 1
        row.state, row.holder, row.since_s = state, holder, asyncio.get_running_loop().time()

    def _unindex(self, row: InFlightRollout) -> None:
        if row.holder is None or row.state not in _OWED:
            return
        del self._owed[row.holder][row.key]
        asked = self._asked[row.holder]
        asked[row.request.group_id] -= 1
        if not asked[row.request.group_id]:
            del asked[row.request.group_id]
        if not asked:
            del self._owed[row.holder], self._asked[row.holder]

    # Views

    def __getitem__(self, key: Key) -> InFlightRollout:
        return self._rows[key[0]][key[1]]

    def get(self, key: Key) -> InFlightRollout | None:
        """The row of a rollout; None: it is not in flight."""
        return self._rows.get(key[0], {}).get(key[1])

    def __contains__(self, key: Key) -> bool:
        """Whether a rollout is in flight, and wanted."""
        return (row := self.get(key)) is not None and row.state is not RolloutState.DROPPED

    def of_request(self, request_id: int) -> Sequence[InFlightRollout]:
        """The rows of a request; none: it is not in flight."""
        return [*self._rows.get(request_id, {}).values()]

    def rows(self, state: RolloutState) -> Iterator[InFlightRollout]:
        """All in this state."""
        return (row for rows in self._rows.values() for row in rows.values() if row.state is state)

    def owed(self, replica: Replica) -> Mapping[Key, InFlightRollout]:
        """Rollouts that a generator has been asked for and has not answered."""
        return self._owed.get(replica, {})

    def asked(self, replica: Replica) -> Mapping[int, int]:
        """Number of rollouts that a generator owes of each request."""
        return self._asked.get(replica, {})

    def describe(self) -> str:
        """Text for a stall report: how many groups there are, and what the oldest lacks."""
        pending = {one.group_id for one in self.groups.values()}
        if not pending:
            return "none is in flight"
        oldest = self.groups[min(pending)]
        arrived = f"{oldest.num_ended} of {len(oldest.rows)} rollouts"
        return f"{len(pending)} are in flight, the oldest is group {oldest.group_id} with {arrived}"

    # Moves

    def begin(self, request: GenerationRequest, prompt: Prompt, held: Mapping[Key, Rollout]) -> PendingGroup:
        """A group that is to be generated, of which the journal has some of these rollouts: finished ones, some of
        which wait for the reply to their last turn, and some to go on with."""
        has_turns = prompt.source in self._with_turns
        is_trained_on = request.purpose == "train"
        request = replace(
            request, segment_tokens=self._segment_tokens, has_turns=has_turns,
            is_rescored=is_trained_on and self._is_rescored(request.group_id),
        )  # fmt: skip
        with_greedy = self._needs_greedy and is_trained_on
        rows = list[InFlightRollout]()
        for one in (request, greedy_request(request)) if with_greedy else (request,):
            of_request = self._rows[one.group_id] = {
                start.index: InFlightRollout(request=one, rollout=held.get((one.group_id, start.index), start))
                for start in one.starts()
            }
            rows += of_request.values()
        now_s = asyncio.get_running_loop().time()
        for row in rows:
            row.since_s, is_final = now_s, row.rollout.finish_reason.is_final
            row.state = _after(row) if is_final else RolloutState.QUEUED
        pending = PendingGroup(prompt, rows)
        self.groups.update((row.request.group_id, pending) for row in rows)
        self._record(row.rollout for row in rows if row.key in held)
        self._ended(pending)
        return pending

    def expect(self, request: GenerationRequest) -> None:
        """Rollouts are to begin, or to go on from the partials of `request`: a call of an agent, or what has been
        answered by its environment."""
        rows = self._rows.setdefault(request.group_id, {})
        for start in request.starts():
            if (row := rows.get(start.index)) is None:
                rows[start.index] = InFlightRollout(request=replace(request, partials=()), rollout=start)
            else:
                self._move(row, RolloutState.QUEUED, row.holder)
                row.request, row.rollout = replace(request, partials=()), start

    def is_dropped(self, request_id: int) -> bool:
        """Whether nobody wants a request any more, and its generator has not said yet that it has stopped."""
        return any(row.state is RolloutState.DROPPED for row in self.of_request(request_id))

    def queued(self, requests: Iterable[GenerationRequest]) -> list[GenerationRequest]:
        """Requests among these that somebody still waits for."""
        return [one for one in requests if all((one.group_id, index) in self for index in one.indices)]

    def ask(self, replica: Replica, requests: Iterable[GenerationRequest]) -> None:
        """A generator is about to be asked: from now on it owes these."""
        if not self.owed(replica):
            replica.begins()
        for request in requests:
            for index in request.indices:
                self._move(self[request.group_id, index], RolloutState.ASKED, replica)

    def serves(self, replica: Replica, version: int) -> None:
        """A generator serves `version` from now on, and begins with what has waited for that."""
        now_s = asyncio.get_running_loop().time()
        for row in self.owed(replica).values():
            if replica.version < row.request.from_version <= version:
                row.since_s = now_s
        replica.version = version

    def may_answer(self, replica: Replica) -> bool:
        """Whether a generator owes something that does not wait for a version to come, or is gone."""
        requests = (next(iter(self._rows[one].values())).request for one in self.asked(replica))
        is_free = any(request.from_version <= max(replica.version, 0) for request in requests)
        return is_free or bool(replica.withdrawn) or replica.is_gone

    def answer(self, replica: Replica, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[GenerationRequest]]:
        """Takes in what a generator says: finished rollouts, and requests to go on with parked ones."""
        owed, own = self.owed(replica), list[tuple[InFlightRollout, Rollout]]()
        for one in rollouts:
            if row := owed.get((one.group_id, one.index)):
                own.append((row, one))
            else:
                replica.withdrawn.remove((one.group_id, one.index))
        self._record(one for _, one in own)
        now_s, seconds, num_tokens, finished = asyncio.get_running_loop().time(), 0.0, 0, list[Rollout]()
        for row, one in own:
            if row.state is RolloutState.DROPPED:
                self._remove(row)
                continue
            num_tokens += one.num_tokens - row.rollout.num_tokens
            seconds += now_s - row.since_s
            row.rollout, is_final = one, one.finish_reason.is_final
            state = _after(row) if is_final else RolloutState.PARKED
            self._move(row, state, None if state is RolloutState.ENDED else replica)
            if is_final:
                finished.append(one)
        # A greedy response, which has a request of its own, may come with its group.
        ended = {group.group_id: group for one in finished if (group := self.groups.get(one.group_id))}
        for pending in ended.values():
            self._ended(pending)
        replica.answered(seconds, num_tokens, is_idle=not self.owed(replica))
        busy = self.asked(replica)
        idle = [row.request.group_id for row, _ in own if row.request.group_id not in busy]
        return finished, self._requeued(replica, idle)

    def waiting(self, replica: Replica, version: float = math.inf) -> list[int]:
        """Requests that a generator cannot begin before it serves newer weights, and another could that has those of
        `version`."""
        rows = self.owed(replica).values()
        early = (row.request for row in rows if replica.version < row.request.from_version <= version)
        return [*dict.fromkeys(request.group_id for request in early)]

    def take_back(self, replica: Replica, request_ids: Collection[int] | None = None) -> list[GenerationRequest]:
        """Requests, all or these, for what a generator has not answered, which others take over: it is gone, silent,
        late with a version, or others have nothing to do. What it says of them later is nobody's."""
        rows = [
            row for row in self.owed(replica).values() if request_ids is None or row.request.group_id in request_ids
        ]
        if not replica.is_gone:
            replica.withdrawn |= {row.key for row in rows}
        for row in [row for row in rows if row.state is RolloutState.DROPPED]:
            self._remove(row)
        return self._requeued(replica, [row.request.group_id for row in rows if row.state is RolloutState.ASKED])

    def detach(self, row: InFlightRollout) -> Replica | None:
        """The generator that keeps what a rollout which it does not work on has computed, and need not any more."""
        if row.state in _OWED or row.state is RolloutState.PARKED:
            return None
        holder, row.holder = row.holder, None
        return holder

    def drop(self, rows: Iterable[InFlightRollout]) -> dict[Replica, list[int]]:
        """Nobody wants these any more; the generators that work on them, each with its requests."""
        working = defaultdict[Replica, list[int]](list)
        for row in rows:
            if row.state is RolloutState.ASKED and row.holder is not None:
                working[row.holder].append(row.request.group_id)
                self._move(row, RolloutState.DROPPED, row.holder)
            elif row.state is not RolloutState.DROPPED:
                self._remove(row)
        return working

    def turn(self, row: InFlightRollout) -> None:
        """An agent begins with it."""
        self._move(row, RolloutState.TURN)

    def end(self, row: InFlightRollout, rollout: Rollout, result: RewardResult | None) -> None:
        """The environment, or an agent, has ended it, perhaps with a result."""
        self._move(row, RolloutState.ENDED, row.holder)
        row.rollout, row.result = rollout, result
        self._ended(self.groups[row.request.group_id])

    def _ended(self, pending: PendingGroup) -> None:
        """Rollouts of a group have ended, all or some."""
        if pending.is_whole:
            self._generated(pending.group_id)
            self.whole.put_nowait(pending)

    def remove(self, pending: PendingGroup) -> None:
        """Removes a group that is scored."""
        for row in pending.rows:
            self.groups.pop(row.request.group_id, None)
            self._remove(row)

    def _remove(self, row: InFlightRollout) -> None:
        self._unindex(row)
        rows = self._rows[row.request.group_id]
        del rows[row.rollout.index]
        if not rows:
            del self._rows[row.request.group_id]

    def _requeued(self, replica: Replica, request_ids: Iterable[int]) -> list[GenerationRequest]:
        """Requests to go on with what a generator has of these."""
        requests = list[GenerationRequest]()
        for request_id in dict.fromkeys(request_ids):
            rows = [row for row in self._rows.get(request_id, {}).values() if row.holder is replica]
            rows = [row for row in rows if row.state in (RolloutState.ASKED, RolloutState.PARKED)]
            for row in rows:
                self._move(row, RolloutState.QUEUED)
            requests += requests_for(rows)
        return requests

    def _record(self, rollouts: Iterable[Rollout]) -> None:
        pending = ((self.groups.get(one.group_id), one) for one in rollouts)
        if recorded := [(of.group_id, one) for of, one in pending if of and of.is_trained_on]:
            self._journal.rollouts(recorded)


def _after(row: InFlightRollout) -> RolloutState:
    """State of a rollout that a generator has finished."""
    has_ended_a_turn = row.request.has_turns and row.rollout.finish_reason is FinishReason.STOP
    return RolloutState.TURN if has_ended_a_turn else RolloutState.ENDED


def requests_for(rows: Iterable[InFlightRollout]) -> list[GenerationRequest]:
    """Requests for those that are queued, one for each request that they are of, to go on from what there is."""
    by_request = defaultdict[int, list[InFlightRollout]](list)
    for row in rows:
        if row.state is RolloutState.QUEUED:
            by_request[row.request.group_id].append(row)
    return [
        request
        if len(of) == request.group_size and not any(row.rollout.num_tokens or row.rollout.prefills for row in of)
        else replace(request, partials=tuple(row.rollout for row in of))
        for of in by_request.values()
        for request in [of[0].request]
    ]


SLOW = 4.0
"""A replica whose tokens take so many times longer than the median's gets a request only to see whether it still is."""
LEAST_PATIENCE_S = 1.0
"""Times `SLOW`, for the adoption of weights."""
ABORT_INTERVAL_S = 1.0
"""A replica that is about to leave is asked so often for what it still decodes."""
T = TypeVar("T")


class Replicas:
    """Scatter and gather over the generators that are alive."""

    def __init__(
        self,
        handles: Sequence[ExecutorHandle],
        flight: Flight,
        supervisor: Supervisor,
        timeout_s: float,
        *,
        survives_deaths: bool = False,
    ) -> None:
        """Calls to a dead replica have no effect if `survives_deaths`: somebody sees the death and calls `lose`."""
        self.alive = [Replica(handle, timeout_s) for handle in handles]
        self.released = NO_VERSION
        """Replicas that serve an older version are left behind."""
        self.num_resumed = 0
        """Partial rollouts that went on."""
        self.timeout_s = timeout_s
        self.changed = Signal()
        """A replica came, went, adopted a version or owes less."""
        self._flight = flight
        self._supervisor = supervisor
        self._survives_deaths = survives_deaths
        self._stats_of_lost = GeneratorStats()

    def serves(self, replica: Replica) -> bool:
        """Whether it is in service."""
        return replica.version >= self.released and not replica.is_leaving and not replica.withdrawn

    def can_follow(self, replica: Replica, patience_s: float) -> bool:
        """Whether a new version should wait for it. One that was left behind or has just come, but needs less than half
        the patience for a version, finishes the one that it fetches and then this one in time. It would else run after
        the newest version for ever."""
        age_s = asyncio.get_running_loop().time() - replica.fetching_since_s
        return self.serves(replica) or max(replica.adopt_s, age_s) < patience_s / 2

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Gives each request to the replica in service that owes the fewest rollouts; waits while there is none. What
        comes back from its environment goes where it was, and what is slow gets nothing while others are there."""
        await self.changed.until(lambda: any(map(self.serves, self.alive)))
        at_home, others = defaultdict[Replica, list[GenerationRequest]](list), list[GenerationRequest]()
        for request in self._flight.queued(requests):
            home = self._home(request)
            (others if home is None else at_home[home]).append(request)
        for home, part in at_home.items():
            self._send(home, part)
        able = self._quick(others)
        if len(others) == 1:
            self._send(min(able, key=self.owes), others)
        elif others:
            size = len(others[0].partials) or others[0].group_size
            for replica, part in zip(able, deal(others, [*map(self.owes, able)], size), strict=True):
                if part:
                    self._send(replica, part)

    def owes(self, replica: Replica) -> int:
        """Rollouts that a replica has been asked for and has not answered."""
        return len(self._flight.owed(replica))

    def _quick(self, requests: list[GenerationRequest]) -> list[Replica]:
        """Replicas in service that are not slow; each slow one that is to be tried takes the last of `requests`."""
        able = [replica for replica in self.alive if self.serves(replica)]
        usual_s = median_low([one.token_s for one in able if one.token_s] or [math.inf])
        slow = {replica for replica in able if replica.token_s > SLOW * usual_s}
        for replica in slow:
            if requests and replica.is_rested and not self.owes(replica):
                self._send(replica, [requests.pop()])
        return [replica for replica in able if replica not in slow]

    def _send(self, replica: Replica, requests: list[GenerationRequest]) -> None:
        """Sends requests, which are owed from now on: `lose` gives them back, whatever becomes of the call."""
        self._flight.ask(replica, requests)
        self.changed.notify()
        # A task of its own: one that hangs must not keep the others waiting.
        for parcel in requests_of(requests):
            sent = self.unless_dead(replica, replica.port.submit(parcel))
            self._supervisor.start(sent, f"requests to {replica.name}")

    def _home(self, request: GenerationRequest) -> Replica | None:
        """The replica that holds what a rollout has computed, if it is in service."""
        if len(request.partials) != 1:
            return None
        row = self._flight[request.group_id, request.partials[0].index]
        if row.holder is None or (not row.holder.is_gone and self.serves(row.holder)):
            return row.holder
        self.forget([row])
        return None

    def forget(self, rows: Iterable[InFlightRollout]) -> None:
        """Frees what replicas hold of rollouts that do not come back to them."""
        held = defaultdict[Replica, list[Key]](list)
        for row in rows:
            if (holder := self._flight.detach(row)) and not holder.is_gone:
                held[holder].append(row.key)
        for holder, keys in held.items():
            released = self.unless_dead(holder, holder.port.release(keys))
            self._supervisor.start(released, f"release on {holder.name}")

    def drop(self, request_ids: Iterable[int]) -> None:
        """Ends these requests where they are worked on, and frees what is held of them; they do not go on."""
        rows = [row for one in request_ids for row in self._flight.of_request(one)]
        self.forget(rows)
        for replica, working in self._flight.drop(rows).items():
            aborted = self.unless_dead(replica, replica.port.abort(working))
            self._supervisor.start(aborted, f"abort on {replica.name}")

    def resume(self, requests: Sequence[GenerationRequest]) -> None:
        """Unfinished requests go to whoever is free."""
        if requests:
            self._supervisor.start(self.submit(requests), "partial rollouts")

    async def unless_dead(self, replica: Replica, call: Awaitable[T]) -> T | None:
        """The answer; None from a replica that is gone, or where deaths are survived one that is dead or hangs."""
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
        """`replica` serves `version` from now on."""
        self._flight.serves(replica, version)
        self.steal_waiting(replica)
        self.changed.notify()

    async def adoption(
        self, version: int, awaited: Sequence[Replica], patience_s: float, *, hurries: bool
    ) -> set[Replica]:
        """Waits until these serve `version` or are gone; who has not by the deadline. With `hurries` that comes early
        when half of them took much less."""
        loop = asyncio.get_running_loop()
        start_s, late = loop.time(), set(awaited)

        def waits_for_at_most(number: int) -> bool:
            late.difference_update([one for one in late if one.version >= version or one.is_gone])
            return len(late) <= number

        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s) as limit:
                await self.changed.until(lambda: waits_for_at_most(len(awaited) // 2 if hurries else 0))
                limit.reschedule(start_s + min(patience_s, SLOW * max(loop.time() - start_s, LEAST_PATIENCE_S)))
                await self.changed.until(lambda: waits_for_at_most(0))
        return late

    def release(self, version: int) -> None:
        """Replicas that serve an older version are left behind from now on."""
        self.released = max(self.released, version)
        self.changed.notify()

    def add(self, handle: ExecutorHandle) -> Replica:
        """A new replica, which has no weights yet and gets no requests."""
        replica = Replica(handle, self.timeout_s)
        self.alive.append(replica)
        return replica

    def lose(self, replica: Replica) -> list[GenerationRequest]:
        """A replica is gone; what it has not answered completely."""
        replica.is_gone = True
        replica.busy.set()
        if replica.adopting is not None:
            replica.adopting.cancel()
        self.alive.remove(replica)
        self._stats_of_lost = self._stats_of_lost.plus(replica.stats._replace(num_running=0, num_waiting=0))
        self.changed.notify()
        return self._flight.take_back(replica)

    def steal_waiting(self, idle: Replica) -> None:
        """A replica that has nothing to do takes half of what waits for weights at another and could begin here, the
        oldest first."""
        if self._flight.may_answer(idle) or idle not in self._quick([]):
            return
        waiting = {one: self._flight.waiting(one, idle.version) for one in self.alive}
        most = max(waiting, key=lambda one: len(waiting[one]))
        if taken := waiting[most][: (len(waiting[most]) + 1) // 2]:
            self._send(idle, self.withdraw(most, taken))

    def withdraw_waiting(self, replica: Replica) -> list[GenerationRequest]:
        """Withdraws what waits for newer weights."""
        return self.withdraw(replica, self._flight.waiting(replica))

    def withdraw(self, replica: Replica, request_ids: Collection[int] | None = None) -> list[GenerationRequest]:
        """Requests that a replica has not answered completely, all or these, are for others to do; it gets no new ones
        until it knows."""
        if requests := self._flight.take_back(replica, request_ids):
            aborted = self.unless_dead(replica, replica.port.abort([request.group_id for request in requests]))
            self._supervisor.start(aborted, f"withdraw from {replica.name}")
        return requests

    async def drain(self, replica: Replica) -> None:
        """Takes back what `replica` decodes; the others go on with it.

        Raises CallTimeout.
        """
        replica.is_leaving = True
        clock = asyncio.get_running_loop()
        deadline_s = clock.time() + self.timeout_s
        while (owed := self._flight.owed(replica)) and not replica.is_gone:
            if clock.time() > deadline_s:
                owes = f"still owes {len(owed)} rollouts"
                raise CallTimeout(replica.name, "abort", self.timeout_s, owes)
            await self.unless_dead(
                replica, replica.port.abort([*{row.request.group_id: None for row in owed.values()}])
            )
            emptied = self.changed.until(lambda: replica.is_gone or not self.owes(replica))
            try:
                await asyncio.wait_for(emptied, ABORT_INTERVAL_S)
            except TimeoutError:  # a request was on its way when the last abort came
                continue

    def debts(self) -> list[str]:
        """Texts for a stall report: what each replica still owes."""
        return [
            f"{replica.name} owes {self.owes(replica)} rollouts"
            + ("" if self.serves(replica) else f" and is left behind at version {replica.version}")
            for replica in self.alive
        ]

    @property
    def stats(self) -> GeneratorStats:
        """Sums of what all replicas have done since their start, and what they do, as of their last replies."""
        return reduce(GeneratorStats.plus, (replica.stats for replica in self.alive), self._stats_of_lost)


def deal(items: Iterable[T], loads: list[int], weight: int) -> list[list[T]]:
    """Scatters `items`, in order, each to the least loaded receiver, whose load then grows by `weight`."""
    dealt = [list[T]() for _ in loads]
    queue = [(load, receiver) for receiver, load in enumerate(loads)]
    heapq.heapify(queue)
    for item in items:
        load, receiver = queue[0]
        dealt[receiver].append(item)
        heapq.heapreplace(queue, (load + weight, receiver))
    return dealt
