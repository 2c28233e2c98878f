"""The staleness bound under random and adversarial finish orders, liveness, and misuse."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.config.schema import staleness_limit
from llamarl.controller.admission import BufferLimits, RolloutBuffer
from llamarl.types import Prompt, RolloutGroup
from tests.nightly import examples


def group(group_id: int) -> RolloutGroup:
    prompt = Prompt(prompt_id="p", text="", token_ids_T=np.zeros(1, np.int32), answer="")
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=(), results=(), responses=())


def buffer_of(
    P: int,
    max_staleness: int,
    window: int,
    first_group_id: int = 0,
    max_dropped: int = 0,
    resumed: Sequence[int] = (),
    max_active: int = 0,
    num_dropped: int = 0,
) -> RolloutBuffer:
    limits = BufferLimits(
        prompts_per_step=P, max_staleness=max_staleness, window=window, max_dropped=max_dropped, max_active=max_active
    )
    return RolloutBuffer(limits, first_group_id, resumed, num_dropped)


class Model:
    """Trainer and generators around a buffer. Every event that could happen next is a choice of the driver.

    A group's age counts from the oldest version that may serve it: the worst case, as if a generator that has
    adopted nothing newer sampled its first token at once.
    """

    def __init__(
        self,
        P: int,
        S: int,
        W: int,
        num_steps: int,
        first_step: int = 0,
        max_dropped: int = 0,
        flat: float = 0.0,
        max_active: int = 0,
    ) -> None:
        self.buffer = buffer_of(P, S, W, first_step * P, max_dropped, max_active=max_active)
        self.flat = flat
        """Share of groups whose rewards are all equal."""
        self.dropped: list[int] = []
        self.dropped_since_step = 0
        self.left_to_admit = num_steps * P
        self.last_step = first_step + num_steps
        self.trained = self.adopted = first_step
        self.generating: dict[int, int] = {}
        self.coming: set[int] = set()
        """Of those that are generating here, groups whose scores alone are to come."""
        self.born: dict[int, int] = {}
        self.consumed: list[int] = []
        self.staleness: list[int] = []
        self.starved = False
        self.unconsumed: set[int] = set()
        self.begun: dict[int, int] = {}
        """When groups were born that a journal has."""
        self.complete_step()

    def complete_step(self) -> None:
        """What its line in a journal says."""
        self.line = (
            self.buffer.next_group_id, self.buffer.num_dropped, set(self.unconsumed), list(self.dropped),
            self.left_to_admit,
        )  # fmt: skip

    def go_on(self) -> None:
        """The controller dies, and goes on after the last step. All that was generated is kept, and so as old as it is:
        also of groups that were admitted after the step, and come again under their numbers."""
        line = copy.deepcopy(self.line)
        self.buffer.next_group_id, self.buffer.num_dropped, self.unconsumed, self.dropped, self.left_to_admit = line
        self.dropped_since_step = self.buffer.num_dropped
        self.left_to_admit += len(self.unconsumed) - self.buffer.num_unconsumed
        self.resume()
        self.begun = dict(self.born)

    def resume(self) -> None:
        """All processes start anew from a checkpoint of this moment."""
        buffer, limit = self.buffer, self.buffer.staleness_limit
        S = buffer.capacity // buffer.prompts_per_step - 1
        self.buffer = buffer_of(
            buffer.prompts_per_step, S, buffer.window, buffer.next_group_id, buffer._max_dropped,
            resumed=sorted(self.unconsumed), num_dropped=buffer.num_dropped,
        )  # fmt: skip
        assert self.buffer.staleness_limit == limit
        self.left_to_admit += buffer.num_unconsumed
        self.generating, self.coming, self.adopted, self.starved = {}, set(), self.trained, False
        self.begun = {}

    @property
    def done(self) -> bool:
        return self.trained == self.last_step

    @property
    def num_admissible(self) -> int:
        return min(self.buffer.num_free, self.left_to_admit)

    def possible(self) -> list[str]:
        """Events that may happen next; the trainer asks again once a group has come in."""
        events = {
            "admit": self.num_admissible > 0,
            "generate": len(self.coming) < len(self.generating),
            "finish": bool(self.generating),
            "train": not self.starved,
            "adopt": self.adopted < self.trained,
        }
        return [event for event, may_happen in events.items() if may_happen]

    def admit(self, count: int) -> None:
        num_active = self.buffer.num_active
        for place, group_id in enumerate(self.buffer.admit(count)):
            oldest = self.buffer.oldest_version(num_active + place, self.adopted)
            assert 0 <= oldest <= self.adopted, "it would wait for what is not there"
            self.generating[group_id] = self.born[group_id] = self.begun.get(group_id, oldest)
            self.unconsumed.add(group_id)
        self.left_to_admit -= count

    def generate(self, group_id: int) -> None:
        self.buffer.mark_generated(group_id)
        self.coming.add(group_id)

    def lacking(self) -> tuple[int, list[int]]:
        """What the buffer keeps count of is what a look at all groups finds."""
        found = lacking(self.buffer, self.coming)
        assert found == looked_at(self.buffer, self.coming)
        return found

    def finish(self, group_id: int) -> None:
        del self.generating[group_id]
        self.coming.discard(group_id)
        ready, dropped = self.buffer.put(group(group_id), is_flat=self.is_flat(group_id))
        assert all(self.is_flat(dropped_id) for dropped_id in dropped)
        assert self.is_flat(group_id) or group_id in [one.group_id for one in ready]
        self.dropped += dropped
        self.unconsumed.difference_update(dropped)
        self.dropped_since_step += len(dropped)
        self.left_to_admit += len(dropped)
        self.starved = False

    def is_flat(self, group_id: int) -> bool:
        return random.Random(group_id).random() < self.flat

    def train(self) -> bool:
        taken = self.buffer.take()
        if taken is None:
            self.starved = True
            return False
        self.buffer.num_dropped = 0
        ids = [item.group_id for item in taken]
        assert len(ids) == self.buffer.prompts_per_step
        assert ids == sorted(ids)
        self.consumed += ids
        self.unconsumed.difference_update(ids)
        self.staleness += [self.trained - self.born[group_id] for group_id in ids]
        self.trained += 1
        self.dropped_since_step = 0
        self.complete_step()
        return True

    def adopt(self) -> None:
        self.adopted += 1
        if self.adopted == self.trained:  # groups may have been dropped since its groups were taken
            self.complete_step()
        self.buffer.free(self.buffer.prompts_per_step)


def lacking(buffer: RolloutBuffer, coming: Collection[int]) -> tuple[int, list[int]]:
    """How many groups the next step lacks, and which surely; those that are `coming` are generated."""
    number, end = buffer.missing()
    missing = [group_id for group_id, found in buffer._waiting.items() if found is None and group_id not in coming]
    return number, [group_id for group_id in missing if group_id < end]


def looked_at(buffer: RolloutBuffer, coming: Collection[int]) -> tuple[int, list[int]]:
    """The same, by taking step after step of all groups."""

    def is_there(group_id: int) -> bool:
        return buffer._waiting[group_id] is not None or group_id in coming

    left, P, W = list(buffer._waiting), buffer.prompts_per_step, buffer.window
    while True:
        staying = next((group_id for group_id in left if not is_there(group_id)), None)
        taken = [one for one in left if is_there(one) and (staying is None or one < staying + W)][:P]
        if len(taken) < P:
            break
        left = [group_id for group_id in left if group_id not in taken]
    surely = [group_id for group_id in left[: max(0, P - W + 1)] if not is_there(group_id)]
    return max(1, P - sum(map(is_there, left))), surely


def in_order(P: int, num_steps: int, first_step: int, max_dropped: int, flat: float) -> tuple[list[int], list[int]]:
    """What a loop consumes and drops that generates one group after the other."""
    is_flat, next_id = Model(P, 0, 1, num_steps, flat=flat).is_flat, first_step * P
    consumed, dropped = list[int](), list[int]()
    for _ in range(num_steps):
        of_step, tried_in_vain = list[int](), 0
        while len(of_step) < P:
            if is_flat(next_id) and tried_in_vain < max_dropped:
                dropped.append(next_id)
                tried_in_vain += 1
            else:
                of_step.append(next_id)
            next_id += 1
        consumed += of_step
    return consumed, dropped


EVENTS = ("admit", "generate", "finish", "train", "adopt")
SIZES = st.integers(1, 5).flatmap(
    lambda P: st.integers(0, 3).flatmap(
        lambda S: st.tuples(st.just(P), st.just(S), st.integers(1, (S + 1) * P), st.integers(1, 14))
    )
)


@settings(max_examples=examples(300), deadline=None)
@given(
    sizes=SIZES,
    seed=st.integers(0, 2**32),
    first_step=st.integers(0, 3),
    max_dropped=st.sampled_from([0, 1, 3, 20]),
    flat=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    resumed_at=st.sets(st.integers(0, 60), max_size=3),
    keeps=st.booleans(),
)
def test_any_finish_order(
    sizes: tuple[int, int, int, int],
    seed: int,
    first_step: int,
    max_dropped: int,
    flat: float,
    resumed_at: set[int],
    keeps: bool,
) -> None:
    """Bounded staleness, no deadlock, every step full, and every group exactly once consumed or dropped, by its number,
    whenever the run is resumed: from a checkpoint, or with all that a journal `keeps`."""
    P, S, W, num_steps = sizes
    model, rng = Model(P, S, W, num_steps, first_step, max_dropped, flat), random.Random(seed)
    # How eager each party is differs between runs: slow generators, slow trainer, slow weight sync.
    eagerness = {name: rng.choice([0.05, 0.5, 1.0, 20.0]) for name in EVENTS}
    num_events = 0
    while not model.done:
        if num_events in resumed_at:
            model.go_on() if keeps else model.resume()
        num_events += 1
        possible = model.possible()
        assert possible, f"deadlock: step {model.trained}, {model.buffer.num_ready} ready, {model.buffer.num_free} free"
        match rng.choices(possible, [eagerness[event] for event in possible])[0]:
            case "admit":
                model.admit(rng.randint(1, model.num_admissible))
            case "generate":
                model.generate(rng.choice([one for one in model.generating if one not in model.coming]))
            case "finish":
                model.finish(rng.choice(list(model.generating)))
            case "train":
                model.train()
            case "adopt":
                model.adopt()
        assert 0 <= model.buffer.num_active <= model.buffer.capacity
        assert model.buffer.num_unconsumed >= model.buffer.num_ready
        assert model.dropped_since_step <= max_dropped
        model.lacking()
    assert max(model.staleness) <= model.buffer.staleness_limit == (S + -(-(W - 1) // P) if S else 0)
    seen = first_step * P + num_steps * P + len(model.dropped)
    assert sorted(model.consumed + model.dropped) == list(range(first_step * P, seen))
    assert len(model.consumed) == num_steps * P
    if S == 0:
        # The same groups, whatever order they came in: a synchronous run repeats itself.
        assert (model.consumed, sorted(model.dropped)) == in_order(P, num_steps, first_step, max_dropped, flat)
    if W == 1:
        assert model.consumed == sorted(model.consumed), "a window of 1 is first in, first out"


@settings(max_examples=examples(300), deadline=None)
@given(
    sizes=SIZES,
    seed=st.integers(0, 2**32),
    max_dropped=st.sampled_from([0, 1, 3]),
    flat=st.sampled_from([0.0, 0.3, 0.8]),
)
def test_no_step_is_possible_without_what_it_lacks(
    sizes: tuple[int, int, int, int], seed: int, max_dropped: int, flat: float
) -> None:
    """Whatever else has come: as long as fewer groups have than are said to lack, or one that surely lacks has not."""
    P, S, W, num_steps = sizes
    model, rng = Model(P, S, W, num_steps, 0, max_dropped, flat), random.Random(seed)
    while not model.done:
        while model.num_admissible:
            model.admit(model.num_admissible)
        for group_id in rng.sample(list(model.generating), rng.randint(0, len(model.generating))):
            model.finish(group_id)
        begun = [one for one in model.generating if one not in model.coming]
        for group_id in rng.sample(begun, rng.randint(0, len(begun))):
            model.generate(group_id)
        coming, (number, surely) = set(model.coming), model.lacking()
        assert number > 0 and set(surely) <= set(begun) - coming | set(model.buffer._flat)
        tried = copy.deepcopy(model.buffer)
        for group_id in coming:
            tried.put(group(group_id))
        while tried.take():
            pass
        others = [one for one in model.generating if one not in coming]
        rng.shuffle(others)
        left_out = set(rng.sample(surely, min(1, len(surely))))
        missing = left_out & set(others)
        for group_id in [one for one in others if one not in left_out][: None if missing else number - 1]:
            tried.put(group(group_id), is_flat=model.is_flat(group_id))
        assert tried.take() is None
        left = list(model.generating)
        for group_id in rng.sample(left, rng.randint(min(1, len(left)), len(left))):
            model.finish(group_id)
        while model.train():
            model.adopt()


def all_sizes() -> Iterator[tuple[int, int, int]]:
    for P in (1, 2, 3, 4):
        for S in (0, 1, 2):
            for W in range(1, (S + 1) * P + 1):
                yield P, S, W


def pass_by(model: Model, slow: int) -> None:
    """All others that may be admitted are generated and trained on first, until a step needs the slow group."""
    while slow not in model.consumed:
        while model.num_admissible:
            model.admit(model.num_admissible)
        for group_id in [group_id for group_id in model.generating if group_id != slow]:
            model.finish(group_id)
        if not model.train():
            model.finish(slow)
            assert model.train()
        while model.adopted < model.trained:
            model.adopt()


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("P", "S", "W"), list(all_sizes()))
def test_the_bound_is_reached(P: int, S: int, W: int, is_full: bool) -> None:
    """One slow group, admitted on the oldest weights that admission allows, is passed by all that the window allows;
    also with as many groups in flight as the bound allows."""
    limit = staleness_limit(S, P, W)
    max_active = (limit + 1) * P - (W - 1) if S and is_full else (S + 1) * P
    slow = max_active - 1
    model = Model(P, S, W, num_steps=3 * (S + 2) + W, max_active=max_active)
    model.admit(model.num_admissible)
    assert slow in model.generating
    pass_by(model, slow)
    assert model.trained - 1 - model.born[slow] == model.buffer.staleness_limit


@pytest.mark.parametrize(("P", "S", "W"), [one for one in all_sizes() if one[1]])
def test_a_group_may_begin_with_the_oldest_weights_that_keep_the_bound(P: int, S: int, W: int) -> None:
    """However many are active as it comes: waiting for newer weights than these would cost time, and gain nothing."""
    for others in range((S + 1) * P):
        model = Model(P, S, W, num_steps=3 * (S + 2) + W, first_step=9)
        model.admit(others + 1)
        slow = max(model.generating)
        pass_by(model, slow)
        assert model.trained - 1 - model.born[slow] == model.buffer.staleness_limit


def test_without_staleness_phases_take_turns() -> None:
    """S = 0: nothing is admitted until the weights that were trained on the last groups are adopted."""
    P = 3
    buffer = buffer_of(P, max_staleness=0, window=1)
    for step in range(4):
        ids = buffer.admit(buffer.num_free)
        assert list(ids) == [step * P, step * P + 1, step * P + 2]
        for group_id in reversed(ids):
            assert buffer.num_free == 0
            assert buffer.take() is None
            buffer.put(group(group_id))
        assert [item.group_id for item in buffer.take() or []] == list(ids)
        assert buffer.num_free == 0, "trained, but the generators still hold the old weights"
        buffer.free(P)
        assert buffer.num_free == P


class TestWindow:
    def ready(self, window: int, ids: list[int]) -> RolloutBuffer:
        buffer = buffer_of(2, max_staleness=3, window=window)
        buffer.admit(8)
        for group_id in ids:
            buffer.put(group(group_id))
        return buffer

    def taken(self, buffer: RolloutBuffer) -> list[int] | None:
        groups = buffer.take()
        return None if groups is None else [item.group_id for item in groups]

    def test_a_slow_group_may_be_passed_up_to_the_window(self) -> None:
        assert self.taken(self.ready(3, [1, 2])) == [1, 2]
        assert self.taken(self.ready(3, [1, 3])) is None, "3 is not below 0 + 3"
        assert self.taken(self.ready(4, [1, 3])) == [1, 3]

    def test_the_window_moves_within_one_step(self) -> None:
        assert self.taken(self.ready(1, [1, 0])) == [0, 1]
        assert self.taken(self.ready(2, [0, 2])) == [0, 2], "once 0 is taken, the oldest is 1 and 2 is below 1 + 2"

    @pytest.mark.parametrize(
        ("window", "ids", "coming", "expected"),
        [
            (1, [], [], (2, [0, 1])),
            (1, [0, 3], [], (1, [1])),
            (2, [1], [], (1, [0])),
            (2, [1, 2], [], (1, [0])),
            (2, [0], [1], (2, [2])),
            (2, [0, 1, 2], [], (1, [])),
            (3, [1, 2, 4], [], (1, [])),
            (4, [], [], (2, [])),
            (1, [0, 1, 2], [3], (2, [4, 5])),
        ],
    )  # fmt: skip
    def test_what_the_next_step_lacks(self, window, ids, coming, expected) -> None:
        buffer = self.ready(window, ids)
        for group_id in coming:
            buffer.mark_generated(group_id)
        assert lacking(buffer, coming) == expected

    def test_what_is_flat_may_be_kept_without_others(self) -> None:
        buffer = buffer_of(2, max_staleness=3, window=2, max_dropped=1)
        buffer.admit(8)
        for group_id in (1, 2):
            buffer.put(group(group_id), is_flat=True)
        assert lacking(buffer, ()) == (1, [0])
        buffer.put(group(0))
        assert self.taken(buffer) == [0, 2]

    def test_a_refused_take_changes_nothing(self) -> None:
        buffer = self.ready(3, [1, 5])
        assert self.taken(buffer) is None
        assert list(buffer._waiting) == list(range(8))
        assert (buffer.num_ready, buffer.num_active, buffer.num_free) == (2, 8, 0)

    def test_unconsumed_are_oldest_first(self) -> None:
        buffer = self.ready(4, [1, 3])
        buffer.take()
        assert list(buffer._waiting) == [0, 2, 4, 5, 6, 7]
        assert buffer.num_active == 8, "consumed groups stay active until their weights are adopted"


class TestMisuse:
    def test_admission_beyond_the_bound(self) -> None:
        buffer = buffer_of(2, max_staleness=1, window=1)
        buffer.admit(3)
        with pytest.raises(AssertionError, match="staleness bound"):
            buffer.admit(2)
        assert buffer.num_free == 1

    def test_put_of_an_unknown_group(self) -> None:
        buffer = buffer_of(2, max_staleness=0, window=1)
        with pytest.raises(AssertionError, match="unknown group"):
            buffer.put(group(0))

    def test_put_twice(self) -> None:
        buffer = buffer_of(2, max_staleness=0, window=1)
        buffer.admit(2)
        buffer.put(group(0))
        with pytest.raises(AssertionError, match="put twice"):
            buffer.put(group(0))

    def test_freeing_more_than_was_consumed(self) -> None:
        buffer = buffer_of(1, max_staleness=1, window=1)
        buffer.admit(2)
        buffer.put(group(0))
        buffer.take()
        with pytest.raises(AssertionError, match="freed more"):
            buffer.free(2)


class TestReplacement:
    def finished(self, buffer: RolloutBuffer, group_id: int) -> tuple[list[int], list[int]]:
        ready, dropped = buffer.put(group(group_id), is_flat=True)
        return [one.group_id for one in ready], dropped

    def test_a_flat_group_waits_only_where_older_ones_decide(self) -> None:
        buffer = buffer_of(4, max_staleness=0, window=1, max_dropped=2)
        buffer.admit(4)
        assert self.finished(buffer, 1) == ([], [1]), "at most one older group is dropped before it"
        assert self.finished(buffer, 3) == ([], []), "0 and 2 may be the second one"
        assert (buffer.num_ready, buffer.num_free) == (0, 1)
        assert list(buffer.admit(1)) == [4]
        assert self.finished(buffer, 4) == ([4], []), "whatever 0 and 2 are, 1 and another one come before"
        ready, dropped = buffer.put(group(0))
        assert ([one.group_id for one in ready], dropped) == ([0], [])
        assert self.finished(buffer, 2) == ([3], [2]), "now it is known that 2 is the second one"
        assert list(buffer.admit(1)) == [5]
        assert self.finished(buffer, 5) == ([5], []), "the attempts are over"
        assert [one.group_id for one in buffer.take() or []] == [0, 3, 4, 5]

    def test_attempts_count_from_step_to_step(self) -> None:
        buffer = buffer_of(1, max_staleness=1, window=1, max_dropped=1)
        buffer.admit(2)
        assert self.finished(buffer, 0) == ([], [0])
        assert self.finished(buffer, 1) == ([1], [])
        assert buffer.take() is not None
        assert buffer.num_dropped == 1, "an interruption here gives its groups back, and no new attempts"
        buffer.num_dropped = 0
        buffer.admit(1)
        assert self.finished(buffer, 2) == ([], [2])

    def test_a_flat_group_cannot_be_put_twice(self) -> None:
        buffer = buffer_of(2, max_staleness=0, window=1, max_dropped=1)
        buffer.admit(2)
        self.finished(buffer, 1)
        with pytest.raises(AssertionError, match="put twice"):
            self.finished(buffer, 1)


def test_a_resumed_run_goes_on_counting() -> None:
    buffer = buffer_of(2, max_staleness=1, window=2, first_group_id=14)
    assert list(buffer.admit(4)) == [14, 15, 16, 17]
    buffer.put(group(15))
    buffer.put(group(14))
    assert [item.group_id for item in buffer.take() or []] == [14, 15]
    buffer.free(2)
    assert list(buffer.admit(2)) == [18, 19]
