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
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from llamarl.config import RunConfig, build
from llamarl.controller.journal import Journal
from llamarl.controller.records import Key
from llamarl.controller.replica import Replica
from llamarl.executors.replies import ScoredResponse
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
class FlyingRollout:
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
    rows: Sequence[FlyingRollout]
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
        self._rows = dict[int, dict[int, FlyingRollout]]()
        """The table: rows by request and index."""
        self._owed = dict[Replica, dict[Key, FlyingRollout]]()
        """Index of the rows that are ASKED or DROPPED, by holder."""
        self._asked = dict[Replica, Counter[int]]()
        """Numbers of these, by holder and request."""

    def _move(self, row: FlyingRollout, state: RolloutState, holder: Replica | None = None) -> None:
        assert state in _NEXT[row.state], f"rollout {row.key} is {row.state}, and cannot be {state}"
        self._unindex(row)
        if holder is not None and state in _OWED:
            self._owed.setdefault(holder, {})[row.key] = row
            self._asked.setdefault(holder, Counter())[row.request.group_id] += 1
        row.state, row.holder, row.since_s = state, holder, asyncio.get_running_loop().time()

    def _unindex(self, row: FlyingRollout) -> None:
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

    def __getitem__(self, key: Key) -> FlyingRollout:
        return self._rows[key[0]][key[1]]

    def get(self, key: Key) -> FlyingRollout | None:
        """The row of a rollout; None: it is not in flight."""
        return self._rows.get(key[0], {}).get(key[1])

    def __contains__(self, key: Key) -> bool:
        """Whether a rollout is in flight, and wanted."""
        return (row := self.get(key)) is not None and row.state is not RolloutState.DROPPED

    def of_request(self, request_id: int) -> Sequence[FlyingRollout]:
        """The rows of a request; none: it is not in flight."""
        return [*self._rows.get(request_id, {}).values()]

    def rows(self, state: RolloutState) -> Iterator[FlyingRollout]:
        """All in this state."""
        return (row for rows in self._rows.values() for row in rows.values() if row.state is state)

    def owed(self, replica: Replica) -> Mapping[Key, FlyingRollout]:
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
        rows = list[FlyingRollout]()
        for one in (request, greedy_request(request)) if with_greedy else (request,):
            of_request = self._rows[one.group_id] = {
                start.index: FlyingRollout(request=one, rollout=held.get((one.group_id, start.index), start))
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
                rows[start.index] = FlyingRollout(request=replace(request, partials=()), rollout=start)
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
        owed, own = self.owed(replica), list[tuple[FlyingRollout, Rollout]]()
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

    def let_go(self, row: FlyingRollout) -> Replica | None:
        """The generator that keeps what a rollout which it does not work on has computed, and need not any more."""
        if row.state in _OWED or row.state is RolloutState.PARKED:
            return None
        holder, row.holder = row.holder, None
        return holder

    def drop(self, rows: Iterable[FlyingRollout]) -> dict[Replica, list[int]]:
        """Nobody wants these any more; the generators that work on them, each with its requests."""
        working = defaultdict[Replica, list[int]](list)
        for row in rows:
            if row.state is RolloutState.ASKED and row.holder is not None:
                working[row.holder].append(row.request.group_id)
                self._move(row, RolloutState.DROPPED, row.holder)
            elif row.state is not RolloutState.DROPPED:
                self._remove(row)
        return working

    def turn(self, row: FlyingRollout) -> None:
        """An agent begins with it."""
        self._move(row, RolloutState.TURN)

    def end(self, row: FlyingRollout, rollout: Rollout, result: RewardResult | None) -> None:
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

    def _remove(self, row: FlyingRollout) -> None:
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


def _after(row: FlyingRollout) -> RolloutState:
    """State of a rollout that a generator has finished."""
    has_ended_a_turn = row.request.has_turns and row.rollout.finish_reason is FinishReason.STOP
    return RolloutState.TURN if has_ended_a_turn else RolloutState.ENDED


def requests_for(rows: Iterable[FlyingRollout]) -> list[GenerationRequest]:
    """Requests for those that are queued, one for each request that they are of, to go on from what there is."""
    by_request = defaultdict[int, list[FlyingRollout]](list)
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
