"""Who writes what, which slot is free, and which memory is used again."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace

import pytest
import torch
import weight_processes as processes
from hypothesis import given
from hypothesis import strategies as st

from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import LayoutError
from llamarl.weight_sync.base import (
    BUCKET_BYTES,
    Buffers,
    FingerprintMismatch,
    NoFreeSlot,
    SlotTable,
    into_buckets,
    plan_writers,
)
from llamarl.weight_sync.layout import TensorSpec, lay_out


def spec(name: str, shape: tuple[int, ...], box: Box | None = None) -> TensorSpec:
    return TensorSpec(name=name, global_shape=shape, box=box or Box.whole(shape), dtype="float32")


class TestPlan:
    @pytest.mark.parametrize("trainer", [(1, 1, 1), (3, 1, 1), (2, 2, 1), (1, 4, 2), (5, 1, 4)])
    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_every_element_is_written_once_by_a_rank_that_holds_it(self, trainer, tp) -> None:
        layouts = [lay_out(specs) for specs in processes.wanted(tp, "float32")]
        plans = plan_writers(layouts, processes.held(*trainer))
        for number, layout in enumerate(layouts):
            times = [torch.zeros(spec.shape) for spec in layout.specs]
            for plan in plans:
                for part in plan.parts[number]:
                    spec = layout.specs[part.tensor]
                    assert part.box.intersection(plan.held[spec.name]) == part.box
                    times[part.tensor][spec.index_of(part.box)].add_(1)
            assert all((tensor == 1).all() for tensor in times)

    @pytest.mark.parametrize(
        ("held", "words"),
        [
            ([spec("a", (4,))], "^b: generators need it"),
            ([spec("a", (4,)), spec("b", (2, 2)), spec("c", (1,))], "^c: trainers have it"),
            ([spec("a", (4,)), spec("b", (2, 3))], r"^b: its shape is \(2, 3\) in trainers, \(2, 2\) wanted"),
            ([spec("a", (4,)), spec("b", (2, 2), Box((0, 0), (1, 2)))], r"^b: no trainer rank holds .*\(1, 0\)"),
        ],
    )
    def test_other_parameters_are_refused_by_name(self, held, words) -> None:
        with pytest.raises(LayoutError, match=words):
            plan_writers([lay_out([spec("a", (4,)), spec("b", (2, 2))])], [held])

    def test_an_unknown_dtype_is_refused_by_name(self) -> None:
        with pytest.raises(LayoutError, match=r"^b: its type is float64"):
            plan_writers([lay_out([replace(spec("b", (2, 2)), dtype="float64")])], [[spec("b", (2, 2))]])


def test_packed_parts_do_not_overlap_and_buckets_are_bounded() -> None:
    layout = lay_out([spec("big", (3 * (BUCKET_BYTES // 4000), 1000)), *(spec(f"w{i}", (i, 3)) for i in range(9))])
    (plan,) = plan_writers([layout], [[*layout.specs]])
    buckets, end, elements = into_buckets(layout, plan.parts[0]), 0, 0
    for bucket in buckets:
        assert bucket.num_bytes <= BUCKET_BYTES
        assert bucket.start == bucket.parts[0][1] == end
        for part, start in bucket.parts:
            assert start >= end
            end = start + -(-4 * part.box.num_elements // 64) * 64
            elements += part.box.num_elements
        assert end == bucket.start + bucket.num_bytes
    assert elements == sum(spec.num_bytes for spec in layout.specs) // 4
    assert len(buckets) == 3


def num_used(table: SlotTable) -> int:
    return sum(version is not None for version in table._versions)


class TestSlots:
    @given(st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 5), max_size=2)), max_size=40))
    def test_what_is_in_use_and_the_newest_are_never_overwritten(self, steps) -> None:
        table, slots, version = SlotTable(4), dict[int, int](), 0
        for step, ages in steps:
            in_use = {version - age for age in ages} & set(slots.values())
            kept = in_use | ({version} & set(slots.values()))
            version += step
            slot = table.claim(version, in_use)
            assert slots.get(slot) not in kept
            table.mark_written(slot, version)
            slots[slot] = version
        assert num_used(table) == len(slots) <= 4

    def test_two_slots_do_while_generators_keep_up(self) -> None:
        table = SlotTable(4)
        for version in range(20):
            table.mark_written(table.claim(version, {version - 1}), version)
        assert num_used(table) == 2

    def test_too_many_versions_in_use(self) -> None:
        table = SlotTable(2)
        for version in (0, 1):
            table.mark_written(table.claim(version, ()), version)
        with pytest.raises(NoFreeSlot, match=r"no slot for version 2: versions \[0, 1\]"):
            table.claim(2, {0})

    def test_a_failed_write_gives_up_neither_the_newest_nor_what_is_in_use(self) -> None:
        table = SlotTable(3)
        for version in (0, 1):
            table.mark_written(table.claim(version, ()), version)
        assert table.claim(2, {0}) == table.claim(2, {0}) == 2


def test_memory_is_used_again_only_when_no_tensor_is_left() -> None:
    buffers = Buffers(1000)
    first = buffers.take()
    view, place = first[100:200], first.data_ptr()
    del first
    gc.collect()
    assert buffers.take().data_ptr() != place, "a view is left"
    view.fill_(3)
    del view
    gc.collect()
    assert place in {buffers.take().data_ptr() for _ in range(1)} | {buffers.take().data_ptr()}


def test_errors_survive_the_way_to_the_controller() -> None:
    error = pickle.loads(pickle.dumps(FingerprintMismatch("w", 3, 1, "it differs")))
    assert (error.tensor, error.version, error.rank) == ("w", 3, 1)
    assert str(error) == "w of version 3 on generator rank 1: it differs"


def test_the_matrix_of_layouts_has_uneven_and_replicated_parts() -> None:
    plans = plan_writers([lay_out(specs) for specs in processes.wanted(2, "float32")], processes.held(3, 1, 1))
    boxes = {part.box.shape for plan in plans for part in plan.parts[0]}
    assert {(5,), (3,)} <= boxes
