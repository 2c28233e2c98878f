"""`Replicas`: all generators as one. Requests are dealt to those in service, parked and orphaned rollouts go on.

A replica is *in service* while it serves the released version or a newer one and is not about to leave; only then it is
given requests. `controller.py` says which versions are served and released; `docs/staleness.md` proves the bound.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import defaultdict
from collections.abc import Awaitable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import reduce
from statistics import median_low
from typing import TypeVar

from llamarl.cluster.api import CallTimeout, ExecutorError, ExecutorHandle, MeshFailed
from llamarl.controller.flight import Flight, FlyingRollout
from llamarl.controller.lives import STOP_S
from llamarl.controller.parcels import requests_of
from llamarl.controller.records import Key
from llamarl.controller.replica import NO_VERSION, Replica
from llamarl.controller.supervision import Signal, Supervisor
from llamarl.executors.replies import GeneratorStats
from llamarl.types import GenerationRequest

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

    def forget(self, rows: Iterable[FlyingRollout]) -> None:
        """Frees what replicas hold of rollouts that do not come back to them."""
        held = defaultdict[Replica, list[Key]](list)
        for row in rows:
            if (holder := self._flight.let_go(row)) and not holder.is_gone:
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
        self.relieve(replica)
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

    def relieve(self, idle: Replica) -> None:
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
