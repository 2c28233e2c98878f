"""Decides which rollouts decode, which tokens are prefilled and who owns which block in the next step. No torch.

    waiting --admit--> prefilling --join--> running --finish--> gone
       ^                   |                   |
       +-------park--------+-------------------+        (no block free: the youngest frees its blocks)

A prompt has two parts. All its tokens but the last are the group's *prefix*: it is prefilled once and shared by every
rollout. The last prompt token and the response are the rollout's *own* tokens. So the first decode step of a rollout
feeds the last prompt token like any later token, and every token is sampled on one path with the weights of that step.

The scheduler admits rollouts in the order of their arrival and parks them in the reverse order of admission, so the
first of `active` is never parked. `add` takes only groups of which one rollout fits alone, so the first always
advances. Rollouts that their environment has answered come before rollouts that have not begun: their group waits for
them, and they may hold memory. Only a bounded number has begun, so nothing starves.

A group's prefix stays cached while one of its rollouts is active. An idle prefix is freed when blocks run out. Groups
whose prompts begin with the same tokens share the full blocks of that beginning (`PrefixIndex`): the first group
prefills them, and the others begin behind them, in the same step at the earliest.

A rollout that waits for its environment is *held*: it keeps its blocks, and its group keeps the prefix. When blocks run
out the scheduler first evicts the rollout that was held longest. An evicted rollout resumes like a parked one. So does
a held rollout if the weights changed meanwhile.

New weights (`outdate`) have one of two effects. Recomputation prefills everything again in place, the oldest rollout
first, while rollouts that are recomputed decode. Otherwise cached keys and values stay. Then a prefix serves the
rollouts that were active before to their end. Rollouts that are admitted later, parked ones included, get a new prefix.
So each rollout sees only keys and values that are as new as its admission.

In a hybrid model each segment with blocks also has a slot for the state of its delta nets (`states.py`). Twice as many
slots as running rollouts suffice for all that are active and their prefixes. When slots run out, idle ones are freed
like blocks. A state exists only behind the last token, so a beginning of prompts is shared from the third of them on:
the second one shows that it is shared, and a copy of its state there is kept in a further slot (`SharedStates`).

Shape suffixes: T tokens of one sequence or response, W experts of a token in all layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

import numpy as np

from llamarl.models.memory import SHARED_STATES, STATES_OF_ROLLOUT
from llamarl.types import Columns, FinishReason, GenerationRequest, Rollout

_MARGIN = 4
"""Tokens that `StopStrings` decodes beyond the bytes of a string. With them the first tail is nearly always long
enough."""
_CUT = "\ufffd"
"""Character that stands for one to three bytes of an incomplete character."""


class StopStrings:
    """Tells whether the newest token completes a stop string of a request, for all rollouts of the request.

    Only a tail of the tokens is decoded, long enough that a string cannot begin before it. Tokens that decode to
    nothing (special tokens) make the tail longer. Most tokens are not decoded at all: their text lacks the last
    character of each string, or contains a whole string.
    """

    def __init__(self, strings: Ordered[str], decode: Callable[[Ordered[int]], str]) -> None:
        self._strings = strings
        self._decode = decode
        self._num_bytes = max(len(string.encode()) for string in strings)
        self._last = {string[-1] for string in strings}
        self._ending_bytes = dict[int, int]()
        self._whole = set[int]()
        self.passed = set[int]()
        """Tokens that end no string. `completed` need not be called if the newest token is one of these."""

    def completed(self, token_ids_T: np.ndarray) -> bool:
        """Returns True if the text of the response contains a string that the newest token may have completed."""
        newest = int(token_ids_T[-1])
        newest_bytes = self._ending(newest)
        if not newest_bytes:
            self.passed.add(newest)
        if not newest_bytes or newest in self._whole:
            return newest_bytes > 0
        count = self._num_bytes + _MARGIN
        while True:
            text = self._decode(token_ids_T[-count:].tolist())
            if any(string in text for string in self._strings):
                return True
            # A string may end at the first byte of the newest token.
            seen_bytes = len(text.replace(_CUT, "?").encode()) - newest_bytes
            if count >= len(token_ids_T) or seen_bytes >= self._num_bytes:
                return False
            count *= 2

    def _ending(self, token_id: int) -> int:
        """Returns the least number of bytes of a token in which a string can end, or 0 for any other token."""
        if token_id not in self._ending_bytes:
            # The token is decoded twice in a row, because the first token of a text may lose its leading space.
            text = self._decode((token_id, token_id))
            can_end = _CUT in text or any(last in text for last in self._last)
            self._ending_bytes[token_id] = len(text.encode()) if can_end else 0
            if can_end and any(string in self._decode((token_id,)) for string in self._strings):
                self._whole.add(token_id)
        return self._ending_bytes[token_id]


EMPTY = 0
"""Slot of zeros, which no segment owns."""


class BlockPool:
    """Numbered KV blocks with reference counts. The pool hands out the block that was released last, so memory that was
    never used stays untouched."""

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        """
        Args:
            first: number of the first block.
        """
        self.num_blocks = num_blocks
        self._free = list(range(first, first + num_blocks))[::-1]
        self._num_users = [0] * (first + num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def use(self) -> float:
        """Share in use, 0 to 1."""
        return (self.num_blocks - self.num_free) / max(self.num_blocks, 1)

    def widen(self, count: int) -> None:
        """Adds free blocks."""
        first = len(self._num_users)
        self._free = [*range(first, first + count)][::-1] + self._free
        self._num_users += [0] * count
        self.num_blocks += count

    def take(self) -> int:
        """Returns a free block, with one user. There must be one."""
        block = self._free.pop()
        self._num_users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a user to a block that is in use."""
        assert self._num_users[block], f"block {block} is free"
        self._num_users[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Removes one user from each block. Returns the blocks that are free now."""
        freed = list[int]()
        for block in blocks:
            assert self._num_users[block], f"block {block} released twice"
            self._num_users[block] -= 1
            if not self._num_users[block]:
                freed.append(block)
        self._free += freed
        return freed


class PrefixIndex:
    """Finds full blocks with the keys and values of a prompt's first tokens, computed by the weights in use. Prompts
    with the same beginning (a system prompt, examples) then prefill it once.

    A block's key is its tokens and the block before it. A user of a block also uses the blocks before it, so a key is
    valid while its block is in use.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = dict[tuple[int, bytes], int]()
        self._keys = dict[int, tuple[int, bytes]]()

    def add(self, prompt_T: np.ndarray, blocks: list[int], start: int, stop: int) -> None:
        """Registers the blocks that tokens `start` to `stop` of a prompt have filled."""
        for place in range(start // self._block_size, stop // self._block_size):
            key = self._key(prompt_T, blocks[place - 1] if place else -1, place)
            if key not in self._blocks:
                self._blocks[key] = blocks[place]
                self._keys[blocks[place]] = key

    def find(self, prompt_T: np.ndarray, num_tokens: int) -> list[int]:
        """Returns blocks that hold the longest known beginning of the first `num_tokens` tokens of a prompt."""
        blocks = list[int]()
        for place in range(num_tokens // self._block_size if self._blocks else 0):
            block = self._blocks.get(self._key(prompt_T, blocks[-1] if blocks else -1, place))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops blocks that are free now."""
        for block in blocks:
            if key := self._keys.pop(block, None):
                del self._blocks[key]

    def clear(self) -> None:
        """Drops everything: the weights have changed."""
        self._blocks.clear()
        self._keys.clear()

    def _key(self, prompt_T: np.ndarray, before: int, place: int) -> tuple[int, bytes]:
        return before, prompt_T[place * self._block_size : (place + 1) * self._block_size].tobytes()


class SharedStates:
    """Slots of states behind beginnings that prompts share. The key of a state is the block before it, so it is valid
    while that block is in use. The state that was used least recently is replaced."""

    def __init__(self) -> None:
        self._pool = BlockPool(SHARED_STATES, first=EMPTY + 1)
        self._slots = dict[int, int]()

    def longest(self, blocks: list[int]) -> int:
        """Returns the number of first blocks of `blocks` behind which a state is kept, the largest one."""
        return next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self._slots), 0)

    def use(self, block: int) -> int:
        """Returns the slot of the state behind a block. There must be one."""
        self._slots[block] = self._slots.pop(block)
        return self._slots[block]

    def keep(self, block: int) -> int:
        """Returns a slot for the state behind a block."""
        if block not in self._slots:
            if not self._pool.num_free:
                self.forget([next(iter(self._slots))])
            self._slots[block] = self._pool.take()
        return self.use(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops the states behind blocks that are free now."""
        self._pool.release([self._slots.pop(block) for block in blocks if block in self._slots])

    def clear(self) -> None:
        """Drops everything: the weights have changed."""
        self.forget(list(self._slots))


@dataclass(slots=True)
class Segment:
    """Consecutive tokens whose keys and values have blocks."""

    blocks: list[int] = field(default_factory=list)
    """Block ids, in token order."""
    slot: int = EMPTY
    """Slot of its state, in a hybrid model."""
    border: int = 0
    """Tokens behind which the state is kept for other prompts, once it is computed. 0 means nowhere."""
    num_cached: int = 0
    """Tokens whose keys and values are written."""
    num_outdated: int = 0
    """First tokens that were computed with older weights. Computing them again is the cost of an update."""
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    """(first token, token after the last, policy version), in order."""
    routes_T_W: np.ndarray | None = None
    """Experts of a prefix's tokens, up to `num_cached`. None means that experts are not recorded."""

    def prefilled(self, start: int, stop: int, version: int) -> int:
        """Records that tokens `start` to `stop` are computed next. Returns how many of them older weights computed."""
        num_recomputed = max(0, min(stop, self.num_outdated) - start)
        if self.prefills and self.prefills[-1][1:] == (start, version):
            start = self.prefills.pop()[0]
        self.prefills.append((start, stop, version))
        self.num_cached = stop
        if stop >= self.num_outdated:
            self.num_outdated = 0
        return num_recomputed

    def outdate(self) -> None:
        """Marks all tokens to be computed again, in the same blocks: the weights have changed."""
        self.num_outdated = max(self.num_outdated, self.num_cached)
        self.num_cached = 0
        self.prefills = []


@dataclass(slots=True, eq=False)
class Group:
    """One request in the engine, with its prompt's prefix as some weights computed it."""

    request: GenerationRequest
    prompt_T: np.ndarray
    """int32, a copy."""
    limit: int
    """Largest number of response tokens: `max_new_tokens`, cut at the end of the context."""
    stop_strings: StopStrings | None = None
    prefix: Segment = field(default_factory=Segment)
    num_active: int = 0
    """Rollouts that hold blocks: prefilling or running."""
    num_held: int = 0
    """Rollouts that wait for their environment and hold their blocks."""
    unfinished: dict[int, Sequence] = field(default_factory=dict)
    """Rollouts that were not returned yet, by index."""

    @property
    def prefix_tokens(self) -> int:
        return len(self.prompt_T) - 1

    def renewed(self) -> Group:
        """Returns the same request with a new prefix, for rollouts that are admitted under newer weights."""
        return replace(self, prefix=Segment(num_outdated=self.prefix.num_cached), num_active=0)


@dataclass(slots=True, eq=False)
class Sequence:
    """One rollout in the engine. While it runs, its tokens are in its row of `Rows`."""

    group: Group
    index: int
    limit: int
    """Number of tokens at which it leaves: `group.limit`, or fewer because of `segment_tokens`."""
    own: Segment = field(default_factory=Segment)
    running: bool = False
    """True if it decodes one token per step."""
    row: int = -1
    """Its row in `Rows`; -1 means none."""
    columns: Columns = field(default_factory=lambda: Rollout.empty(0, 0).columns)
    """Columns of its tokens so far. Outdated while it runs."""
    prefills: tuple[tuple[int, int, int, int], ...] = ()
    """Prefills so far, as in `Rollout`."""
    prompt_routes: np.ndarray | None = None
    """Experts of the prefix with which it began; None means unknown."""

    @classmethod
    def of(cls, group: Group, start: Rollout) -> Sequence:
        """Returns a rollout that continues from the tokens of `start`, which may have none."""
        segment_tokens = group.request.segment_tokens or group.limit
        limit = min(group.limit, start.num_tokens + segment_tokens)
        return cls(
            group=group, index=start.index, limit=limit, columns=start.columns, prefills=start.prefills,
            prompt_routes=start.prompt_routes,
        )  # fmt: skip

    def note_prefills(self, version: int) -> None:
        """Records, when it begins to decode, which tokens were computed for that."""
        own, prefix, num_tokens = self.own.prefills, self.group.prefix_tokens, len(self.token_ids_T)
        parts = [(start + prefix, stop + prefix, computed_by) for start, stop, computed_by in own]
        if not own or own[0][0] == 0:  # it was not held, so its cache began anew
            parts = self.group.prefix.prefills + parts or [(0, 0, version)]
        self.prefills += tuple((num_tokens, *part) for part in parts)
        self.own.prefills = []

    @property
    def token_ids_T(self) -> np.ndarray:
        """The response so far, int32. Valid while it does not run."""
        return self.columns["token_ids"]

    @property
    def own_tokens(self) -> int:
        """Number of own tokens: the last prompt token and the response so far. Valid while it does not run."""
        return 1 + len(self.token_ids_T)

    def own_token_ids(self, start: int, stop: int) -> np.ndarray:
        """Returns own tokens `start` to `stop`, int32."""
        return np.concatenate((self.group.prompt_T[-1:], self.token_ids_T))[start:stop]

    def rollout(self, reason: FinishReason, error: str = "") -> Rollout:
        """Returns the rollout as the engine hands it out. Only a rollout for training keeps its experts."""
        columns, is_trained_on = self.columns, self.group.request.purpose == "train"
        if not is_trained_on:
            columns = {name: values_T for name, values_T in columns.items() if name != "routes"}
        return Rollout(
            group_id=self.group.request.group_id,
            index=self.index,
            columns=columns,
            finish_reason=reason,
            error=error,
            prefills=self.prefills,
            prompt_routes=self.prompt_routes if is_trained_on else None,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to prefill in one step: of a group's prefix, or of a resumed rollout's own tokens."""

    group: Group
    sequence: Sequence | None
    """None means the prefix."""
    start: int
    """First token, counted within the prefix or within the own tokens."""
    stop: int
    state: int = EMPTY
    """Slot of the state before a prefix's first chunk."""
    kept: tuple[int, int] = (0, EMPTY)
    """Token before which the state is written to a shared slot, at least `start` and less than `stop`, and that slot.
    `EMPTY` means none."""


@dataclass(slots=True)
class Schedule:
    """One step. Every running rollout decodes one token in it, including the rollouts of `joined`."""

    parked: list[Sequence] = field(default_factory=list)
    """Rollouts that lost their blocks. Their rows must be removed first."""
    joined: list[Sequence] = field(default_factory=list)
    """Rollouts that are prefilled by the end of this step and decode in it."""
    grown: list[Sequence] = field(default_factory=list)
    """Rollouts that got one more block."""
    new_blocks: list[int] = field(default_factory=list)
    """Blocks handed out for this step. Their content is arbitrary."""
    chunks: list[Chunk] = field(default_factory=list)
    recomputed_tokens: int = 0
    """Tokens of the chunks that had been computed with older weights."""


class Scheduler:
    """A pure state machine. `schedule` assumes that the caller computes the step that it returns."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        prefill_tokens: int,
        *,
        shares_prefixes: bool = True,
        has_states: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.slots: BlockPool | None = None
        """Slots of states. None means that the model has none."""
        self._states: SharedStates | None = None
        """States behind shared beginnings. None means that the model has none, or that no beginnings are shared."""
        if has_states:
            self.slots = BlockPool(STATES_OF_ROLLOUT * max_running, first=EMPTY + 1 + SHARED_STATES)
            self._states = SharedStates() if shares_prefixes else None
        self._index = PrefixIndex(block_size) if shares_prefixes else None
        self.block_size = block_size
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.groups: dict[int, Group] = {}
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self.running: list[Sequence] = []
        self.held: dict[tuple[int, int], Sequence] = {}
        """Sequences that wait for their environment, by group and index, the longest wait first."""
        self.num_parked = 0
        self.version = 0
        """Version of the weights, for the record of prefills."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, prefix_tokens: int, own_tokens: int) -> bool:
        """Returns True if one rollout of this size fits alone."""
        return self.blocks_for(prefix_tokens) + self.blocks_for(own_tokens) <= self.pool.num_blocks

    def add(self, group: Group) -> None:
        """Queues all rollouts of a group that `fits`."""
        self.groups[group.request.group_id] = group
        self._queue(group, list(group.unfinished.values()))

    def join(self, group: Group, sequences: list[Sequence]) -> None:
        """Queues more rollouts of a group that is in the engine."""
        group.unfinished.update((sequence.index, sequence) for sequence in sequences)
        self._queue(group, sequences)

    def _queue(self, group: Group, sequences: list[Sequence]) -> None:
        answered = [sequence for sequence in sequences if sequence.own_tokens > 1] if group.request.has_turns else []
        unbegun = (place for place, sequence in enumerate(self.waiting) if sequence.own_tokens == 1)
        place = next(unbegun, len(self.waiting))
        for number, sequence in enumerate(answered):
            self.waiting.insert(place + number, sequence)
        self.waiting.extend(sequence for sequence in sequences if sequence not in answered)

    def remove(self, sequences: Iterable[Sequence], held: Container[Sequence] = ()) -> None:
        """Frees all blocks of finished or aborted rollouts, except of those in `held`."""
        gone = dict.fromkeys(sequences)
        if any(not sequence.own.blocks for sequence in gone):
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in gone)
        for sequence in gone:
            group = sequence.group
            if sequence.own.blocks:
                group.num_active -= 1
            sequence.running = False
            is_current = self.groups[group.request.group_id] is group  # its prefix is of the current weights
            if sequence in held and is_current:
                self.held[group.request.group_id, sequence.index] = sequence
                group.num_held += 1
            else:
                self.free(sequence.own)
            del group.unfinished[sequence.index]
            self._free_superseded(group)
            self._retire(group)
        if gone:
            self.active = [sequence for sequence in self.active if sequence not in gone]
            self.running = [sequence for sequence in self.running if sequence not in gone]

    def free(self, segment: Segment) -> None:
        """Frees the blocks and the slot of a segment, whose tokens are no longer cached."""
        self._release(segment.blocks)
        if self.slots is not None and segment.slot != EMPTY:
            self.slots.release([segment.slot])
            segment.slot = EMPTY
        segment.blocks = []
        segment.num_cached = segment.border = 0
        segment.prefills = []

    def evict(self, keys: Iterable[tuple[int, int]]) -> None:
        """Frees the blocks of held rollouts. Keys of rollouts that are not held are ignored."""
        for key in keys:
            if (sequence := self.held.pop(key, None)) is not None:
                sequence.group.num_held -= 1
                self.free(sequence.own)
                self._retire(sequence.group)

    def outdate(self, recompute: bool) -> list[Sequence]:
        """Handles a change of weights. Returns the rollouts that stop decoding until they are recomputed.

        If updates come faster than the oldest rollout can be recomputed, it does not advance.
        """
        self.evict(list(self.held))
        if self._index is not None:
            self._index.clear()
        if self._states is not None:
            self._states.clear()
        for group_id, group in self.groups.items():
            if not group.num_active:
                group.prefix.outdate()
                self.free(group.prefix)
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
        """Returns the next step."""
        plan = Schedule()
        self._grow(plan)
        if not plan.parked:
            self._admit(plan)
        self._prefill(plan)
        for sequence in self.running:
            sequence.own.num_cached += 1
        return plan

    def only_decodes(self) -> bool:
        """Returns True if the next `schedule` surely only gives running rollouts blocks for their next token."""
        if len(self.running) < len(self.active):
            return False
        growing = sum(one.own.num_cached >= len(one.own.blocks) * self.block_size for one in self.active)
        free = self.pool.num_free - growing
        if free < 0:
            return False
        if not self.waiting or len(self.active) >= self.max_running:
            return True
        group = self.waiting[0].group
        if self.held or any(each.prefix.blocks and not each.num_active for each in self.groups.values()):
            return False  # blocks might be freed for it
        prefix = 0 if group.prefix.blocks else self.blocks_for(group.prefix_tokens)
        return free < prefix + self.blocks_for(self.waiting[0].own_tokens) + len(self.active)

    def unschedule(self, sequences: Iterable[Sequence]) -> None:
        """Takes back what `schedule` has noted of the next token of these rollouts, which are not to be computed."""
        for sequence in sequences:
            sequence.own.num_cached -= 1

    def _grow(self, plan: Schedule) -> None:
        """Allocates blocks for the next token of each active rollout, the oldest first."""
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
        """Gives the oldest waiting rollouts blocks for the tokens they have, while free blocks remain to grow into."""
        while self.waiting and len(self.active) < self.max_running:
            sequence = self.waiting[0]
            group, held = sequence.group, self._held_of(sequence)
            prefix = 0 if group.prefix.blocks else self.blocks_for(group.prefix_tokens)
            own = self.blocks_for(sequence.own_tokens) - (len(held.own.blocks) if held else 0)
            slots = (prefix > 0) + (held is None)
            # One block in reserve per active rollout: with fewer, rollouts would be parked again within a few steps.
            while self.pool.num_free < prefix + own + len(self.active) or not self._has_slots(slots):
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
        """Spends the step's budget of tokens on the oldest rollouts that lack keys and values."""
        budget = self.prefill_tokens
        if len(self.running) == len(self.active):
            return
        for sequence in self.active:
            if sequence.running:
                continue
            group, own = sequence.group, sequence.own
            state = self._share(group) if budget > 0 and not group.prefix.num_cached else EMPTY
            budget -= self._chunk(plan, group, None, group.prefix, group.prefix_tokens, budget, state)
            if group.prefix.num_cached == group.prefix_tokens:
                budget -= self._chunk(plan, group, sequence, own, sequence.own_tokens - 1, budget)
                if own.num_cached == sequence.own_tokens - 1:
                    sequence.running = True
                    sequence.note_prefills(self.version)
                    plan.joined.append(sequence)
        self.running.extend(plan.joined)

    def _share(self, group: Group) -> int:
        """Lets a prefix that is about to be prefilled begin behind blocks that other prompts have filled with the same
        tokens. Returns the slot of the state there."""
        prefix, state = group.prefix, EMPTY
        # A state is written by the tokens behind it, so at least one token of the prefix is computed.
        num_tokens = group.prefix_tokens - (self._states is not None)
        shared = self._index.find(group.prompt_T, num_tokens) if self._index is not None else []
        if self._states is not None:
            count = self._states.longest(shared)
            prefix.border = len(shared) * self.block_size if len(shared) > count else 0
            shared = shared[:count]
            state = self._states.use(shared[-1]) if shared else EMPTY
        if not shared:
            return EMPTY
        for block in shared:
            self.pool.share(block)
        self._release(prefix.blocks[: len(shared)])
        prefix.blocks[: len(shared)] = shared
        prefix.prefilled(0, len(shared) * self.block_size, self.version)
        return state

    def _chunk(
        self,
        plan: Schedule,
        group: Group,
        sequence: Sequence | None,
        segment: Segment,
        wanted: int,
        budget: int,
        state: int = EMPTY,
    ) -> int:
        """Prefills as much of a segment as the budget allows. Returns the number of tokens."""
        start = segment.num_cached
        count = min(wanted - start, budget)
        if count > 0:
            chunk = Chunk(group, sequence, start, start + count, state)
            plan.recomputed_tokens += segment.prefilled(start, start + count, self.version)
            # Weights may have changed within a prefix. Only a prefix that these weights computed whole is indexed.
            if sequence is None and self._index is not None and segment.prefills[-1][0] == 0:
                self._index.add(group.prompt_T, segment.blocks, start, segment.num_cached)
                chunk = replace(chunk, kept=self._kept(group, start))
            plan.chunks.append(chunk)
        return count

    def _kept(self, group: Group, start: int) -> tuple[int, int]:
        """Returns where the chunk of a prefix that begins with `start` passes the border of a shared beginning, and the
        slot for the state there. Tokens follow it in the chunk, which writes the state behind them to the prefix's
        slot."""
        prefix, index = group.prefix, self._index
        last = (group.prefix_tokens - 1) // self.block_size * self.block_size
        border = min(prefix.border, last)
        if self._states is None or index is None or not 0 < border < prefix.num_cached:
            return 0, EMPTY
        prefix.border = 0
        if border < start:
            return 0, EMPTY
        return border, self._states.keep(index.find(group.prompt_T, border)[-1])

    def _park(self, plan: Schedule) -> None:
        """Frees the blocks of the youngest active rollout, which will prefill its tokens again."""
        sequence = self.active.pop()
        group = sequence.group
        self.free(sequence.own)
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
        """Returns the held sequence with which a waiting rollout begins, or None if none has the same tokens."""
        key = sequence.group.request.group_id, sequence.index
        if (held := self.held.get(key)) is None:
            return None
        if held.token_ids_T.tobytes() == sequence.token_ids_T[: held.own_tokens - 1].tobytes():  # 10 times as fast
            return held
        self.evict([key])
        return None

    def _free_idle(self, keep: Group, held: Sequence | None = None) -> bool:
        """Frees the blocks of the rollout that was held longest. If there is none, frees the prefix of the youngest
        group without an active rollout. Returns False if there is neither."""
        if key := next((key for key, sequence in self.held.items() if sequence is not held), None):
            self.evict([key])
            return True
        for group in reversed(self.groups.values()):
            if group.prefix.blocks and not group.num_active and group is not keep:
                self.free(group.prefix)
                return True
        return False

    def _retire(self, group: Group) -> None:
        newest = self.groups[group.request.group_id]
        if not newest.unfinished and not newest.num_held:
            self.free(self.groups.pop(group.request.group_id).prefix)

    def _free_superseded(self, group: Group) -> None:
        """Frees a prefix of older weights after its last rollout."""
        if not group.num_active and self.groups[group.request.group_id] is not group:
            self.free(group.prefix)

    def _has_slots(self, count: int) -> bool:
        return self.slots is None or self.slots.num_free >= count

    def _allocate(self, segment: Segment, count: int, plan: Schedule) -> None:
        blocks = [self.pool.take() for _ in range(count)]
        segment.blocks += blocks
        plan.new_blocks += blocks
        if self.slots is not None and count and segment.slot == EMPTY:
            segment.slot = self.slots.take()

    def _release(self, blocks: list[int]) -> None:
        freed = self.pool.release(blocks)
        if self._index is not None:
            self._index.forget(freed)
        if self._states is not None:
            self._states.forget(freed)
