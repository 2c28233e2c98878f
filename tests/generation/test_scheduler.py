"""The scheduler alone: tokens are counted, not computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.generation.scheduler import Schedule, Scheduler
from llamarl.generation.sequence import Group, Sequence
from llamarl.types import GenerationRequest, SamplingParams

BLOCK = 4


def make_group(group_id: int, prompt: int, size: int, limit: int) -> Group:
    request = GenerationRequest(
        group_id=group_id, prompt_token_ids_T=np.zeros(prompt, np.int32), group_size=size, sampling=SamplingParams()
    )
    group = Group(request, request.prompt_token_ids_T, limit)
    group.unfinished = {index: Sequence(group, index) for index in range(size)}
    return group


@dataclass
class Driver:
    """Carries schedules out, and checks each against what the engine relies on."""

    scheduler: Scheduler
    cached: dict[object, int] = field(default_factory=dict)
    first_admissions: list[tuple[int, int]] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)

    def step(self) -> Schedule:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        for sequence in scheduler.active:
            key = (sequence.group.request.group_id, sequence.index)
            if key not in self.first_admissions:
                self.first_admissions.append(key)
        self._check(plan)
        for sequence in list(scheduler.running):
            sequence.token_ids_T = np.zeros(len(sequence.token_ids_T) + 1, np.int32)
            if len(sequence.token_ids_T) == sequence.group.limit:
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

    def check_blocks(self) -> None:
        held = [
            block
            for group in self.scheduler.groups.values()
            for segment in (group.prefix, *(sequence.own for sequence in group.unfinished.values()))
            for block in segment.blocks
        ]
        assert len(held) == len(set(held))
        assert len(held) + self.scheduler.pool.num_free == self.scheduler.pool.num_blocks


GROUPS = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 4), st.integers(1, 16)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=200)
@given(
    GROUPS,
    st.integers(8, 20),
    st.integers(1, 6),
    st.integers(1, 9),
    st.lists(st.integers(0, 40), max_size=3),
    st.data(),
)
def test_everything_finishes_once_and_no_block_is_lost(
    sizes: list[tuple[int, int, int]],
    num_blocks: int,
    max_running: int,
    prefill_tokens: int,
    abort_steps: list[int],
    data: st.DataObject,
) -> None:
    scheduler = Scheduler(num_blocks, BLOCK, max_running, prefill_tokens)
    driver = Driver(scheduler)
    groups = [make_group(i, *size) for i, size in enumerate(sizes)]
    for group in groups:
        assert scheduler.fits(group.prefix_tokens, group.limit)
        scheduler.add(group)
    total = sum(size * (limit + prompt) for prompt, size, limit in sizes)
    aborted: set[tuple[int, int]] = set()
    for step in range(20 * total + 100):
        if not scheduler.groups:
            break
        driver.step()
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
