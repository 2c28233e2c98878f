"""`StopStrings`: does the newest token complete a stop string in the text of a response? No torch.

Only a tail of the tokens is decoded, long enough that a string cannot begin before it: tokens that decode to nothing
(special tokens) make it longer. Most tokens are not even decoded: their own text lacks the last character of each
string, or holds a whole one.

Shape suffix: T tokens of one response.

`BlockPool`: which blocks of the KV cache are free. `PrefixIndex`: which of them hold the beginning of a prompt.

`Group` and `Sequence`: the mutable state of a request and of its rollouts inside the engine. No torch.

A prompt is split in two. All its tokens but the last are the group's *prefix*: prefilled once, shared by every rollout.
The last prompt token and the response are the rollout's *own* tokens. So the first decode step of a rollout feeds the
last prompt token like any later one, every token is sampled on one path, and with the weights of that very step.

Shape suffixes: T tokens of one sequence, W experts of a token in all layers.

`Scheduler`: which rollouts decode, which tokens are prefilled and who owns which block, in the next step. No torch.

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
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

import numpy as np

from llamarl.types import Columns, FinishReason, GenerationRequest, Rollout

_MARGIN = 4
"""Tokens more than a string has bytes: with them the first tail is nearly always long enough."""
_CUT = "\ufffd"
"""Stands for one to three bytes that are no character."""


class StopStrings:
    """The strings of one request, for all its rollouts."""

    def __init__(self, strings: Ordered[str], decode: Callable[[Ordered[int]], str]) -> None:
        self._strings = strings
        self._decode = decode
        self._num_bytes = max(len(string.encode()) for string in strings)
        self._last = {string[-1] for string in strings}
        self._ending_bytes = dict[int, int]()
        self._whole = set[int]()
        self.passed = set[int]()
        """Tokens that are known to end none of them: `completed` need not look when one of these is the newest."""

    def completed(self, token_ids_T: np.ndarray) -> bool:
        """The text of the response holds one of the strings, and its newest token may have completed it."""
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
        """Bytes, at least, of a token in which a string can end; 0 for any other."""
        if token_id not in self._ending_bytes:
            # Twice, because the first token of a text may lose its leading space.
            text = self._decode((token_id, token_id))
            can_end = _CUT in text or any(last in text for last in self._last)
            self._ending_bytes[token_id] = len(text.encode()) if can_end else 0
            if can_end and any(string in self._decode((token_id,)) for string in self._strings):
                self._whole.add(token_id)
        return self._ending_bytes[token_id]


class BlockPool:
    """Numbered blocks with reference counts. The pool takes the block that was released last first, so memory that was
    never used stays untouched."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._num_users = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Returns a free block, with one user; there must be one."""
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
    valid as long as its own block is in use.
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
        found = list[int]()
        for place in range(num_tokens // self._block_size if self._blocks else 0):
            block = self._blocks.get(self._key(prompt_T, found[-1] if found else -1, place))
            if block is None:
                break
            found.append(block)
        return found

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


@dataclass(slots=True)
class Segment:
    """Consecutive tokens whose keys and values lie, or will lie, in blocks."""

    blocks: list[int] = field(default_factory=list)
    """Block ids, in token order."""
    num_cached: int = 0
    """Tokens whose keys and values have been written."""
    num_outdated: int = 0
    """So many first tokens had been computed with older weights; computing them again is the cost of an update."""
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    """(first token, token after the last, policy version), in order."""
    routes_T_W: np.ndarray | None = None
    """Experts of a prefix's tokens, as far as it is cached; None: not recorded."""

    def prefilled(self, start: int, stop: int, version: int) -> None:
        """Notes that tokens `start` to `stop` are computed next."""
        if self.prefills and self.prefills[-1][1:] == (start, version):
            start = self.prefills.pop()[0]
        self.prefills.append((start, stop, version))

    def outdate(self) -> None:
        """The weights have changed: everything is to be computed again, in the same blocks."""
        self.num_outdated = max(self.num_outdated, self.num_cached)
        self.num_cached = 0
        self.prefills = []


@dataclass(slots=True, eq=False)
class Group:
    """One request in the engine, and its prompt's prefix as some weights computed it."""

    request: GenerationRequest
    prompt_T: np.ndarray
    """int32, a copy."""
    limit: int
    """Most tokens that a rollout may get: `max_new_tokens`, cut at the end of the context."""
    stop_strings: StopStrings | None = None
    prefix: Segment = field(default_factory=Segment)
    num_active: int = 0
    """Rollouts that hold blocks: prefilling or running."""
    num_held: int = 0
    """Rollouts that wait for their environment, and hold their blocks."""
    unfinished: dict[int, Sequence] = field(default_factory=dict)
    """Rollout index -> rollout, for those not returned yet."""

    @property
    def prefix_tokens(self) -> int:
        return len(self.prompt_T) - 1

    def renewed(self) -> Group:
        """The same request with a prefix of its own, for rollouts that are admitted under newer weights."""
        return replace(self, prefix=Segment(num_outdated=self.prefix.num_cached), num_active=0)


@dataclass(slots=True, eq=False)
class Sequence:
    """One rollout in the engine. While it runs, its tokens lie in its row of `Rows`."""

    group: Group
    index: int
    limit: int
    """Number of tokens with which it leaves: `group.limit`, or as many as `segment_tokens` allow."""
    own: Segment = field(default_factory=Segment)
    running: bool = False
    """Whether it decodes one token per step."""
    row: int = -1
    """Its row in `Rows`; -1 when it has none."""
    columns: Columns = field(default_factory=lambda: Rollout.empty(0, 0).columns)
    """Columns of its tokens so far."""
    prefills: tuple[tuple[int, int, int, int], ...] = ()
    """Prefills so far, as in `Rollout`."""
    prompt_routes: np.ndarray | None = None
    """Experts of the prefix with which it began; None: not known."""

    @classmethod
    def of(cls, group: Group, start: Rollout) -> Sequence:
        """A rollout that goes on from the tokens of `start`, perhaps none."""
        segment_tokens = group.request.segment_tokens or group.limit
        limit = min(group.limit, start.num_tokens + segment_tokens)
        return cls(
            group=group, index=start.index, limit=limit, columns=start.columns, prefills=start.prefills,
            prompt_routes=start.prompt_routes,
        )  # fmt: skip

    def note_prefills(self, version: int) -> None:
        """Notes, as it begins to decode, what was computed for that."""
        own, prefix, num_tokens = self.own.prefills, self.group.prefix_tokens, len(self.token_ids_T)
        found = [(start + prefix, stop + prefix, of) for start, stop, of in own]
        if not own or own[0][0] == 0:  # not held, so that the cache began anew
            found = self.group.prefix.prefills + found or [(0, 0, version)]
        self.prefills += tuple((num_tokens, *one) for one in found)
        self.own.prefills = []

    @property
    def token_ids_T(self) -> np.ndarray:
        """The response so far, int32; valid while it is not running."""
        return self.columns["token_ids"]

    @property
    def own_tokens(self) -> int:
        """The last prompt token and the response so far; valid while it is not running."""
        return 1 + len(self.token_ids_T)

    def own_token_ids(self, start: int, stop: int) -> np.ndarray:
        """Own tokens `start` to `stop`, int32."""
        return np.concatenate((self.group.prompt_T[-1:], self.token_ids_T))[start:stop]

    def rollout(self, reason: FinishReason, error: str = "") -> Rollout:
        """The rollout as the engine hands it out; who is not learnt from need not tell its experts."""
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
