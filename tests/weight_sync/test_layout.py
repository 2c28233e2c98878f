"""Tensors lie one behind the other, aligned, without overlap."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from llamarl.weight_sync.layout import ALIGNMENT_BYTES, Address, TensorSpec, lay_out

SPECS = st.lists(
    st.builds(
        TensorSpec.whole,
        name=st.text(max_size=5),
        shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=8,
)


@given(SPECS)
def test_aligned_without_overlap(specs: list[TensorSpec]) -> None:
    layout = lay_out(specs)
    end = 0
    for spec, offset in zip(layout.specs, layout.offsets_bytes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert offset >= end
        assert offset - end < ALIGNMENT_BYTES, "no more than the gap to the next cache line"
        end = offset + spec.num_bytes
    assert end <= layout.num_bytes < end + ALIGNMENT_BYTES
    assert layout.specs == tuple(specs)


def test_bytes() -> None:
    assert TensorSpec.whole("a", (3, 5), dtype="float32").num_bytes == 60
    assert TensorSpec.whole("a", (3, 5), dtype="bfloat16").num_bytes == 30
    assert TensorSpec.whole("a", (), dtype="float32").num_bytes == 4


def test_an_address_survives_pickling() -> None:
    address = Address(transport="p2p", publisher="1f", num_writers=2, places={"ab": "127.0.0.1:1"})
    assert pickle.loads(pickle.dumps(address)) == address


def test_layouts_are_told_apart_by_their_digest() -> None:
    one, other = (TensorSpec.whole("a", (4,), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert lay_out([one]).digest == lay_out([one]).digest != lay_out([other]).digest
