"""What ranks hold, against torch's own account of it and against what FSDP2 really puts there."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torch_part
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from llamarl.parts.forecast.layouts import Shard, generator_layout, mesh_boxes, trainer_layout
from llamarl.sharding.box import Box
from llamarl.sharding.parallel_layout import Held, LayoutError, assemble_layout, stage_layers
from llamarl.sharding.tensor_parallel import tensor_parallel_box
from tests.nightly import examples


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(st.data())
def test_boxes_are_those_of_dtensor(data) -> None:
    """Replicate x FSDP x TP; sizes need not divide, except by tensor parallelism, as torch's own account then errs."""
    mesh = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
    shape = data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    dim = data.draw(st.sampled_from([None, *range(len(shape))]))
    if dim is not None:
        shape[dim] *= mesh[2]
    ours = (None, Shard(0, strided=dim == 0), None if dim is None else Shard(dim))
    rows = _StridedShard(0, split_factor=mesh[2]) if dim == 0 else TorchShard(0)
    theirs = (Replicate(), rows, Replicate() if dim is None else TorchShard(dim))
    held = Held(tuple(shape), "float32", mesh_boxes(shape, mesh, ours))
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        local, offset = torch_part(shape, mesh, list(coordinate), theirs)
        box = held.box(rank)
        assert box is None if not math.prod(local) else (box.shape, box.starts) == (local, offset)


def test_strided_axes_cut_from_right_to_left() -> None:
    mesh, shape = (2, 3, 2), (24,)
    held = Held(shape, "float32", mesh_boxes(shape, mesh, (Shard(0, strided=True), Shard(0, strided=True), Shard(0))))
    theirs = (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), TorchShard(0))
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        box = held.box(rank)
        assert box and (box.shape, box.starts) == torch_part(shape, mesh, list(coordinate), theirs)


class _Model(nn.Module):
    """Sizes that neither 3 FSDP ranks nor, in `v_proj`, 2 tensor-parallel ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 10)
        self.v_proj = nn.Linear(6, 7, bias=False)
        self.o_proj = nn.Linear(10, 5)
        self.norm = nn.LayerNorm(2, bias=False)


@pytest.mark.parametrize(("replicate", "fsdp", "tp"), [(1, 3, 2), (2, 2, 2)])
def test_boxes_are_what_fsdp2_holds(replicate: int, fsdp: int, tp: int) -> None:
    """A fake process group makes one process each rank in turn: sharding itself sends nothing."""
    whole = {name: torch.arange(one.numel()).view(one.shape).float() for name, one in _Model().named_parameters()}
    layout = trainer_layout({name: one.shape for name, one in whole.items()}, fsdp=fsdp, tp=tp, replicate=replicate)
    plan = {"q_proj": ColwiseParallel(), "v_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    for rank in range(layout.num_ranks):
        dist.init_process_group("fake", rank=rank, world_size=layout.num_ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (replicate, fsdp, tp), mesh_dim_names=("replicate", "fsdp", "tp"))
            model = _Model()
            model.load_state_dict(whole)
            parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
            fully_shard(model, mesh=mesh["replicate", "fsdp"] if replicate > 1 else mesh["fsdp"])
            boxes = layout.boxes(rank)
            for name, parameter in model.named_parameters():
                local = parameter.to_local()
                expected = whole[name][boxes[name].within(Box.whole(whole[name].shape))] if name in boxes else None
                assert local.numel() == 0 if expected is None else torch.equal(local, expected), (rank, name)
        finally:
            dist.destroy_process_group()


def test_pipeline_stages_hold_their_layers_and_a_tied_embedding_twice() -> None:
    names = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
    names |= {f"model.layers.{layer}.mlp.up_proj.weight": (6, 4) for layer in range(5)}
    assert [list(layers) for layers in stage_layers(5, 2)] == [[0, 1, 2], [3, 4]]
    tied = trainer_layout(names, fsdp=2, pp=2)
    untied = trainer_layout(names | {"lm_head.weight": (8, 4)}, fsdp=2, pp=2)
    where = {name: [rank for rank in range(4) if name in untied.boxes(rank)] for name in untied.parameters}
    assert where["model.embed_tokens.weight"] == [0, 1]
    assert where["lm_head.weight"] == where["model.norm.weight"] == [2, 3]
    assert [where[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (2, 3)] == [[0, 1], [2, 3]]
    assert [tied.boxes(rank)["model.embed_tokens.weight"].starts for rank in range(4)] == [(0, 0), (4, 0)] * 2


def test_generators_hold_tensor_parallel_boxes_and_float_embeddings() -> None:
    shapes = {"model.embed_tokens.weight": (8, 4), "layers.0.k_proj.weight": (8, 4), "layers.0.k_proj.bias": (8,)}
    layout = generator_layout(shapes, tp=4, replicas=3, num_kv_heads=2, dtype="int8")
    assert {name: held.dtype for name, held in layout.parameters.items()} == {
        "model.embed_tokens.weight": "bfloat16",
        "layers.0.k_proj.weight": "int8",
        "layers.0.k_proj.bias": "bfloat16",
    }
    for rank in range(12):
        assert layout.boxes(rank) == {
            name: tensor_parallel_box(name, shape, 4, rank % 4, 2) for name, shape in shapes.items()
        }


def test_ranks_that_say_what_they_hold() -> None:
    scalar = ((), "float32", Box((), ()))
    parts = [{"a": ((4, 3), "float32", Box((row, 0), (row + 2, 3))), "s": scalar} for row in (0, 2)]
    layout = assemble_layout([*parts, {}])
    assert [sorted(layout.boxes(rank)) for rank in range(3)] == [["a", "s"], ["a", "s"], []]
    assert layout.boxes(1) == {name: box for name, (_, _, box) in parts[1].items()}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (((4, 4), "float32", Box((0, 0), (4, 4))), r"a: rank 1 holds it as float32 \(4, 4\)"),
        (((4, 3), "bfloat16", Box((0, 0), (4, 3))), "a: rank 1 holds it as bfloat16"),
        (((4, 3), "float32", Box((2, 0), (5, 3))), "a: rank 1 holds .* not within"),
    ],
)
def test_ranks_that_disagree(other, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        assemble_layout([{"a": ((4, 3), "float32", Box((0, 0), (2, 3)))}, {"a": other}])
    assert caught.value.parameter == "a"
