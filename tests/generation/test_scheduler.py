"""The scheduler alone: tokens are counted, not computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.scheduler import BlockPool, Group, PrefixIndex, Schedule, Scheduler, Segment, Sequence
from llamarl.types import GenerationRequest, SamplingParams
from tests.nightly import examples

BLOCK = 4


def make_group(group_id: int, prompt: int, size: int, limit: int, common: int = 0) -> Group:
    """The first `common` tokens of the prompt are those of every other group."""
    token_ids_T = np.where(np.arange(prompt) < common, np.arange(prompt), 1000 * (group_id + 1) + np.arange(prompt))
    request = GenerationRequest(
        group_id=group_id, prompt_token_ids_T=token_ids_T.astype(np.int32), group_size=size, sampling=SamplingParams()
    )
    group = Group(request=request, prompt_T=request.prompt_token_ids_T, limit=limit)
    group.unfinished = {index: Sequence(group=group, index=index, limit=limit) for index in range(size)}
    return group


@dataclass
class Driver:
    """Carries schedules out, and checks each against what the engine relies on."""

    scheduler: Scheduler
    recompute: bool = False
    version: int = 0
    written: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Version of the weights and token id (own tokens: 0) behind each place of each block."""
    admitted: dict[Sequence, int] = field(default_factory=dict)
    """Version at which each active rollout was admitted."""
    recomputed_tokens: int = 0
    first_admissions: list[tuple[int, int]] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)

    def update(self) -> None:
        """New weights."""
        self.version += 1
        self.scheduler.version = self.version
        running = list(self.scheduler.running)
        stopped = self.scheduler.outdate(self.recompute)
        assert stopped == (running if self.recompute else [])
        self.check_blocks()

    def step(self) -> Schedule:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        self.recomputed_tokens += plan.recomputed_tokens
        for sequence in scheduler.active:
            key = (sequence.group.request.group_id, sequence.index)
            if key not in self.first_admissions:
                self.first_admissions.append(key)
        self._check(plan)
        self._compute(plan)
        for sequence in list(scheduler.running):
            sequence.columns = {"token_ids": np.zeros(len(sequence.token_ids_T) + 1, np.int32)}
            if len(sequence.token_ids_T) == sequence.limit:
                self.finished.append((sequence.group.request.group_id, sequence.index))
                scheduler.remove([sequence])
        self.check_blocks()
        return plan

    def _check(self, plan: Schedule) -> None:
        scheduler = self.scheduler
        assert len(scheduler.running) <= len(scheduler.active) <= scheduler.max_running
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= scheduler.prefill_tokens
        for sequence in scheduler.running:
            group = sequence.group
            assert group.prefix.num_cached == group.prefix_tokens
            assert sequence.own.num_cached == sequence.own_tokens
            assert len(sequence.own.blocks) * BLOCK >= sequence.own_tokens
            assert len(group.prefix.blocks) * BLOCK >= group.prefix_tokens
        for chunk in plan.chunks:
            segment = chunk.group.prefix if chunk.sequence is None else chunk.sequence.own
            assert 0 <= chunk.start < chunk.stop <= len(segment.blocks) * BLOCK

    def _compute(self, plan: Schedule) -> None:
        """Keys and values, as the version of their weights."""
        active = self.scheduler.active
        for sequence in plan.parked:
            self.admitted.pop(sequence, None)
        self.admitted = {one: self.admitted.get(one, self.version) for one in active}
        for chunk in plan.chunks:
            segment = chunk.group.prefix if chunk.sequence is None else chunk.sequence.own
            tokens = None if chunk.sequence else chunk.group.prompt_T
            self._write(segment, chunk.start, chunk.stop, tokens)
        for sequence in self.scheduler.running:
            own, prefix = sequence.own, sequence.group.prefix
            self._write(own, own.num_cached - 1, own.num_cached)
            seen = (*self._seen(prefix, sequence.group.prompt_T), *self._seen(own))
            assert min(seen) >= (self.version if self.recompute else self.admitted[sequence])

    def _write(self, segment: Segment, start: int, stop: int, tokens: np.ndarray | None = None) -> None:
        for place in range(start, stop):
            token = 0 if tokens is None else int(tokens[place])
            self.written[segment.blocks[place // BLOCK], place % BLOCK] = self.version, token

    def _seen(self, segment: Segment, tokens: np.ndarray | None = None) -> list[int]:
        """Versions of a segment's keys and values."""
        found = [self.written[segment.blocks[place // BLOCK], place % BLOCK] for place in range(segment.num_cached)]
        assert [token for _, token in found] == ([0] * len(found) if tokens is None else tokens[: len(found)].tolist())
        return [version for version, _ in found]

    def check_blocks(self) -> None:
        scheduler = self.scheduler
        groups = {*scheduler.groups.values(), *(sequence.group for sequence in scheduler.active)}
        sequences = [one for group in scheduler.groups.values() for one in group.unfinished.values()]
        segments = [*(group.prefix for group in groups), *(sequence.own for sequence in sequences)]
        held = {block for segment in segments for block in segment.blocks}
        own = [block for sequence in sequences for block in sequence.own.blocks]
        assert len(own) == len(set(own)) and all(len(one.blocks) == len(set(one.blocks)) for one in segments)
        assert not {block for group in groups for block in group.prefix.blocks} & set(own)
        assert len(held) + self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


GROUPS = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 4), st.integers(1, 16)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=examples(200))
@given(
    GROUPS,
    st.integers(8, 20),
    st.integers(1, 6),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), max_size=3),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
    st.integers(0, 14),
    st.data(),
)
def test_everything_finishes_once_and_no_block_is_lost(
    sizes: list[tuple[int, int, int]],
    num_blocks: int,
    max_running: int,
    prefill_tokens: int,
    abort_steps: list[int],
    update_steps: list[int],
    recompute: bool,
    common: int,
    data: st.DataObject,
) -> None:
    scheduler = Scheduler(num_blocks, BLOCK, max_running, prefill_tokens)
    driver = Driver(scheduler, recompute)
    groups = [make_group(i, *size, common) for i, size in enumerate(sizes)]
    for group in groups:
        assert scheduler.fits(group.prefix_tokens, group.limit)
        scheduler.add(group)
    total = sum(size * (limit + prompt) for prompt, size, limit in sizes)
    aborted: set[tuple[int, int]] = set()
    for step in range(20 * total + 100):
        if not scheduler.groups:
            break
        driver.step()
        for _ in range(update_steps.count(step)):
            driver.update()
        if step in abort_steps and scheduler.groups:
            group = scheduler.groups[data.draw(st.sampled_from(sorted(scheduler.groups)))]
            aborted |= {(group.request.group_id, index) for index in group.unfinished}
            scheduler.remove(list(group.unfinished.values()))
            driver.check_blocks()
    everything = {(i, index) for i, (_, size, _) in enumerate(sizes) for index in range(size)}
    assert sorted(driver.finished) == sorted(everything - aborted)
    assert [*scheduler.groups, *scheduler.waiting, *scheduler.active, *scheduler.running] == []
    assert scheduler.pool.num_free == num_blocks
    assert driver.first_admissions == sorted(driver.first_admissions), "admission is first in, first out"


def test_the_prompt_of_a_group_is_prefilled_once_and_in_chunks() -> None:
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=8, prefill_tokens=5)
    scheduler.add(make_group(0, prompt=13, size=4, limit=3))
    driver = Driver(scheduler)
    spans = []
    for _ in range(3):
        spans += [(chunk.start, chunk.stop) for chunk in driver.step().chunks]
    assert spans == [(0, 5), (5, 10), (10, 12)]
    assert len(scheduler.running) == 4


def test_rollouts_join_while_others_decode() -> None:
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=3, prefill_tokens=100)
    scheduler.add(make_group(0, prompt=3, size=2, limit=4))
    driver = Driver(scheduler)
    driver.step()
    scheduler.add(make_group(1, prompt=3, size=2, limit=1))
    assert len(driver.step().joined) == 1, "one place is free"
    assert len(driver.step().joined) == 1, "the place of the one that finished"
    assert driver.finished == [(1, 0), (1, 1)]


def test_the_youngest_is_parked_and_resumes_from_its_tokens() -> None:
    scheduler = Scheduler(num_blocks=6, block_size=BLOCK, max_running=2, prefill_tokens=100)
    for group_id in range(2):
        scheduler.add(make_group(group_id, prompt=2, size=1, limit=16))
    driver = Driver(scheduler)
    parked, resumed = [], []
    while scheduler.groups:
        plan = driver.step()
        parked += plan.parked
        resumed += [chunk for chunk in plan.chunks if chunk.sequence is not None]
    assert {sequence.group.request.group_id for sequence in parked} == {1}
    assert [(chunk.start, chunk.stop) for chunk in resumed] == [(0, 8)]
    assert driver.finished == [(0, 0), (1, 0)]
    assert scheduler.num_parked == 1


def test_recomputing_begins_with_the_oldest_and_the_others_decode_meanwhile() -> None:
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=8, prefill_tokens=6)
    for group_id in range(3):
        scheduler.add(make_group(group_id, prompt=7, size=2, limit=30))
    driver = Driver(scheduler, recompute=True)
    while len(scheduler.running) < 6:
        driver.step()
    before = {sequence: len(sequence.token_ids_T) for sequence in scheduler.active}
    cached = {id(s): s.num_cached for one in scheduler.active for s in (one.own, one.group.prefix)}
    driver.update()
    order = []
    while len(order) < 6:
        order += [(one.group.request.group_id, one.index) for one in driver.step().joined]
    assert order == [(group_id, index) for group_id in range(3) for index in range(2)]
    progress = [len(sequence.token_ids_T) - before[sequence] for sequence in scheduler.active]
    assert progress == sorted(progress, reverse=True) and progress[0] > progress[-1] > 0
    assert driver.recomputed_tokens == sum(cached.values()), "each token once, shared prompts once"


def test_updates_in_quick_succession_starve_nobody() -> None:
    """As long as the oldest rollout can be recomputed between two of them."""
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=4, prefill_tokens=4)
    for group_id in range(3):
        scheduler.add(make_group(group_id, prompt=9, size=2, limit=12))
    driver = Driver(scheduler, recompute=True)
    for step in range(1, 2000):
        driver.step()
        if not scheduler.groups:
            break
        if step % 7 == 0:  # 8 + 12 tokens at most, 4 per step, and one step to decode
            driver.update()
    assert driver.finished == [(group_id, index) for group_id in range(3) for index in range(2)]


def test_kept_prefixes_serve_rollouts_admitted_before_and_nobody_else() -> None:
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=2, prefill_tokens=100)
    scheduler.add(make_group(0, prompt=9, size=4, limit=5))
    driver = Driver(scheduler)
    assert [chunk.stop for chunk in driver.step().chunks] == [8]
    driver.update()
    assert driver.step().chunks == [], "the first two go on with the prefix they have"
    while len(driver.finished) < 2:
        driver.step()
    assert [(chunk.start, chunk.stop) for chunk in driver.step().chunks] == [(0, 8)], "the others get a new one"
    assert driver.recomputed_tokens == 8
    while scheduler.groups:
        driver.step()
    assert scheduler.pool.num_free == 64


def test_a_rollout_parked_after_an_update_comes_back_with_a_new_prefix() -> None:
    scheduler = Scheduler(num_blocks=7, block_size=BLOCK, max_running=2, prefill_tokens=100)
    scheduler.add(make_group(0, prompt=5, size=2, limit=16))
    driver = Driver(scheduler)
    driver.step()
    driver.update()
    parked, prefixes = [], []
    while scheduler.groups:
        plan = driver.step()
        parked += plan.parked
        prefixes += [driver.version for chunk in plan.chunks if chunk.sequence is None]
    assert (len(parked), prefixes) == (1, [1])
    assert scheduler.pool.num_free == 7


def test_prompts_that_begin_alike_are_prefilled_once_from_their_full_blocks() -> None:
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=8, prefill_tokens=100)
    for group_id in range(3):
        scheduler.add(make_group(group_id, prompt=15, size=2, limit=3, common=10))
    driver = Driver(scheduler)
    plan = driver.step()
    assert [(one.group.request.group_id, one.start, one.stop) for one in plan.chunks] == [
        (0, 0, 14), (1, 8, 14), (2, 8, 14),
    ]  # fmt: skip
    assert [sequence.prefills for sequence in scheduler.active] == [((0, 0, 14, 0),)] * 6
    shared = [group.prefix.blocks[:2] for group in scheduler.groups.values()]
    assert shared[0] == shared[1] == shared[2]
    while scheduler.groups:
        driver.step()
    assert scheduler.pool.num_free == 64


@pytest.mark.parametrize("recompute", [False, True])
def test_no_prompt_begins_with_blocks_of_older_weights(recompute: bool) -> None:
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=8, prefill_tokens=100)
    for group_id in range(2):
        scheduler.add(make_group(group_id, prompt=15, size=1, limit=9, common=10))
    driver = Driver(scheduler, recompute)
    driver.step()
    driver.update()
    scheduler.add(make_group(2, prompt=15, size=1, limit=9, common=10))
    chunks = [(one.group.request.group_id, one.start) for one in driver.step().chunks if one.sequence is None]
    assert chunks == ([(0, 0), (1, 8), (2, 8)] if recompute else [(2, 0)])
    assert driver.recomputed_tokens == (14 + 6 + 1 + 1 if recompute else 0)  # prompts, and the last token of each


def test_a_scheduler_that_shares_nothing_prefills_each_prompt_whole() -> None:
    scheduler = Scheduler(64, BLOCK, 8, 100, shares_prefixes=False)
    for group_id in range(2):
        scheduler.add(make_group(group_id, prompt=15, size=1, limit=3, common=15))
    assert [(one.start, one.stop) for one in Driver(scheduler).step().chunks] == [(0, 14), (0, 14)]


def test_no_prompt_begins_with_a_block_that_two_versions_have_filled() -> None:
    scheduler = Scheduler(num_blocks=64, block_size=BLOCK, max_running=8, prefill_tokens=2)
    driver = Driver(scheduler)
    scheduler.add(make_group(0, prompt=9, size=1, limit=3, common=9))
    driver.step()
    driver.update()
    scheduler.add(make_group(1, prompt=9, size=1, limit=3, common=9))
    while scheduler.groups:
        driver.step()


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=80))
def test_pool_conserves_blocks_and_touches_no_more_than_it_must(
    num_blocks: int, actions: list[tuple[bool, int]]
) -> None:
    pool, free, most = BlockPool(num_blocks), set(range(num_blocks)), 0
    for releases, pick in actions:
        used = sorted(set(range(num_blocks)) - free)
        if releases and used:
            block = used[pick % len(used)]
            pool.release([block])
            free.add(block)
        elif not releases and free:
            block = pool.take()
            free.remove(block)
            most = max(most, num_blocks - len(free))
            assert block < most
        assert pool.num_free == len(free)
    if free:
        with pytest.raises(AssertionError, match="released twice"):
            pool.release([min(free)])


def test_a_shared_block_is_free_after_its_last_user() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.share(block)
    assert pool.release([block]) == [] and pool.num_free == 2
    assert pool.release([block]) == [block] and pool.num_free == 3
    with pytest.raises(AssertionError, match="is free"):
        pool.share(block)


def test_an_index_finds_full_blocks_of_the_same_beginning_only() -> None:
    index, prompt_T = PrefixIndex(4), np.arange(12, dtype=np.int32)
    index.add(prompt_T, [7, 5, 6], 0, 11)
    other_T = np.append(prompt_T[:6], np.int32([99, 99, 8, 9, 10, 11]))
    assert index.find(prompt_T, 11) == [7, 5] and index.find(prompt_T, 7) == [7] and index.find(other_T, 12) == [7]
    assert index.find(prompt_T[4:], 8) == [], "a block counts with all before it"
    index.forget([5, 1])
    assert index.find(prompt_T, 12) == [7]
    index.clear()
    assert index.find(prompt_T, 12) == []
