"""`Scheduler`: which rollouts decode, which tokens are prefilled and who owns which block, in the next step. No torch.

    waiting --admit--> prefilling --join--> running --finish--> gone
       ^                   |                   |
       +-------park--------+-------------------+        (no block free: the youngest gives its blocks back)

Rollouts are admitted in the order of their arrival and parked in the reverse order of admission, so the first of
`active` is never parked. `add` takes only groups of which one rollout fits alone, hence the first always gets on. Those
that their environment has answered come before those that have not begun: their group waits for them, and they may hold
memory. Only so many have begun, so nothing starves.

A group's prefix stays cached while one of its rollouts is active. Between two of them it may be idle, and is then freed
when blocks run out. Groups whose prompts begin alike share the full blocks of that beginning (`PrefixIndex`): the first
group prefills them, and the others begin behind them, in the same step at the earliest.

A rollout that waits for its environment is *held*: it keeps its blocks, and its group the prefix. When blocks run out
held ones are evicted before anything else, those that have waited longest first; one that was evicted comes back like a
parked one. So does one that has waited while weights changed.

New weights (`outdate`) either recompute everything in place, the oldest rollout first while those that are done decode
on, or they keep what is computed. Then a prefix serves the rollouts that were active before to their end, and those
admitted later, parked ones included, get one of their own: each sees only keys and values that are as new as its
admission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from llamarl.generation.blocks import BlockPool, PrefixIndex
from llamarl.generation.sequence import Group, Segment, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to prefill in one step: of a group's prefix, or of a resumed rollout's own tokens."""

    group: Group
    sequence: Sequence | None
    """None: the prefix."""
    start: int
    """First token, counted within the prefix or within the own tokens."""
    stop: int


@dataclass(slots=True)
class Schedule:
    """One step. Every running rollout decodes one token in it, those of `joined` included."""

    parked: list[Sequence] = field(default_factory=list)
    """Lost their blocks; first of all, their rows must go."""
    joined: list[Sequence] = field(default_factory=list)
    """Prefilled by the end of this step: they decode in it."""
    grown: list[Sequence] = field(default_factory=list)
    """Got one more block."""
    new_blocks: list[int] = field(default_factory=list)
    """Blocks handed out for this step; they may hold anything."""
    chunks: list[Chunk] = field(default_factory=list)
    recomputed_tokens: int = 0
    """Tokens of the chunks that had been computed with older weights."""


class Scheduler:
    """Pure state machine; `schedule` assumes that the step it returns is then carried out."""

    def __init__(
        self, num_blocks: int, block_size: int, max_running: int, prefill_tokens: int, *, shares_prefixes: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self._index = PrefixIndex(block_size) if shares_prefixes else None
        self.block_size = block_size
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.groups: dict[int, Group] = {}
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self.running: list[Sequence] = []
        self.held: dict[tuple[int, int], Sequence] = {}
        """Sequences that wait for their environment, by group and index, those that have waited longest first."""
        self.num_parked = 0
        self.version = 0
        """Version of the weights, for the record of what was prefilled."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, prefix_tokens: int, own_tokens: int) -> bool:
        """One rollout of such a size fits when it is alone."""
        return self.blocks_for(prefix_tokens) + self.blocks_for(own_tokens) <= self.pool.num_blocks

    def add(self, group: Group) -> None:
        """Queue all rollouts of a group that `fits`."""
        self.groups[group.request.group_id] = group
        self._queue(group, list(group.unfinished.values()))

    def join(self, group: Group, sequences: list[Sequence]) -> None:
        """Queue more rollouts of a group that is here."""
        group.unfinished.update((sequence.index, sequence) for sequence in sequences)
        self._queue(group, sequences)

    def _queue(self, group: Group, sequences: list[Sequence]) -> None:
        answered = [one for one in sequences if one.own_tokens > 1] if group.request.has_turns else []
        place = next((n for n, one in enumerate(self.waiting) if one.own_tokens == 1), len(self.waiting))
        for number, sequence in enumerate(answered):
            self.waiting.insert(place + number, sequence)
        self.waiting.extend(one for one in sequences if one not in answered)

    def remove(self, sequences: Iterable[Sequence], held: Container[Sequence] = ()) -> None:
        """Finished or aborted rollouts give everything back, but for those to be `held`."""
        gone = dict.fromkeys(sequences)
        if any(not sequence.own.blocks for sequence in gone):
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in gone)
        for sequence in gone:
            group = sequence.group
            if sequence.own.blocks:
                group.num_active -= 1
            sequence.running = False
            if sequence in held and self.groups[group.request.group_id] is group:  # not of older weights
                self.held[group.request.group_id, sequence.index] = sequence
                group.num_held += 1
            else:
                self._free(sequence.own)
            del group.unfinished[sequence.index]
            self._free_superseded(group)
            self._retire(group)
        if gone:
            self.active = [sequence for sequence in self.active if sequence not in gone]
            self.running = [sequence for sequence in self.running if sequence not in gone]

    def evict(self, keys: Iterable[tuple[int, int]]) -> None:
        """Held rollouts give everything back; those that are not held are ignored."""
        for key in keys:
            if (sequence := self.held.pop(key, None)) is not None:
                sequence.group.num_held -= 1
                self._free(sequence.own)
                self._retire(sequence.group)

    def outdate(self, recompute: bool) -> list[Sequence]:
        """The weights have changed; returns the rollouts that stop decoding until they are recomputed.

        Updates that come faster than the oldest rollout is recomputed would keep it from going on.
        """
        self.evict(list(self.held))
        if self._index is not None:
            self._index.clear()
        for group_id, group in self.groups.items():
            if not group.num_active:
                group.prefix.outdate()
                self._free(group.prefix)
            elif not recompute:
                self.groups[group_id] = group.renewed()
        if not recompute:
            for sequence in self.waiting:
                sequence.group = self.groups[sequence.group.request.group_id]
            return []
        for sequence in self.active:
            sequence.group.prefix.outdate()
            sequence.own.outdate()
            sequence.running = False
        stopped, self.running = self.running, []
        return stopped

    def schedule(self) -> Schedule:
        """Decide the next step."""
        plan = Schedule()
        self._grow(plan)
        if not plan.parked:
            self._admit(plan)
        self._prefill(plan)
        for sequence in self.running:
            sequence.own.num_cached += 1
        return plan

    def _grow(self, plan: Schedule) -> None:
        """Room for the next token of each active rollout, oldest first."""
        for sequence in list(self.active):
            own = sequence.own
            needed = own.num_cached + 1 if sequence.running else sequence.own_tokens
            if needed <= len(own.blocks) * self.block_size:
                continue
            while own.blocks and not self.pool.num_free:
                self._free_idle(keep=sequence.group) or self._park(plan)
            if own.blocks:
                if sequence.running:
                    plan.grown.append(sequence)
                self._allocate(own, 1, plan)

    def _admit(self, plan: Schedule) -> None:
        """Give the oldest waiting rollouts blocks for what they have, while there are some to grow into."""
        while self.waiting and len(self.active) < self.max_running:
            sequence = self.waiting[0]
            group, held = sequence.group, self._held_of(sequence)
            prefix = 0 if group.prefix.blocks else self.blocks_for(group.prefix_tokens)
            own = self.blocks_for(sequence.own_tokens) - (len(held.own.blocks) if held else 0)
            # One block in reserve per active rollout: fewer would be parked again within a few steps.
            while self.pool.num_free < prefix + own + len(self.active):
                if not self._free_idle(keep=group, held=held):
                    return
            if held is not None:
                sequence.own, held.own = held.own, sequence.own
                self.evict([(group.request.group_id, sequence.index)])
            self._allocate(group.prefix, prefix, plan)
            self._allocate(sequence.own, own, plan)
            group.num_active += 1
            self.active.append(self.waiting.popleft())

    def _prefill(self, plan: Schedule) -> None:
        """Spend the step's budget on the oldest rollouts that lack keys and values."""
        budget = self.prefill_tokens
        if len(self.running) == len(self.active):
            return
        for sequence in self.active:
            if sequence.running:
                continue
            group, own = sequence.group, sequence.own
            if budget > 0 and not group.prefix.num_cached:
                self._share(group)
            budget -= self._chunk(plan, group, None, group.prefix, group.prefix_tokens, budget)
            if group.prefix.num_cached == group.prefix_tokens:
                budget -= self._chunk(plan, group, sequence, own, sequence.own_tokens - 1, budget)
                if own.num_cached == sequence.own_tokens - 1:
                    sequence.running = True
                    sequence.note_prefills(self.version)
                    plan.joined.append(sequence)
        self.running.extend(plan.joined)

    def _share(self, group: Group) -> None:
        """Lets a prefix that is about to be prefilled begin behind the blocks that other prompts have filled alike."""
        prefix = group.prefix
        found = self._index.find(group.prompt_T, group.prefix_tokens) if self._index is not None else []
        if not found:
            return
        for block in found:
            self.pool.share(block)
        self._release(prefix.blocks[: len(found)])
        prefix.blocks[: len(found)] = found
        prefix.num_cached = len(found) * self.block_size
        prefix.prefilled(0, prefix.num_cached, self.version)
        if prefix.num_cached >= prefix.num_outdated:
            prefix.num_outdated = 0

    def _chunk(
        self, plan: Schedule, group: Group, sequence: Sequence | None, segment: Segment, wanted: int, budget: int
    ) -> int:
        """Prefill as much of a segment as the budget allows; returns the number of tokens."""
        start = segment.num_cached
        count = min(wanted - start, budget)
        if count > 0:
            plan.chunks.append(Chunk(group, sequence, start, start + count))
            segment.prefilled(start, start + count, self.version)
            plan.recomputed_tokens += max(0, min(start + count, segment.num_outdated) - start)
            segment.num_cached += count
            if segment.num_cached >= segment.num_outdated:
                segment.num_outdated = 0
            # Weights may have changed within a prefix: only one that these weights computed whole counts.
            if sequence is None and self._index is not None and segment.prefills[-1][0] == 0:
                self._index.add(group.prompt_T, segment.blocks, start, segment.num_cached)
        return count

    def _park(self, plan: Schedule) -> None:
        """The youngest active rollout gives its blocks back; it will prefill its tokens again."""
        sequence = self.active.pop()
        group = sequence.group
        self._free(sequence.own)
        group.num_active -= 1
        self._free_superseded(group)
        sequence.group = self.groups[group.request.group_id]
        if sequence.running:
            sequence.running = False
            self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_parked += 1
        plan.parked.append(sequence)
        if sequence in plan.grown:
            plan.grown.remove(sequence)

    def _held_of(self, sequence: Sequence) -> Sequence | None:
        """The held sequence that a waiting rollout goes on from; None: there is none with the same tokens."""
        key = sequence.group.request.group_id, sequence.index
        if (held := self.held.get(key)) is None:
            return None
        if held.token_ids_T.tobytes() == sequence.token_ids_T[: held.own_tokens - 1].tobytes():  # 10 times as fast
            return held
        self.evict([key])
        return None

    def _free_idle(self, keep: Group, held: Sequence | None = None) -> bool:
        """Free what the rollout that has waited longest holds, or else the prefix of the youngest group that has no
        active rollout; False when there is neither."""
        if key := next((key for key, sequence in self.held.items() if sequence is not held), None):
            self.evict([key])
            return True
        for group in reversed(self.groups.values()):
            if group.prefix.blocks and not group.num_active and group is not keep:
                self._free(group.prefix)
                return True
        return False

    def _retire(self, group: Group) -> None:
        """Forget a group after its last rollout."""
        newest = self.groups[group.request.group_id]
        if not newest.unfinished and not newest.num_held:
            self._free(self.groups.pop(group.request.group_id).prefix)

    def _free_superseded(self, group: Group) -> None:
        """Free a prefix of older weights after its last rollout."""
        if not group.num_active and self.groups[group.request.group_id] is not group:
            self._free(group.prefix)

    def _allocate(self, segment: Segment, count: int, plan: Schedule) -> None:
        blocks = [self.pool.take() for _ in range(count)]
        segment.blocks += blocks
        plan.new_blocks += blocks

    def _release(self, blocks: list[int]) -> None:
        freed = self.pool.release(blocks)
        if self._index is not None:
            self._index.forget(freed)

    def _free(self, segment: Segment) -> None:
        self._release(segment.blocks)
        segment.blocks = []
        segment.num_cached = 0
        segment.prefills = []
