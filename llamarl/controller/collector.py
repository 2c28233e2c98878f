"""`Collector`: asks the generators for groups, and takes what they answer. Loop 2 of a run, one per generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamarl.controller.buffer import RolloutBuffer
from llamarl.controller.flight import Flight, RolloutState, requests_for
from llamarl.controller.records import Key
from llamarl.controller.replica import Replica
from llamarl.controller.replicas import Replicas
from llamarl.controller.supervision import StallWatch, Supervisor
from llamarl.controller.turns import Turns
from llamarl.types import GenerationRequest, Prompt, Rollout


class Collector:
    """Rollouts from their request to their end."""

    def __init__(
        self,
        flight: Flight,
        replicas: Replicas,
        turns: Turns | None,
        buffer: RolloutBuffer | None,
        supervisor: Supervisor,
        watch: StallWatch,
    ) -> None:
        """
        Args:
            turns: None: a response is one turn.
            buffer: says what a step lacks; None: nothing is trained.
        """
        self._flight, self._replicas, self._turns, self._buffer = flight, replicas, turns, buffer
        self._supervisor, self._watch = supervisor, watch

    async def ask(
        self, requests: Sequence[tuple[GenerationRequest, Prompt]], held: Mapping[Key, Rollout] | None = None
    ) -> None:
        """Sends requests to the generators, of which one is in service or will be; but not for rollouts that are `held`
        and whole."""
        begun = [self._flight.begin(request, prompt, held or {}) for request, prompt in requests]
        rows = [row for pending in begun for row in pending.rows]
        if self._turns:
            self._turns.take([row.rollout for row in rows if row.state is RolloutState.TURN])
        for is_greedy in (False, True):
            part = requests_for(row for row in rows if (row.request.purpose == "greedy") == is_greedy)
            if part:
                await (self._turns or self._replicas).submit(part)

    def follow(self, replica: Replica) -> None:
        """Takes what a generator answers, from now on."""
        self._supervisor.start(self._collect_loop(replica), f"collect {replica.name}")

    async def _collect_loop(self, replica: Replica) -> None:
        """Consumes what `replica` finishes or parks while it is there; waits for requests to be owed, then for the
        replica; produces whole groups to score, and requests to go on with what is parked; unblocked by `submit`."""
        while True:
            await replica.busy.wait()
            # No call stands open meanwhile.
            await self._replicas.changed.until(lambda: self._flight.may_answer(replica))
            reply = None if replica.is_gone else replica.port.collect(*self._lacking(replica))
            collected = await self._replicas.unless_dead(replica, reply) if reply else None
            if collected is None or replica.is_gone:
                return
            replica.stats = collected.stats
            finished, to_go_on = self._flight.answer(replica, collected.rollouts)
            self._replicas.num_resumed += sum(len(request.partials) for request in to_go_on)
            self._replicas.resume(to_go_on)
            if not to_go_on:
                self._replicas.relieve(replica)
            self._replicas.changed.notify()
            if self._turns:
                self._turns.take(finished)
            self._watch.progress()

    def _lacking(self, replica: Replica) -> tuple[int, list[int]]:
        """Requests of a generator that a step lacks: how many at least, 0 where somebody waits for each rollout, and
        which surely."""
        if self._turns or self._buffer is None:
            return 0, []
        number, end = self._buffer.lacking()
        return -(-number // len(self._replicas.alive)), [one for one in self._flight.asked(replica) if one < end]
