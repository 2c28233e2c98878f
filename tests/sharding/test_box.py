"""Boxes, and what tensor parallelism gives each rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamarl.sharding.box import Box
from llamarl.sharding.tensor_parallel import sharded_dim, tensor_parallel_box

SHAPE = (6, 8)


@st.composite
def boxes(draw):
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in SHAPE]
    return Box(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))


def mask(box):
    grid = np.zeros(SHAPE, bool)
    grid[box.within(Box.whole(SHAPE))] = True
    return grid


@given(boxes(), boxes())
def test_an_intersection_holds_what_both_hold(first, second):
    common = first.intersection(second)
    expected = mask(first) & mask(second)
    assert (common is None) == (not expected.any())
    if common is not None:
        assert (mask(common) == expected).all()
        assert common.num_elements == expected.sum()


def test_within_counts_from_the_outer_box():
    outer = Box((2, 4), (6, 8))
    assert Box((3, 4), (5, 6)).within(outer) == (slice(1, 3), slice(0, 2))


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 0),
        ("model.layers.0.self_attn.k_proj.bias", 0),
        ("model.layers.0.self_attn.o_proj.weight", 1),
        ("model.layers.0.mlp.down_proj.weight", 1),
        ("model.layers.0.mlp.down_proj.bias", None),
        ("model.layers.0.self_attn.q_norm.weight", None),
        ("model.layers.0.input_layernorm.weight", None),
        ("model.embed_tokens.weight", 0),
        ("lm_head.weight", 0),
        ("model.norm.weight", None),
    ],
)
def test_which_dim_is_cut(name, dim):
    assert sharded_dim(name) == dim


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["layers.0.q_proj.weight", "layers.0.o_proj.weight", "embed_tokens.weight"])
def test_the_ranks_hold_everything_once(name, num_ranks):
    held = sum(mask(tensor_parallel_box(name, (4, 8), num_ranks, rank, 4)).astype(int)[:4] for rank in range(num_ranks))
    assert (held[:4] == 1).all()


def test_kv_heads_are_shared_when_there_are_more_ranks():
    held = [tensor_parallel_box("layers.0.k_proj.weight", (8, 4), 4, rank, 2) for rank in range(4)]
    assert [box.starts[0] for box in held] == [0, 0, 4, 4]
    assert all(box.shape == (4, 4) for box in held)


def test_what_cannot_be_shared_is_named():
    with pytest.raises(ValueError, match=r"o_proj\.weight has 6"):
        tensor_parallel_box("layers.0.o_proj.weight", (4, 6), 4, 0, 4)
    with pytest.raises(ValueError, match="3 kv heads"):
        tensor_parallel_box("layers.0.k_proj.weight", (6, 4), 4, 0, 3)
