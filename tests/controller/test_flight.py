"""The table of rollouts, against a model that remembers only who was told what: each rollout is in one place."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamarl.controller.flight import Flight, PendingGroup, Replica, RolloutState, requests_for
from llamarl.journal.records import Key
from llamarl.journal.writer import Journal
from llamarl.parts.forecast.simulator.clock import run_virtual
from llamarl.types import FinishReason, GenerationRequest, Rollout, SamplingParams
from tests.controller.fakes import config, prompts
from tests.executors.ledger import Generator
from tests.nightly import examples

SIZE = 3
FINAL = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.FAILED]
ANY = [*FINAL, FinishReason.PARKED, FinishReason.ABORTED]
OWED = (RolloutState.GENERATING, RolloutState.DROPPED)


class Recording(Journal):
    """Remembers which rollouts it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Counter[Key]()

    def rollouts(self, rollouts: list[tuple[int, Rollout]]) -> None:
        self.given.update((one.group_id, one.index) for _, one in rollouts)


def request(group_id: int, purpose: str = "train", *, has_turns: bool = False) -> GenerationRequest:
    return GenerationRequest(
        group_id=group_id, prompt_token_ids_T=np.array([1], np.int32), group_size=SIZE if purpose == "train" else 1,
        sampling=SamplingParams(), has_turns=has_turns,
    )  # fmt: skip


def grown(rollout: Rollout, tokens: int, reason: FinishReason) -> Rollout:
    columns = {
        name: np.concatenate([values, np.ones(tokens, values.dtype)]) for name, values in rollout.columns.items()
    }
    return Rollout(group_id=rollout.group_id, index=rollout.index, columns=columns, finish_reason=reason)


class Life(RuleBasedStateMachine):
    """Generators answer late, in part, or never; requests come, go on, are taken back and are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        asyncio.events._set_running_loop(self.loop)
        self.journal = Recording()
        wanted = config(
            Path(),
            rollout={"prompts_per_step": 2, "group_size": SIZE, "environment": "a:b"},
            reward={"parts": ["exact"]},
        )
        self.heard = list[int]()
        """Ids of groups that are whole and not scored, as `Flight` has told them."""
        self.flight = Flight(wanted, self.journal, self.heard.append)
        self.replicas = [Replica(Generator().start(f"generator-{n}"), 1.0) for n in range(3)]
        self.told = {replica: Counter[Key]() for replica in self.replicas}
        """What each generator owes an answer for, as it knows it."""
        self.queue = list[GenerationRequest]()
        self.groups = list[PendingGroup]()
        self.scored, self.calls, self.next_id = set[Key](), set[int](), 0

    def teardown(self) -> None:
        asyncio.events._set_running_loop(None)
        self.loop.close()

    def alive(self) -> list[Replica]:
        return [one for one in self.replicas if not one.is_gone]

    @rule(held=st.lists(st.sampled_from(ANY), max_size=SIZE))
    def begin(self, held: list[FinishReason]) -> None:
        """A group, of which a journal may have some rollouts."""
        starts = [grown(Rollout.empty(self.next_id, n), 2, reason) for n, reason in enumerate(held)]
        known = {(one.group_id, one.index): one for one in starts}
        before = self.journal.given.copy()
        group = self.flight.begin(request(self.next_id), prompts(1)[0], known)
        assert self.journal.given - before == Counter(known.keys()), "files that have it may go"
        self.groups.append(group)
        self.queue += requests_for(group.rows)
        self.next_id += 1

    @rule()
    def call(self) -> None:
        """An agent asks; or asks for more, where its call has been answered."""
        self.flight.expect(one := request(1000 + self.next_id, "call", has_turns=True))
        self.queue.append(one)
        self.calls.add(one.group_id)
        self.next_id += 1

    @rule(data=st.data())
    def more(self, data: st.DataObject) -> None:
        """What a turn has ended goes on: an environment has answered, or an agent asks again."""
        rows = [*self.flight.in_state(RolloutState.TURN)]
        if rows:
            row = data.draw(st.sampled_from(sorted(rows, key=lambda one: one.key)))
            parked = grown(row.rollout, 1, FinishReason.PARKED)
            one = replace(row.request, partials=(parked,))
            self.flight.expect(one)
            self.queue.append(one)

    @precondition(lambda self: self.queue and any(not one.withdrawn for one in self.alive()))
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        able = [one for one in self.alive() if not one.withdrawn]
        replica = data.draw(st.sampled_from(able))
        number = data.draw(st.integers(0, len(self.queue) - 1))
        requests = self.flight.wanted([self.queue.pop(number)])
        self.flight.assign(replica, requests)
        self.told[replica].update((one.group_id, start.index) for one in requests for start in one.starts())

    @precondition(lambda self: any(self.told[one] for one in self.alive()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        busy = [one for one in self.alive() if self.told[one]]
        replica = data.draw(st.sampled_from(busy))
        keys = data.draw(st.lists(st.sampled_from(sorted(self.told[replica])), min_size=1, unique=True))
        self.told[replica].subtract(keys)
        self.told[replica] += Counter()
        owed = {**self.flight.owed(replica)}
        rollouts = [
            grown(owed[key].rollout if key in owed else Rollout.empty(*key), 1, data.draw(st.sampled_from(ANY)))
            for key in keys
        ]
        before = self.journal.given.copy()
        finished, to_go_on = self.flight.receive(replica, rollouts)
        self.queue += to_go_on
        own = {key for key in keys if key in owed and owed[key].state is not RolloutState.DROPPED}
        wanted = {key for key in keys if key in owed and key in self.flight}
        assert {(one.group_id, one.index) for one in finished} == {
            (one.group_id, one.index)
            for one in rollouts
            if one.finish_reason.is_final and (one.group_id, one.index) in wanted
        }
        assert own >= wanted
        assert set(self.journal.given - before) == {key for key in wanted if key[0] not in self.calls}

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(data=st.data(), dies=st.booleans())
    def take_back(self, data: st.DataObject, dies: bool) -> None:
        replica = data.draw(st.sampled_from(self.alive()))
        if dies:
            replica.is_gone = True
        self.queue += self.flight.withdraw(replica)
        assert not self.flight.owed(replica)
        assert dies or replica.withdrawn >= set(self.told[replica])

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted(self.calls)))
        self.calls.remove(call)
        rows = self.flight.rows_of(call)
        working = self.flight.drop(rows)
        assert all(call in ids and not replica.is_gone for replica, ids in working.items())

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """An environment ends a rollout."""
        rows = [row for row in self.flight.in_state(RolloutState.TURN) if row.request.group_id not in self.calls]
        if rows:
            row = data.draw(st.sampled_from(sorted(rows, key=lambda one: one.key)))
            self.flight.end(row, grown(row.rollout, 0, FinishReason.STOP), None)

    @rule()
    def score(self) -> None:
        """Each group is there once, as soon as it is whole."""
        whole = [self.flight.whole.get_nowait() for _ in range(self.flight.whole.qsize())]
        ids = sorted(group.group_id for group in whole)
        assert ids == sorted(group.group_id for group in self.groups if group.is_whole)
        assert ids == sorted(self.heard)
        self.heard.clear()
        for group in whole:
            self.flight.remove(group)
            self.groups.remove(group)
            self.scored |= {row.key for row in group.rows}

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        """Who waits for a generator is asked for by one request; who is owed, by one generator, which knows it."""
        asked_for = Counter(
            (one.group_id, start.index) for one in self.flight.wanted(self.queue) for start in one.starts()
        )
        rows = {row.key: row for state in RolloutState for row in self.flight.in_state(state)}
        assert asked_for == Counter(key for key, row in rows.items() if row.state is RolloutState.QUEUED)
        for replica in self.replicas:
            owed = {key for key, row in rows.items() if row.state in OWED and row.holder is replica}
            assert set(self.flight.owed(replica)) == owed
            if not replica.is_gone:
                assert set(self.told[replica]) == owed | replica.withdrawn
            else:
                assert not owed
        for key, row in rows.items():
            assert row.key == key and self.flight[key] is row
            assert row.state not in (*OWED, RolloutState.PARKED) or row.holder is not None
            if row.state is RolloutState.PARKED:
                others = self.flight.rows_of(key[0])
                assert any(one.state is RolloutState.GENERATING and one.holder is row.holder for one in others)
        of_groups = {row.key for group in self.groups for row in group.rows}
        assert of_groups == {key for key in rows if key[0] < 1000} and not of_groups & self.scored


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_a_move_that_is_none_is_refused() -> None:
    async def main() -> None:
        flight = Flight(config(Path()), Journal())
        group = flight.begin(request(0), prompts(1)[0], {})
        with pytest.raises(AssertionError, match=r"rollout \(0, 0\) is queued, and cannot be ended"):
            flight.end(group.rows[0], group.rows[0].rollout, None)

    asyncio.run(main())


def test_the_wait_for_weights_is_no_work() -> None:
    """The generator answers nothing before, and is no slower for it; another that has them could begin."""

    async def main() -> None:
        flight, replica = Flight(config(Path()), Journal()), Replica(Generator().start("generator-0"), 1.0)
        replica.version = 0
        group = flight.begin(replace(request(0), from_version=1), prompts(1)[0], {})
        flight.assign(replica, requests_for(group.rows))
        await asyncio.sleep(5.0)
        assert not flight.can_answer(replica)
        assert [flight.waiting_for_weights(replica, version) for version in (0, 1)] == [[], [0]]
        flight.set_version(replica, 1)
        assert flight.can_answer(replica) and not flight.waiting_for_weights(replica)
        await asyncio.sleep(2.0)
        flight.receive(replica, [grown(row.rollout, 4, FinishReason.STOP) for row in group.rows])
        assert replica.token_s == 0.5

    run_virtual(main())
