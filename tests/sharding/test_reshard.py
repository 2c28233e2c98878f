"""Plans are carried out in numpy, copy by copy: every element arrives, once, and is the right one."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.parts.forecast.layouts import Shard, generator_layout, mesh_boxes, trainer_layout
from llamarl.parts.forecast.shapes import MODELS
from llamarl.parts.forecast.transfer_time import LinkSpeeds, Traffic, delta_share, estimate, fastest, traffic
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import DTYPE_BYTES, Held, LayoutError, ShardLayout, assemble_layout
from llamarl.sharding.reshard import Move, ReshardPlan, plan_reshard
from llamarl.sharding.tensor_parallel import expert_box, tensor_parallel_box
from llamarl.weight_sync.relays import Chains
from tests.nightly import nightly


def hops(plan: ReshardPlan) -> list[tuple[int, int, int]]:
    """(device, device, bytes) of each copy when readers are told by the transport's own chains where to get a piece."""
    found, sources, takers = list[tuple[int, int, int]](), plan.source, plan.destination
    for group in plan.groups:
        for row, num_bytes in enumerate((group.bytes_M * len(group.names)).tolist()):
            chains, sender = Chains(), int(group.senders_M[row])
            for rank in plan.audiences[group.audiences_M[row]]:
                relay = ""
                if takers.hosts_R[rank] != sources.hosts_R[sender]:
                    relay = chains.relay_for((0, 0, 0), f"{takers.hosts_R[rank]}:{rank}")
                giver = takers.devices_R[int(relay.rpartition(":")[2])] if relay else sources.devices_R[sender]
                found.append((int(giver), int(takers.devices_R[rank]), num_bytes))
    return found


def execute(plan: ReshardPlan) -> list[Move]:
    """All copies."""
    whole = {
        name: np.arange(np.prod(held.shape, dtype=int)).reshape(held.shape)
        for name, held in plan.source.parameters.items()
    }
    held, wanted = (
        [layout.boxes(rank) for rank in range(layout.num_ranks)] for layout in (plan.source, plan.destination)
    )
    arrived = [{name: np.full(box.shape, -1) for name, box in boxes.items()} for boxes in wanted]

    def write(move: Move, values: np.ndarray) -> None:
        index = move.box.within(wanted[move.receiver][move.name])
        target = arrived[move.receiver][move.name][index]
        assert values.shape == target.shape == move.box.shape
        assert (target == -1).all(), f"{move} writes twice"
        arrived[move.receiver][move.name][index] = values

    sent = [plan.moves_from(rank) for rank in range(len(held))]
    received = [plan.moves_to(rank) for rank in range(len(wanted))]
    for sender, receiver in {(move.sender, move.receiver) for moves in sent for move in moves}:
        ours = [move for move in sent[sender] if move.receiver == receiver]
        assert ours == [move for move in received[receiver] if move.sender == sender], "two ranks must agree"
    done = [move for moves in sent for move in moves]
    assert Counter(done) == Counter(move for moves in received for move in moves)
    for move in done:
        box = held[move.sender][move.name]
        assert move.box.intersection(box) == move.box, "a rank sends what it does not hold"
        write(move, whole[move.name][box.within(Box.whole(whole[move.name].shape))][move.box.within(box)])
    for boxes, tensors in zip(wanted, arrived, strict=True):
        for name, box in boxes.items():
            assert (tensors[name] == whole[name][box.within(Box.whole(whole[name].shape))]).all(), name
    return done


def counted(plan: ReshardPlan, copies: list[tuple[int, int, int]]) -> Traffic:
    """Bytes by device, one copy after the other."""
    found = Traffic.zero(len(traffic(plan).host_in_V))
    for ours, theirs, num_bytes in copies:
        if ours == theirs:
            continue
        is_near = ours // plan.source.host_size == theirs // plan.source.host_size
        (found.host_out_V if is_near else found.network_out_V)[ours] += num_bytes
        (found.host_in_V if is_near else found.network_in_V)[theirs] += num_bytes
    return found


def check(plan: ReshardPlan) -> None:
    devices = plan.source.devices_R.tolist(), plan.destination.devices_R.tolist()
    direct = [(devices[0][move.sender], devices[1][move.receiver], move.num_bytes) for move in execute(plan)]
    for is_relayed, copies in ((False, direct), (True, hops(plan))):
        found, expected = traffic(plan, is_relayed=is_relayed), counted(plan, copies)
        for field in fields(Traffic):
            assert getattr(found, field.name) == pytest.approx(getattr(expected, field.name)), field.name
    for rank in range(plan.source.num_ranks):
        staged = {(move.name, move.box) for move in plan.moves_from(rank)}
        held = plan.source.boxes(rank).values()
        assert sum(box.num_elements for _, box in staged) <= sum(box.num_elements for box in held)


SIZES = st.integers(1, 5)


@st.composite
def executors(draw) -> tuple[ShardLayout, ShardLayout]:
    """A trainer and generators of a small decoder; FSDP ranks seldom divide its sizes."""
    tp, kv = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    cut = [4 * draw(SIZES) for _ in range(3)]
    hidden, layers, num_experts = draw(SIZES) * 4, draw(st.integers(1, 2)), draw(SIZES)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (cut[0], hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        for name, shape in (
            ("q_proj.weight", (cut[1], hidden)),
            ("q_proj.bias", (cut[1],)),
            ("k_proj.weight", (kv * 4, hidden)),
            ("o_proj.weight", (hidden, cut[1])),
            ("down_proj.weight", (hidden, cut[2])),
            ("input_layernorm.weight", (hidden,)),
            ("mlp.experts.gate_proj", (num_experts, cut[2], hidden)),
            ("mlp.experts.down_proj", (num_experts, hidden, cut[2])),
        ):
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes |= {"lm_head.weight": (cut[0], hidden)} if draw(st.booleans()) else {}
    host_size = draw(SIZES)
    source = trainer_layout(
        shapes,
        fsdp=draw(st.integers(1, 4)),
        tp=draw(st.integers(1, 3)),
        pp=draw(st.integers(1, layers)),
        replicate=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        host_size=host_size,
    )
    destination = generator_layout(
        shapes,
        num_kv_heads=kv,
        tp=tp,
        replicas=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        first_device=draw(st.sampled_from([0, source.num_ranks, source.num_ranks + host_size])),
        host_size=host_size,
    )
    return source, destination


@st.composite
def meshes(draw, names_and_shapes: dict[str, tuple[int, ...]], dtype: str) -> ShardLayout:
    """Any placements on a mesh of three axes, strided ones among them."""
    mesh = draw(st.tuples(*[st.integers(1, 3)] * 3))
    held = {}
    for name, shape in names_and_shapes.items():
        any_shard = st.builds(Shard, st.integers(0, max(len(shape), 1) - 1), st.booleans())
        placements = draw(st.tuples(*[st.none() | any_shard] * 3))
        held[name] = Held(shape, dtype, mesh_boxes(shape, mesh, placements))
    first = draw(st.integers(0, 9))
    return ShardLayout(parameters=held, devices_R=first + np.arange(np.prod(mesh)), host_size=4)


@nightly("processes; by day plans are carried out in one")
@settings(max_examples=250, deadline=None, derandomize=True)
@given(executors())
def test_trainers_to_generators(layouts) -> None:
    check(plan_reshard(*layouts))


@nightly("more meshes; by day those of other tests here")
@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.data())
def test_any_mesh_to_any_mesh(data) -> None:
    sizes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    shapes = {f"p{number}": data.draw(sizes) for number in range(3)}
    check(plan_reshard(data.draw(meshes(shapes, "float32")), data.draw(meshes(shapes, "bfloat16"))))


SHAPES = {
    "model.embed_tokens.weight": (12, 8),
    "model.layers.0.q_proj.weight": (16, 8),
    "model.layers.0.o_proj.weight": (8, 16),
}


def test_ranks_may_say_themselves_what_they_hold() -> None:
    """Layouts put together from boxes give the moves of those worked out."""
    source, destination = trainer_layout(SHAPES, fsdp=3), generator_layout(SHAPES, tp=2, replicas=2, num_kv_heads=2)

    def told(layout: ShardLayout) -> ShardLayout:
        return assemble_layout(
            [
                {name: (SHAPES[name], "bfloat16", box) for name, box in layout.boxes(rank).items()}
                for rank in range(layout.num_ranks)
            ]
        )

    ours, theirs = plan_reshard(told(source), told(destination)), plan_reshard(source, destination)
    for rank in range(3):
        assert Counter(ours.moves_from(rank)) == Counter(theirs.moves_from(rank))


@pytest.mark.parametrize("where", ["missing", "extra", "shape", "dtype", "region", "overlap"])
def test_layouts_that_do_not_fit_are_refused_by_name(where: str) -> None:
    name = "model.layers.0.o_proj.weight"
    fewer = {other: shape for other, shape in SHAPES.items() if other != name}
    source, destination = trainer_layout(SHAPES, fsdp=2), generator_layout(SHAPES, tp=2, num_kv_heads=2)
    held = source.parameters[name]
    match where:
        case "missing":
            source, cause = trainer_layout(fewer, fsdp=2), "no trainer rank has it"
        case "extra":
            destination, cause = generator_layout(fewer, tp=2, num_kv_heads=2), "no generator rank needs it"
        case "shape":
            source, cause = trainer_layout(SHAPES | {name: (8, 18)}, fsdp=2), r"\(8, 18\) in trainers, \(8, 16\)"
        case "dtype":
            source, cause = trainer_layout(SHAPES, fsdp=2, dtype="int8"), "cannot be converted to bfloat16"
            source = replace(source, parameters={name: source.parameters[name]})
            destination = replace(destination, parameters={name: destination.parameters[name]})
        case "region":
            held.boxes.starts_R_N.flags.writeable = held.boxes.stops_R_N.flags.writeable = True
            held.boxes.stops_R_N[1, 0] = 7
            cause = r"no trainer rank holds Box\(starts=\(7, 0\), stops=\(8, 16\)\)"
        case "overlap":
            held.boxes.starts_R_N.flags.writeable = True
            held.boxes.starts_R_N[1, 0] = 3
            cause = "2 different parts of trainer ranks hold"
    with pytest.raises(LayoutError, match=f"^{name}: .*{cause}") as caught:
        plan_reshard(source, destination)
    assert caught.value.parameter == name


def test_the_nearest_and_then_the_least_loaded_of_those_that_hold_the_same_sends() -> None:
    shapes = {f"layers.{layer}.up_proj.weight": (8 * (layer + 1), 8) for layer in range(6)}
    source = trainer_layout(shapes, replicate=4, host_size=2)
    apart = plan_reshard(source, generator_layout(shapes, replicas=2, num_kv_heads=1, first_device=4, host_size=2))
    loads = [sum(move.num_bytes for move in apart.moves_from(rank)) for rank in range(4)]
    assert max(loads) - min(loads) <= 2 * 8 * 8 * 2, "two receivers, sizes 1 to 6, four senders"
    together = plan_reshard(source, generator_layout(shapes, replicas=4, num_kv_heads=1, first_device=2, host_size=2))
    senders = [{move.sender for move in together.moves_to(rank)} for rank in range(4)]
    assert senders[:2] == [{2}, {3}], "the same device"
    beside = plan_reshard(
        replace(source, host_size=3), generator_layout(shapes, num_kv_heads=1, first_device=5, host_size=3)
    )
    assert {move.sender for move in beside.moves_to(0)} == {3}, "the same host"


@pytest.mark.parametrize(("trainer_tp", "generator_tp", "o_proj"), [(1, 2, "int8"), (4, 2, "float32"), (2, 4, "int8")])
def test_quantized_bytes_travel_where_a_row_comes_from_one_sender(trainer_tp, generator_tp, o_proj) -> None:
    source = trainer_layout(SHAPES, fsdp=2, tp=trainer_tp, dtype="float32")
    plan = plan_reshard(source, generator_layout(SHAPES, tp=generator_tp, num_kv_heads=4, dtype="int8"))
    dtypes = [next(group.dtype for group in plan.groups if name in group.names) for name in SHAPES]
    assert dtypes == ["bfloat16", "int8", o_proj]
    move = next(move for move in plan.moves_to(0) if move.dtype == "int8")
    assert move.num_bytes == move.box.num_elements + 4 * move.box.shape[0], "values and a scale for each row"


LINKS = LinkSpeeds(network=50e9, host=450e9)


def _llama(name: str, fsdp: int, replicas: int, tp: int = 8) -> tuple[ShardLayout, ShardLayout]:
    model = MODELS[name]
    shapes = model.weights()
    source = trainer_layout(shapes, fsdp=fsdp, tp=8)
    first = source.num_ranks
    return source, generator_layout(
        shapes, tp=tp, replicas=replicas, num_kv_heads=model.num_kv_heads, first_device=first
    )


def test_a_405b_plan_is_made_in_time() -> None:
    start_s = time.thread_time()
    plan = plan_reshard(*_llama("llama3-405b", 64, 64))
    assert time.thread_time() - start_s < 100
    # Each generator rank receives its eighth, norms whole.
    elements = sum(move.box.num_elements for move in plan.moves_to(511))
    assert elements == pytest.approx(MODELS["llama3-405b"].num_parameters / 8, rel=1e-3)
    assert sum(len(group.senders_M) for group in plan.groups) < 10_000, "not one for each layer"


def test_transfer_times_are_those_of_the_busiest_link() -> None:
    """8B in bf16 to tensor parallel 8: 16.06 GB / 8 / 50 GB/s = 0.040 s, as trainers are as many as generators."""
    plan, transfer, reason = fastest(*_llama("llama3-8b", 8, 8), LINKS)
    assert transfer.seconds == pytest.approx(2 * 8.03e9 / 8 / 50e9, rel=0.01)
    assert reason.startswith("direct")
    changed = estimate(plan, LINKS, changed={"bfloat16": 0.028})
    assert changed.seconds == pytest.approx(transfer.seconds * (0.028 * 4 / 2), rel=0.01)
    assert delta_share("float8_e4m3fn", 0.5) == 1, "dense when a delta is larger"


def test_relays_gain_where_trainers_are_few() -> None:
    """8 trainers and 64 generator ranks: each trainer would send its eighth eight times."""
    source, destination = _llama("llama3-8b", 1, 8)
    direct = estimate(plan_reshard(source, destination), LINKS)
    _, relayed, reason = fastest(source, destination, LINKS)
    assert reason.startswith("relayed (by p2p): direct takes")
    assert direct.seconds == pytest.approx(8 * relayed.seconds, rel=0.02)


def test_replicas_on_one_host_take_it_from_the_first_of_them() -> None:
    """It enters the host once, by one adapter; so nothing is gained where each has one of its own."""
    plan = plan_reshard(*_llama("llama3-8b", 8, 64, tp=1))
    direct, relayed = (estimate(plan, LINKS, is_relayed=is_relayed) for is_relayed in (False, True))
    assert direct.network_bytes == pytest.approx(8 * relayed.network_bytes, rel=1e-3)
    assert relayed.seconds == pytest.approx(direct.seconds, rel=1e-3)


EXPERTS = {"mlp.experts.gate_proj": (8, 6, 10), "mlp.experts.down_proj": (8, 10, 6), "mlp.gate.weight": (8, 10)}


def mixture(num: int, dtype: str, box_of, first_device: int = 0) -> ShardLayout:
    """Layout of ranks that hold `box_of(name, shape, rank)`; the router is float32 and whole."""
    ranks = []
    for rank in range(num):
        boxes = {
            name: Box.whole(shape) if name.endswith("weight") else box_of(name, shape, rank)
            for name, shape in EXPERTS.items()
        }
        ranks.append({n: (EXPERTS[n], "float32" if n.endswith("weight") else dtype, box) for n, box in boxes.items()})
    return assemble_layout(ranks, first_device=first_device)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("by_expert", [True, False], ids=["experts", "columns"])
@pytest.mark.parametrize("expert_ranks", [4, 2])
def test_experts_go_from_expert_parallel_trainers_to_tensor_parallel_generators(dtype, by_expert, expert_ranks) -> None:
    """EP 4, or EP 2 and rows of each expert over two ranks of FSDP: each element once, and a scale for each row."""

    def held(_name: str, shape: tuple[int, ...], rank: int) -> Box:
        expert, row = divmod(rank, 4 // expert_ranks)
        rows = shape[1] * expert_ranks // 4
        return expert_box(shape, expert_ranks, expert).cut(1, row * rows, (row + 1) * rows)

    def wanted(name: str, shape: tuple[int, ...], rank: int) -> Box:
        return expert_box(shape, 2, rank) if by_expert else tensor_parallel_box(name, shape, 2, rank, 1)

    plan = plan_reshard(mixture(4, "bfloat16", held), mixture(2, dtype, wanted, first_device=4))
    check(plan)
    for rank in range(2):
        moves = [move for move in plan.moves_to(rank) if move.name in EXPERTS and not move.name.endswith("weight")]
        boxes = {name: wanted(name, shape, rank) for name, shape in EXPERTS.items() if not name.endswith("weight")}
        scales = sum(4 * box.shape[0] * box.shape[1] for box in boxes.values()) if dtype == "int8" else 0
        elements = sum(box.num_elements for box in boxes.values())
        assert sum(move.num_bytes for move in moves) == elements * DTYPE_BYTES[dtype] + scales
